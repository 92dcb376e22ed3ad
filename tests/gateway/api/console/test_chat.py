"""The console's chat, in Chromium: answers survive workers that die and pages that are reloaded."""

import asyncio
from pathlib import Path

from playwright.async_api import Page, expect

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Failed
from tests.support.console import (
    SLOW_STEP_S,
    answered,
    ask,
    ask_for_many_tokens,
    begun,
    open_console,
)
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker, start_only
from tests.support.workers.synthetic import doomed_worker, echo_worker


async def undisturbed(page: Page, gateway: LiveGateway, broker: MemoryBroker) -> str:
    """The answer of a worker that nobody disturbs."""
    async with echo_worker(broker):
        await hears_a_worker(gateway)
        await open_console(page, gateway)
        await ask_for_many_tokens(page)
        text = await answered(page)
        await page.get_by_role("button", name="New conversation").click()
    return text


async def test_a_question_is_answered(page: Page, gateway: LiveGateway) -> None:
    await hears_a_worker(gateway)
    await open_console(page, gateway)

    await ask(page, "one two three")

    assert await answered(page) == "one two three"
    await expect(page.locator(".after")).to_contain_text("3 tokens")
    await expect(page.locator("#spoken")).to_have_text("one two three")


async def test_the_next_question_follows_the_conversation(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await page.get_by_label("System message").fill("Be brief.")

    await ask(page, "first")
    await answered(page)
    await ask(page, "second")
    await expect(page.locator(".answer").nth(1)).to_have_text("second")

    (prompt,) = worker.jobs[1].job.prompts
    said = [(message.role, message.content) for message in getattr(prompt, "messages", ())]
    assert said == [
        ("system", "Be brief."),
        ("user", "first"),
        ("assistant", "first"),
        ("user", "second"),
    ]


async def test_an_answer_whose_worker_dies_is_completed_by_another_and_equal(
    page: Page, broker: MemoryBroker
) -> None:
    async with live_gateway(broker) as gateway:
        expected = await undisturbed(page, gateway, broker)
        async with doomed_worker(broker, step_s=SLOW_STEP_S):
            await ask_for_many_tokens(page)
            seen = await begun(page)
        async with echo_worker(broker):
            text = await answered(page)

    assert text == expected
    assert expected.startswith(seen)
    assert len(seen) < len(expected)
    await expect(page.locator(".notes")).to_have_text("Worker lost, continued on another")
    await expect(page.locator(".answer .seam")).to_have_count(1)


async def test_an_answer_whose_page_is_reloaded_goes_on_and_is_equal(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    may_go_on = asyncio.Event()

    async def wait_in_the_middle(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one two ")
        await may_go_on.wait()
        await job.say("three ")
        await job.finish("four")

    worker.script = wait_in_the_middle
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "anything")
    seen = await begun(page)
    await page.reload()
    may_go_on.set()
    text = await answered(page)

    assert text == "one two three four"
    assert text.startswith(seen)
    await expect(page.locator(".notes")).to_be_hidden()


async def test_a_takeover_during_a_reload_is_shown_once(
    page: Page, gateway: LiveGateway, bus: MemoryBus, worker: ScriptedWorker
) -> None:
    may_end = asyncio.Event()

    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await start_only(job)

    async def go_on(job: ScriptedJob) -> None:
        await job.start()
        await job.say("two ")
        await may_end.wait()
        await job.finish("three")

    worker.script = say_one_word
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "anything")
    await begun(page)
    await worker.__aexit__()
    async with ScriptedWorker(bus, go_on):
        await page.locator(".notes li").wait_for()
        await page.reload()
        may_end.set()
        text = await answered(page)

    assert text == "one two three"
    await expect(page.locator(".notes li")).to_have_count(1)


async def test_a_stopped_answer_is_cancelled_and_stays(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_one_word(job: ScriptedJob) -> None:
        await job.start()
        await job.say("one ")
        await start_only(job)

    worker.script = say_one_word
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "anything")
    await begun(page)

    await page.keyboard.press("Escape")

    assert await answered(page) == "one "
    await expect(page.locator(".after")).to_contain_text("Stopped")
    await worker.wait_cancelled(worker.jobs[0].job.request_id)


async def test_an_error_is_shown_where_the_answer_would_be(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def refuse(job: ScriptedJob) -> None:
        await job.publish(Failed(code="context_length_exceeded", message="It is too long."))

    worker.script = refuse
    await hears_a_worker(gateway)
    await open_console(page, gateway)

    await ask(page, "anything")

    await expect(page.get_by_role("alert").filter(has_text="too long")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def test_a_user_sees_a_worker_that_starts_after_the_page(
    page: Page, broker: MemoryBroker, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("alice")
    async with live_gateway(broker, keys_file=file.path) as gateway:
        await page.goto(gateway.url)
        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Use the key").click()
        await expect(page.locator("#pulse")).to_have_text("No workers")

        async with echo_worker(broker):
            await expect(page.locator("#pulse")).to_have_text("Ready")
            await expect(page.locator("#model")).to_have_value("echo")


async def test_a_gateway_with_keys_asks_for_one(
    page: Page, bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("alice", scopes=("generate", "cancel"))
    async with live_gateway(bus, keys_file=file.path) as gateway:
        await page.goto(gateway.url)
        await page.get_by_label("Key", exact=True).fill("wk-0000000000-wrong")
        await page.get_by_role("button", name="Use the key").click()
        await expect(page.locator("#key-error")).to_contain_text("Incorrect API key")

        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Use the key").click()
        await page.locator(f"#model option[value={MODEL}]").wait_for(state="attached")
        await ask(page, "one two")
        text = await answered(page)
        await page.reload()
        await expect(page.locator(".answer")).to_have_text("one two")
        await page.get_by_role("link", name="Fleet").click()
        await expect(page.locator("#view-fleet .refusal")).to_contain_text("scope: operator")

    assert text == "one two"


async def test_a_request_is_copied_as_a_command(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "it's here")
    await answered(page)

    await page.get_by_role("button", name="Copy as curl").click()
    await page.locator(".toasts p").wait_for()
    command = await page.evaluate("navigator.clipboard.readText()")

    script = command.replace("$OPENAI_API_KEY", "none").replace("curl ", "curl --silent --fail ", 1)
    process = await asyncio.create_subprocess_shell(script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().rstrip().endswith("data: [DONE]")
