"""The console's files: it loads nothing from elsewhere, and its page needs no key."""

import re
from hashlib import sha256
from pathlib import Path
from urllib.parse import urljoin

from gateway.api.routes.console import FILES
from tests.support.gateway.http import LiveGateway

_REFERENCE = re.compile(r"""(?:src|href)="(/[^"]+)"|(?:from|^import) "(\./[^"]+)\"""", re.MULTILINE)
_VENDORED = re.compile(
    r"^\| \[(\S+)\].*\[.+\]\((\S+)\).*`\S*?([^/`]+)` \| `(\w{64})` \|$", re.MULTILINE
)


async def loaded(gateway: LiveGateway) -> dict[str, int]:
    """The statuses of everything that the page loads, by path; its link to the documentation is
    not followed."""
    statuses: dict[str, int] = {}
    paths = ["/"]
    while paths:
        path = paths.pop()
        if path in statuses:
            continue
        response = await gateway.http.get(path)
        statuses[path] = response.status_code
        if "/vendor/" in path:
            continue
        found = [match[1] or match[2] for match in _REFERENCE.finditer(response.text)]
        paths += [urljoin(path, one) for one in found if one != "/docs"]
    return statuses


async def test_the_page_and_its_parts_need_no_key(closed_gateway: LiveGateway) -> None:
    statuses = await loaded(closed_gateway)
    names = {Path(path).name for path in statuses} - {""}
    assert set(statuses.values()) == {200}
    parts = {path.name for path in FILES.rglob("*") if path.suffix in (".js", ".css", ".svg")}
    assert names == parts


def test_the_libraries_are_those_that_the_table_lists() -> None:
    vendored = FILES / "vendor"
    listed = _VENDORED.findall((vendored / "README.md").read_text(encoding="utf-8"))

    hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in vendored.glob("*.js")}
    assert {file: digest for _, _, file, digest in listed} == hashes
    assert all((vendored / license_file).stat().st_size for _, license_file, _, _ in listed)


async def test_the_browser_runs_nothing_that_is_not_a_file_of_the_gateway(
    gateway: LiveGateway,
) -> None:
    page = await gateway.http.get("/")

    policy = page.headers["content-security-policy"]
    sources = {source for directive in policy.split("; ") for source in directive.split()[1:]}
    assert policy.startswith("default-src 'none'")
    assert sources == {"'self'", "'none'"}
    assert not re.search(r"<style|<script(?![^>]* src=)| style=| on\w+=", page.text)


async def test_a_part_that_the_browser_has_is_not_sent_again(gateway: LiveGateway) -> None:
    first = await gateway.http.get("/console/main.js")
    etag = first.headers["etag"]

    again = await gateway.http.get("/console/main.js", headers={"if-none-match": etag})

    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_another_address_of_the_page_leads_to_it(closed_gateway: LiveGateway) -> None:
    response = await closed_gateway.http.get("/console", follow_redirects=True)

    assert (response.status_code, response.url.path) == (200, "/")


async def test_other_files_are_not_served(gateway: LiveGateway) -> None:
    response = await gateway.http.get("/console/..%2froutes%2fadmin.py")

    assert response.status_code == 404
