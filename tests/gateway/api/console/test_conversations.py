"""The conversations that the console keeps in the browser, and their branches."""

import json
from pathlib import Path

from playwright.async_api import Locator, Page, expect

from shared.messages import ChatPrompt
from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import answered, ask, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.scripted_worker import (
    ScriptedJob,
    ScriptedWorker,
    wait_before_the_end,
)


def listed(page: Page) -> Locator:
    """The titles in the list of conversations."""
    return page.locator("#conversations .title")


def said(job: ScriptedJob) -> list[str]:
    """The contents of the messages of a job."""
    (prompt,) = job.job.prompts
    assert isinstance(prompt, ChatPrompt)
    return [str(message.content) for message in prompt.messages]


async def ask_first(page: Page, gateway: LiveGateway, question: str) -> None:
    """Open the console, and ask something that is answered."""
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, question)
    await answered(page)


async def test_conversations_outlast_their_tab_and_are_renamed_and_deleted(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await ask_first(page, gateway, "first question")
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator(".answer")).to_have_count(0)
    await ask(page, "second question")
    await answered(page)

    tab = await page.context.new_page()
    await open_console(tab, gateway)
    await expect(listed(tab)).to_have_text(["second question", "first question"])
    await listed(tab).nth(1).click()
    await expect(tab.locator(".answer")).to_have_text("first question")
    await tab.get_by_role("button", name="Rename this conversation").click()
    await tab.get_by_label("Title").fill("The first one")
    await tab.get_by_role("dialog").get_by_role("button", name="Rename").click()
    await expect(listed(tab)).to_have_text(["second question", "The first one"])
    assert await faults(tab) == []
    await expect(listed(page)).to_have_text(["second question", "The first one"])

    await tab.get_by_role("button", name="Delete this conversation").click()
    await tab.get_by_role("dialog").get_by_role("button", name="Delete").click()

    await expect(listed(tab)).to_have_text(["second question"])
    await expect(listed(page)).to_have_text(["second question"])
    await expect(tab.locator(".answer")).to_have_count(0)


async def test_a_regenerated_answer_is_another_branch(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_how_often(job: ScriptedJob) -> None:
        await job.start()
        await job.finish(f"answer {len(worker.jobs)}")

    worker.script = say_how_often
    await ask_first(page, gateway, "a question")
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator(".answer")).to_have_text("answer 2")
    await expect(page.locator(".branches")).to_contain_text("2 of 2")
    await page.get_by_role("button", name="Previous branch").click()
    await expect(page.locator(".answer")).to_have_text("answer 1")

    await ask(page, "and then?")
    await expect(page.locator(".answer").nth(1)).to_have_text("answer 3")
    await page.reload()

    await expect(page.locator(".answer")).to_have_text(["answer 1", "answer 3"])
    await page.get_by_role("button", name="Next branch").click()
    await expect(page.locator(".answer")).to_have_text(["answer 2"])
    assert [said(job) for job in worker.jobs] == [
        ["a question"],
        ["a question"],
        ["a question", "answer 1", "and then?"],
    ]


async def test_an_edited_message_begins_another_branch(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await ask_first(page, gateway, "one")
    await ask(page, "two")
    await expect(page.locator(".answer").nth(1)).to_have_text("two")

    await page.get_by_role("button", name="Edit").nth(1).click()
    field = page.get_by_label("The edited message")
    await expect(field).to_have_value("two")
    await field.fill("three")
    await page.get_by_role("button", name="Ask this instead").click()

    await expect(page.locator(".answer")).to_have_text(["one", "three"])
    await expect(page.locator(".branches:visible")).to_contain_text("2 of 2")
    assert said(worker.jobs[2]) == ["one", "one", "three"]


async def test_a_conversation_is_exported(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    await ask_first(page, gateway, "What is *this*?")
    files = {}
    for form in ("JSON", "Markdown"):
        await page.get_by_role("button", name="Export this conversation").click()
        async with page.expect_download() as downloading:
            await page.get_by_role("dialog").get_by_role("button", name=form).click()
        download = await downloading.value
        await download.save_as(tmp_path / form)
        files[download.suggested_filename] = (tmp_path / form).read_text(encoding="utf-8")

    exported = json.loads(files["What-is-this.json"])
    assert exported["messages"] == [
        {"role": "user", "content": "What is *this*?"},
        {"role": "assistant", "content": "What is *this*?"},
    ]
    assert len(exported["turns"]) == 1
    text = files["What-is-this.md"]
    assert text.startswith("# What is *this*?\n\n## Question\n\nWhat is *this*?\n\n## Answer of ")


async def test_an_answer_goes_on_while_another_conversation_is_open(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    may_end = wait_before_the_end(worker)
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "a long story")
    await page.locator(".answer.waiting").wait_for()
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()

    may_end.set()
    await listed(page).first.click()

    assert await answered(page) == "done"


async def test_a_reloaded_page_shows_the_conversation_and_reads_on(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await ask_first(page, gateway, "before")
    may_end = wait_before_the_end(worker)
    await ask(page, "a long story")
    await page.locator(".answer.waiting").wait_for()

    await page.reload()
    may_end.set()

    await expect(page.locator(".answer")).to_have_text(["before", "done"])


async def test_answers_have_a_limit_of_tokens_until_the_user_lifts_it(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    field = page.get_by_label("Maximum tokens")
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await expect(field).not_to_have_value("")
    limit = int(await field.input_value())
    assert 0 < limit <= worker.announcement.max_seq_len // 2
    await ask(page, "one")
    await answered(page)

    await field.fill("")
    await page.reload()
    await expect(page.locator("#model")).to_have_value(worker.model)
    await expect(field).to_have_value("")
    await ask(page, "two")
    await expect(page.locator(".answer").nth(1)).to_have_text("two")

    assert [job.job.sampling.max_tokens for job in worker.jobs] == [limit, None]
