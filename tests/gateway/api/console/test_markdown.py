"""Answers in the console are Markdown: harmless whatever it contains, and calm while it grows."""

import json
from typing import Any

from playwright.async_api import Page, Request, expect

from tests.gateway.api.console.test_accessibility import NARROW, faults
from tests.support.console import answered, ask, open_console
from tests.support.gateway.http import LiveGateway, hears_a_worker
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

ANSWER = """## Cities

Some **bold** and `inline` words, see [the list](https://example.org/list).

| City | People |
|:--|--:|
| Paris | 2,102,650 |

1. one
   - nested

```python
def capital():
    return "Paris"
```

> quoted

- [x] done

The end.
"""
HOSTILE = (
    "<script>parent.hacked = 1</script>",
    "<img src=x onerror='parent.hacked = 1'>",
    '<svg><script>parent.hacked = 1</script><animate onbegin="parent.hacked = 1"></svg>',
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "<math><mtext><table><mglyph><style><img src=x onerror=parent.hacked=1></style></mglyph>",
    "<b onmouseover='parent.hacked = 1' style='position:fixed;inset:0'>over</b>",
    "<form action='/admin/v1/status'><button formaction='javascript:parent.hacked=1'>x</button>",
    "[click](javascript:parent.hacked=1) [click](JaVaScRiPt&colon;parent.hacked=1)",
    "[click](data:text/html,<script>parent.hacked=1</script>) [x](//example.org) [x](/docs)",
    "![picture](https://example.org/pixel.png?secret) ![x](/metrics)",
    "<a href='https://example.org' id='question' name='composer' target='_top'>clobber</a>",
    "```html\n<img src=x onerror=parent.hacked=1>\n```",
    '```"><img/src=x onerror=parent.hacked=1>\ncode\n```',
    '> ```x" onmouseover="parent.hacked=1\n> code\n> ```',
    "<link rel=stylesheet href=https://example.org/x.css><meta http-equiv=refresh content=0>",
    "[x]: javascript:parent.hacked=1\n\n[x] and <https://example.org/'onclick='parent.hacked=1>",
    "| <img src=x onerror=parent.hacked=1> | b |\n|---|---|\n| <iframe src=/docs></iframe> | c |",
)
FORBIDDEN = "script, style, img, svg, iframe, form, link, meta, math, input"
LATER = (
    *(
        "para\n",
        "===\n",
        "---\n",
        "- a\n",
        "1. b\n",
        "  - c\n",
        "\n",
        "\n\n",
        "> q\n",
        "**bo",
        "ld** ",
    ),
    *(
        "```js\n",
        "x = 1\n",
        "```\n",
        "| a | b |\n",
        "|--|--|\n",
        "| 1 | 2 |\n",
        "[t][r] ",
        "    in\n",
    ),
)


def speak(worker: ScriptedWorker, text: str, size: int = 5) -> None:
    """Have the worker answer with the text, in pieces of some characters."""

    async def say(job: ScriptedJob) -> None:
        await job.start()
        for place in range(0, len(text), size):
            await job.say(text[place : place + size])
        await job.finish()

    worker.script = say


async def test_an_answer_is_shown_as_markdown(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    speak(worker, ANSWER)
    await hears_a_worker(gateway)
    await open_console(page, gateway)

    await ask(page, "Which cities?")
    await answered(page)

    answer = page.locator(".answer")
    await expect(answer.get_by_role("heading", name="Cities")).to_be_visible()
    await expect(answer.get_by_role("cell", name="2,102,650")).to_have_css("text-align", "right")
    await expect(answer.locator("ol > li li")).to_have_text("nested")
    await expect(answer.locator("blockquote")).to_have_text("quoted")
    link = answer.get_by_role("link", name="the list")
    await expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    await expect(answer.locator(".code-bar")).to_contain_text("python")
    await expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    await answer.get_by_role("button", name="Copy the python").click()
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def capital():\n    return "Paris"'
    found = await faults(page)
    await page.emulate_media(color_scheme="dark")
    await page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    assert found + await faults(page) == []

    await page.set_viewport_size({"width": 1280, "height": 800})
    await page.get_by_label("Show answers as Markdown").uncheck()
    assert await answer.text_content() == ANSWER


async def test_hostile_markdown_is_harmless(
    page: Page, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    speak(worker, "\n\n".join(HOSTILE), size=50)
    await hears_a_worker(gateway)
    await open_console(page, gateway)
    foreign: list[str] = []

    def note(request: Request) -> None:
        if not request.url.startswith(f"{gateway.url}/") or request.resource_type == "image":
            foreign.append(request.url)

    page.on("request", note)

    await ask(page, "Do your worst.")
    await answered(page)
    for target in await page.locator(".answer b, .answer .code").all():
        await target.hover()

    harmful = """FORBIDDEN => [...document.querySelectorAll(".answer *")].flatMap((element) => [
        ...[...element.attributes].map(({ name }) => name)
          .filter((name) => /^on|^style$|^id$|^name$|^src|^form/.test(name)),
        ...(element.matches(FORBIDDEN) ? [element.outerHTML] : []),
        ...(element.href && !/^(https?|mailto):/.test(element.href) ? [element.href] : []),
        ...(element.getAttribute("href")?.startsWith("/") ? [element.getAttribute("href")] : []),
      ])"""
    assert await page.evaluate(harmful, FORBIDDEN) == []
    assert await page.evaluate("window.hacked") is None
    assert foreign == []
    await expect(page.locator(".answer")).to_contain_text("<script>parent.hacked = 1</script>")


async def test_a_selection_in_an_earlier_block_outlasts_the_text_that_follows(
    page: Page, gateway: LiveGateway
) -> None:
    await open_console(page, gateway)

    kept: Any = await page.evaluate(
        """async () => {
          const { MarkdownText } = await import("/console/answer.js");
          const place = document.querySelector("#turns");
          const text = new MarkdownText(place);
          text.write("First **block**.\\n\\nSecond.\\n\\nThird.\\n\\n```py\\nx = 1\\n");
          const button = place.querySelector("button");
          button.focus();
          getSelection().selectAllChildren(place.querySelector("p"));
          for (const piece of ["y = 2\\n", "```\\n", "\\nMore *and* more", ".\\n\\n# End"]) {
            text.drawnAt = -Infinity; // each piece is drawn
            text.write(piece);
          }
          text.finish();
          const isFocused = document.activeElement === button;
          return [getSelection().toString(), isFocused, place.querySelector("code").textContent];
        }"""
    )

    assert kept == ["First block.", True, "x = 1\ny = 2"]


async def test_text_in_pieces_ends_as_the_whole_text_would(
    page: Page, gateway: LiveGateway
) -> None:
    await open_console(page, gateway)

    different: Any = await page.evaluate(
        """async (parts) => {
          const { MarkdownText } = await import("/console/answer.js");
          let state = 1;
          const draw = (size) => (state = (state * 48271) % 2147483647) % size;
          const found = [];
          for (let round = 0; round < 60; round += 1) {
            const pieces = Array.from({ length: 4 + draw(16) }, () => parts[draw(parts.length)]);
            const [one, other] = [document.createElement("div"), document.createElement("div")];
            const grown = new MarkdownText(one);
            for (const piece of pieces) {
              grown.drawnAt = -Infinity; // each piece is drawn
              grown.write(piece);
            }
            grown.finish();
            const whole = new MarkdownText(other);
            whole.write(pieces.join(""));
            const htmls = [one.innerHTML, other.innerHTML];
            if (htmls[0] !== htmls[1]) found.push([pieces.join(""), ...htmls]);
          }
          return found;
        }""",
        list(LATER),
    )

    assert different == [], json.dumps(different[:1], indent=1)
