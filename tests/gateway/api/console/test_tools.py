"""Tools in the console's chat, in Chromium: the user declares them and writes their results."""

import json
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from playwright.async_api import Page, expect

from shared.bus.memory import MemoryBus
from shared.messages import ChatMessage, ChatPrompt
from tests.gateway.api.console.test_accessibility import NARROW, faults
from tests.support.console import ask, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def messages_of(job: ScriptedJob) -> tuple[ChatMessage, ...]:
    (prompt,) = job.job.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


async def call_and_repeat_the_result(job: ScriptedJob) -> None:
    last = messages_of(job)[-1]
    await job.start()
    await job.finish(f"It is {last.content}." if last.role == "tool" else CALL)


@pytest.fixture
async def caller(bus: MemoryBus) -> AsyncIterator[ScriptedWorker]:
    """A worker whose model calls a tool for each question."""
    worker = ScriptedWorker(bus, call_and_repeat_the_result)
    worker.announcement = replace(worker.announcement, tool_parser="hermes")
    async with worker:
        yield worker


@pytest.fixture
async def chat(page: Page, bus: MemoryBus, caller: ScriptedWorker) -> AsyncIterator[LiveGateway]:
    """A gateway, and its open chat with a declared tool."""
    async with live_gateway(bus) as gateway:
        await hears_a_worker(gateway)
        await open_console(page, gateway)
        await page.get_by_label("Tools, as JSON").fill(json.dumps([WEATHER]))
        yield gateway


async def test_a_call_is_answered_by_the_user_and_the_answer_goes_on(
    page: Page, chat: LiveGateway, caller: ScriptedWorker
) -> None:
    await ask(page, "Is it cold?")
    result = page.get_by_label("Result 1, of weather")
    await result.fill("-3 °C")
    await expect(page.locator(".calls pre").first).to_contain_text('"city": "Oslo"')

    await page.get_by_role("button", name="Send the results").click()

    await expect(page.locator(".answer").nth(1)).to_have_text("It is -3 °C.")
    await expect(result).to_be_hidden()
    question, called, answered = messages_of(caller.jobs[1])
    assert (question.content, answered.role, answered.content) == ("Is it cold?", "tool", "-3 °C")
    assert [(call.name, call.id) for call in called.tool_calls] == [
        ("weather", answered.tool_call_id)
    ]


async def test_a_call_waits_for_its_result_after_a_reload(page: Page, chat: LiveGateway) -> None:
    await ask(page, "Is it cold?")
    await page.get_by_label("Result 1, of weather").wait_for()

    await page.reload()

    await page.get_by_label("Result 1, of weather").fill("warm")
    await page.get_by_role("button", name="Send the results").click()
    await expect(page.locator(".answer").nth(1)).to_have_text("It is warm.")


async def test_a_question_may_follow_a_call_without_a_result(
    page: Page, chat: LiveGateway, caller: ScriptedWorker
) -> None:
    await ask(page, "Is it cold?")
    await page.get_by_label("Result 1, of weather").wait_for()

    await ask(page, "Is it late?")

    await page.get_by_label("Result 1, of weather").nth(1).wait_for()
    said = [(message.role, message.content) for message in messages_of(caller.jobs[1])]
    assert said == [("user", "Is it cold?"), ("assistant", ""), ("user", "Is it late?")]


@pytest.mark.parametrize(
    ("declared", "problem"), [("[{", "not valid JSON"), ('[{"type": "x"}]', "a list of functions")]
)
async def test_wrong_tools_are_not_sent(
    page: Page, chat: LiveGateway, caller: ScriptedWorker, declared: str, problem: str
) -> None:
    await page.get_by_label("Tools, as JSON").fill(declared)

    await ask(page, "Is it cold?")

    await expect(page.get_by_role("alert").filter(has_text=problem)).to_be_visible()
    await expect(page.get_by_label("Tools, as JSON")).to_be_focused()
    await expect(page.get_by_label("Your message")).to_have_value("Is it cold?")
    assert caller.jobs == []


async def test_a_call_breaks_no_rule_of_accessibility(page: Page, chat: LiveGateway) -> None:
    await ask(page, "Is it cold?")
    await page.get_by_label("Result 1, of weather").wait_for()

    found = await faults(page)
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    found += await faults(page)

    assert found == []
