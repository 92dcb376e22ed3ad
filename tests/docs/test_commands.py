"""Every command, option, setting, endpoint, target and file that a page names exists."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperGroup

from cli import main
from gateway.app import create_app
from shared.bus.memory import MemoryBus
from shared.settings import GatewaySettings, WorkerSettings, variable
from tests.support.pages import PAGES, ROOT, blocks, commands, name_of, requests

_MAKE = re.compile(r"`?make ([a-z]+)`")
_VARIABLE = re.compile(r"\bWARREN_[A-Z_]+\b")
_PATH = re.compile(r"`(?:(?:GET|POST|DELETE) )?(/(?:v1/)?[a-z]+[a-z0-9/_{}]*)`")
_FILE = re.compile(r"`((?:bench|docs|examples|infra|tests)/[\w./-]+)`")
_MODULE = re.compile(r"python -m ((?:bench|docs|infra|shared|tests)[\w.]*)")
_MODULE_CALL = re.compile(r"^(?:\$ | {4})python -m (bench[\w.]*)((?:.*\\\n)*.*)$", re.MULTILINE)
_METRIC = re.compile(r"`warren:(\w+)`")
_OTHERS = {
    "WARREN_SERVICE_HOST",
    "WARREN_TEST_AMQP_URL",
    "WARREN_TEST_SCHEDULES",
    "WARREN_TEST_SEED",
}
"""Variables that are not settings: of Kubernetes, of tests and of an example."""
_OTHER_PATHS = {"/v1", "/warren", "/etc", "/generate", "/api/chat", "/api/generate"}
"""Placeholders, and endpoints of other servers."""


def per_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """A test of all pages. Its failure shows the page as the argument of ``check``. A test for each
    page would take longer to be collected, in every test process, than to run."""

    def test() -> None:
        for page in PAGES:
            check(page)

    return test


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return {match[1] for match in re.finditer(r"^([a-z]+):.*## ", text, re.MULTILINE)}


def found(pattern: re.Pattern[str], page: Path) -> set[str]:
    return {match[1] for match in pattern.finditer(page.read_text(encoding="utf-8"))}


def warren_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each call of ``warren`` on a page."""
    for command in commands(page):
        name, *arguments = shlex.split(command)
        if name.endswith("warren"):
            yield arguments


_PASSWORD = re.compile(
    r"--(broker|secret|database-url|api-key)[ =](?!file:)(\S*://\S+:\S+@|[^-$\s]*[A-Za-z0-9]{8})"
)


def test_no_example_has_a_password_among_its_arguments() -> None:
    sources = [*PAGES, *(ROOT / "cli").rglob("*.py")]

    assert [path for path in sources if _PASSWORD.search(path.read_text(encoding="utf-8"))] == []


@per_page
def test_no_page_installs_from_a_second_index(page: Path) -> None:
    """Anyone could publish a package of ours in the second index."""
    assert re.search(r"extra.index", page.read_text(encoding="utf-8"), re.IGNORECASE) is None


@per_page
def test_no_command_uses_the_administrators_account_at_the_broker(page: Path) -> None:
    assert [
        one for one in commands(page) if re.search(r"operator\.url|amqps?://operator:", one)
    ] == []


@per_page
def test_no_command_has_a_url_with_a_password_among_its_arguments(page: Path) -> None:
    """Commands that the shell runs itself are exempt: no other process sees their arguments."""
    others = [one for one in commands(page) if shlex.split(one)[0] not in ("echo", "export")]

    assert [one for one in others if re.search(r"://[^\s/]+:[^\s/@]+@", one)] == []


def test_a_deployment_without_docker_reads_only_files_that_it_has_written() -> None:
    page = (ROOT / "docs" / "deployment" / "index.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## One machine without Docker\n")
    written: set[str] = set()
    read: list[str] = []

    for command in re.findall(r"^\$ (.+)$", section.partition("\n## ")[0], re.MULTILINE):
        files = set(re.findall(r" (?:--[a-z-]+-file |--[a-z-]+ file:)(\S+)", command))
        made = set(re.findall(r" > (\S+)$", command))
        if command.startswith("warren keys add"):
            made |= files
        assert files - written - made == set(), command
        written |= made
        read += files

    assert {"gateway.url", "worker.url", "management.url", "secret", "operator.key"} <= set(read)


@per_page
def test_targets_exist(page: Path) -> None:
    called = {shlex.split(line)[1] for line in commands(page) if line.startswith("make ")}

    assert (found(_MAKE, page) | called) - targets() == set()


@per_page
def test_settings_exist(page: Path) -> None:
    known = {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }
    named = set(_VARIABLE.findall(page.read_text(encoding="utf-8")))

    # WARREN_ alone is the prefix, and Kubernetes' WARREN_PORT is also the name of a setting.
    assert {name for name in named if name != "WARREN_"} - known - _OTHERS == set()


@cache
def command_line() -> Any:
    return typer.main.get_command(main.app)


@per_page
def test_commands_and_their_options_exist(page: Path) -> None:
    for arguments in warren_commands(page):
        command = command_line()
        while isinstance(command, TyperGroup) and arguments and arguments[0][0] != "-":
            command = command.commands.get(arguments.pop(0))
        assert command is not None, arguments
        options = {option for param in command.params for option in param.opts} | {"--help"}
        given = {argument.partition("=")[0] for argument in arguments if argument[:2] == "--"}
        assert given - options == set(), command.name


@cache
def endpoints() -> dict[str, Any]:
    """The operations of each path, as the OpenAPI document describes them."""
    paths: dict[str, Any] = create_app(GatewaySettings(), MemoryBus()).openapi()["paths"]
    return paths


@per_page
def test_endpoints_exist(page: Path) -> None:
    known = {re.sub(r":path}", "}", path) for path in endpoints()}
    known |= {"/docs", "/openapi.json", "/console/callback"}
    named = {path for path in found(_PATH, page) if path not in _OTHER_PATHS}

    assert named - known == set()


@per_page
def test_files_exist(page: Path) -> None:
    assert [path for path in found(_FILE, page) if not (ROOT / path).exists()] == []


@per_page
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]

    assert [link for link in local if not (page.parent / link).exists()] == []


@per_page
def test_modules_exist(page: Path) -> None:
    paths = [ROOT / name.replace(".", "/") for name in found(_MODULE, page)]

    assert [p for p in paths if not (p.with_suffix(".py").exists() or p.is_dir())] == []


def test_options_of_benchmarks_exist() -> None:
    given: dict[str, set[str]] = {}
    for page in PAGES:
        for module, rest in _MODULE_CALL.findall(page.read_text(encoding="utf-8")):
            options = re.findall(r"(?<![=\w-])--[a-z-]+", rest.partition("#")[0])
            given.setdefault(module, set()).update(options)

    unknown = {module: options - options_of(module) for module, options in given.items()}

    assert len(given) > 3
    assert {module for module, options in unknown.items() if options} == set(), unknown


def options_of(module: str) -> set[str]:
    """The options of a program under ``bench``."""
    package = ROOT / module.replace(".", "/") / "__main__.py"
    if package.exists() and "import argparse" in package.read_text():  # without typer
        return set(re.findall(r'"(--[a-z-]+)"', package.read_text()))
    program = typer.Typer()
    program.command()(import_module(f"{module}.__main__" if package.exists() else module).main)
    command: Any = typer.main.get_command(program)
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)}


@cache
def compose_services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


@per_page
def test_services_and_profiles_of_compose_exist(page: Path) -> None:
    services = compose_services()
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    text = page.read_text(encoding="utf-8")

    assert set(re.findall(r"--scale (\w+)=", text)) <= set(services)
    assert set(re.findall(r"--profile (\w+)", text)) <= profiles


def test_every_endpoint_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

    missing = [
        f"{method.upper()} {path}"
        for path, operations in endpoints().items()
        for method in operations
        if f"`{method.upper()} {path}`" not in page
    ]

    assert missing == []


def test_every_endpoint_has_a_command_that_is_run() -> None:
    operations = {(method.upper(), path) for path, found in endpoints().items() for method in found}
    scripts = [
        block.text for page in PAGES for block in blocks(page) if block.mark.startswith("run")
    ]
    sent = {request for script in scripts for request in requests(script)}

    assert operations - {operation(request, operations) for request in sent} == set()


def operation(request: tuple[str, str], operations: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The endpoint that answers a request: the matching endpoint with the fewest parameters."""
    method, path = request
    fitting = [
        (offered, template)
        for offered, template in operations
        if offered == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
    ]
    return min(fitting, key=lambda found: found[1].count("{"), default=request)


def test_every_command_is_documented() -> None:
    root = command_line()
    assert isinstance(root, TyperGroup)
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert [name for name in root.commands if f"`warren {name}" not in page] == []


def test_every_shell_block_is_run_or_a_list_of_commands() -> None:
    """A ``bash`` block that nothing runs would become outdated; such blocks are ``console``."""
    unmarked = [
        name_of(page)
        for page in PAGES
        for block in blocks(page)
        if block.kind in ("bash", "sh") and not block.mark.startswith("run")
    ]

    assert unmarked == []
