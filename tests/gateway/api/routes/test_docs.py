"""The page at /docs: it works without Internet access, and with API keys."""

import asyncio
import re
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from tests.support.gateway.http import LiveGateway

_REFERENCE = re.compile(r"""(?:src|href)=["']([^"']+)["']|\burl: '([^']+)'""")
_IN_STYLES = re.compile(r"""(?:url\(|@import\s+)["']?([^"')\s]+)""")


async def references(gateway: LiveGateway) -> list[str]:
    """The absolute URLs that the page and its styles load."""
    page = (await gateway.http.get("/docs")).text
    found = [urljoin(gateway.url, match[1] or match[2]) for match in _REFERENCE.finditer(page)]
    for url in [url for url in found if url.endswith(".css")]:
        styles = (await gateway.http.get(url)).text
        found += [urljoin(url, match[1]) for match in _IN_STYLES.finditer(styles)]
    return found


async def test_everything_that_the_page_loads_comes_from_the_gateway(
    closed_gateway: LiveGateway,
) -> None:
    loaded = [url for url in await references(closed_gateway) if not url.startswith("data:")]
    statuses = [(await closed_gateway.http.get(url)).status_code for url in loaded]

    assert {Path(urlsplit(url).path).suffix for url in loaded} == {".css", ".js", ".json", ".png"}
    assert {urljoin(url, "/") for url in loaded} == {f"{closed_gateway.url}/"}
    assert set(statuses) == {200}


async def test_the_browser_may_load_nothing_from_other_hosts(gateway: LiveGateway) -> None:
    policy = (await gateway.http.get("/docs")).headers["content-security-policy"]

    sources = {source for directive in policy.split("; ") for source in directive.split()[1:]}
    assert policy.startswith("default-src 'self'")
    assert sources == {"'self'", "'unsafe-inline'", "'none'", "data:"}


async def test_a_request_from_the_page_needs_a_key(closed_gateway: LiveGateway) -> None:
    assert (await closed_gateway.http.get("/v1/models")).status_code == 401


async def test_many_who_ask_for_the_document_at_once_wait_for_one_build(
    gateway: LiveGateway,
) -> None:
    answers = await asyncio.gather(*(gateway.http.get("/openapi.json") for _ in range(8)))

    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
    assert len({answer.content for answer in answers}) == 1
    assert "/v1/chat/completions" in answers[0].json()["paths"]


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
async def test_pages_of_the_framework_that_need_a_cdn_are_gone(
    path: str, gateway: LiveGateway
) -> None:
    assert (await gateway.http.get(path)).status_code == 404
