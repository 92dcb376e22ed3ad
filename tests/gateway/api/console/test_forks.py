"""Answers that are continued at one of their tokens, in Chromium."""

from playwright.async_api import Page, expect

from shared.messages import Constraint
from tests.gateway.api.console.test_accessibility import faults
from tests.support.console import answered, ask, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

WORDS = ("one ", "two ", "three ", "four")


async def test_an_answer_is_regenerated_from_the_cursor_and_continued_behind_other_text(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_other_words(job: ScriptedJob) -> None:
        """Say the tokens that are given, and behind them how many answers there are."""
        await job.start()
        given = job.job.given_ids
        for word in WORDS[: len(given) or -1]:
            await job.say(word)
        await job.finish(f"answer {len(worker.jobs)}" if given else WORDS[-1])

    worker.script = say_other_words
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    await ask(page, "a question")
    assert await answered(page) == "one two three four"
    field = page.get_by_label("The edited answer")

    await page.get_by_role("button", name="Change answer").click()
    await expect(field).to_have_value("one two three four")
    assert await faults(page) == []
    await field.evaluate("(field) => field.setSelectionRange(10, 10)")
    await page.get_by_role("button", name="Regenerate from the cursor").click()
    await expect(page.locator(".answer")).to_have_text("one two answer 2")
    await expect(page.locator(".branches")).to_contain_text("2 of 2")
    await page.get_by_role("button", name="Change answer").click()
    await field.fill("one 2+2 is")
    await page.get_by_role("button", name="Continue this text").click()

    await expect(page.locator(".answer")).to_have_text("one answer 3")
    await expect(page.locator(".branches")).to_contain_text("3 of 3")
    jobs = [job.job for job in worker.jobs]
    assert [job.given_ids for job in jobs] == [(), (4, 4), (4,)]
    constraints = [job.sampling.constraint for job in jobs]
    assert constraints == [None, None, Constraint(kind="regex", source=r"one 2\+2 is[\s\S]*")]
