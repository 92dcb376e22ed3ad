"""README, Makefile, packages and versions agree with the tree."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_LOOSE_MODULES = 7
MAX_RESULTS_BYTES = 200_000
SIDES = ("cli", "gateway", "kernels", "shared", "worker")
SUPPORT = sorted(
    str(init.parent.relative_to(ROOT)) for init in (ROOT / "tests/support").rglob("__init__.py")
)
TARGETS = ["setup", "demo", "test", "engines", "chaos", "soak", "check", "fmt", "bench"]
TARGETS += ["release", "up"]


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, re.DOTALL)
    assert found is not None, f"README.md has no block {name}"
    return found[1]


def tree_paths() -> list[str]:
    """The paths of the README's tree, whose levels are two spaces deep."""
    paths: list[str] = []
    parents: list[str] = []
    for line in block("tree").strip("`\n").splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        paths.append("".join(parents))
    return paths


def packages() -> set[str]:
    return {
        str(init.parent.relative_to(ROOT)).replace("/", ".")
        for side in SIDES
        for init in (ROOT / side).rglob("__init__.py")
    }


def top_level() -> list[str]:
    """The files and directories in the root that are not ignored."""
    ignored = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]
    return [
        f"{path.name}/" if path.is_dir() else path.name
        for path in ROOT.iterdir()
        if not any(fnmatch(path.name, pattern) for pattern in ignored)
    ]


def test_the_readmes_tree_names_only_what_exists() -> None:
    missing = [
        path
        for path in tree_paths()
        if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file())
    ]

    assert missing == []


def test_everything_in_the_root_is_in_the_readmes_tree() -> None:
    assert sorted(set(top_level()) - set(tree_paths())) == []


def test_every_package_is_a_room_of_the_readmes_tree() -> None:
    rooms = [path for path in tree_paths() if path.startswith(tuple(f"{side}/" for side in SIDES))]

    assert sorted(rooms) == sorted(f"{package.replace('.', '/')}/" for package in packages())


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_room_says_what_others_may_use_of_it(package: str) -> None:
    """Names without a dot or an underscore may also name messages."""
    room = ROOT / package.replace(".", "/")
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    named = re.findall(r"(?<!`)`([\w.]+)`(?!`)", docstring)

    found = [name for name in named if is_at(room, name) or is_at(ROOT, name)]
    assert found, "its docstring names nothing that is here"
    assert [name for name in named if name not in found and not name.isalpha()] == []


def is_at(directory: Path, name: str) -> bool:
    """Whether a dotted name names a package or module in a directory, or a definition of a
    module."""
    first, _, rest = name.partition(".")
    if (directory / first).is_dir():
        return not rest or is_at(directory / first, rest)
    module = directory / f"{first}.py"
    if not module.exists():
        module, rest = directory / "__init__.py", name
    return module.exists() and (not rest or re.search(rf"\b{rest}\b", code_of(module)) is not None)


def code_of(module: Path) -> str:
    """A module without its docstring."""
    text = module.read_text()
    return text.replace(ast.get_docstring(ast.parse(text), clean=False) or "", "", 1)


def test_every_module_lies_in_a_package() -> None:
    homes = {
        str(module.parent.relative_to(ROOT)).replace("/", ".")
        for side in SIDES
        for module in (ROOT / side).rglob("*.py")
    }

    assert homes == packages()


@pytest.mark.parametrize("room", ["gateway", "gateway/store", "worker", *SUPPORT])
def test_a_room_has_few_modules_outside_of_its_own_rooms(room: str) -> None:
    loose = [path.name for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"]

    assert len(loose) <= MAX_LOOSE_MODULES, loose


def test_no_two_classes_have_the_same_name() -> None:
    homes: dict[str, list[str]] = {}
    for module in chain.from_iterable((ROOT / side).rglob("*.py") for side in SIDES):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(module.relative_to(ROOT)))

    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_package_is_installed() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages()


def test_the_version_stays_below_that_of_the_package_transformers_looks_for() -> None:
    assert Version(PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]) < Version("0.9")


def test_all_pages_name_the_versions_of_python_that_are_supported() -> None:
    found = ["infra/find_python.sh", "--versions"]
    shown = subprocess.run(found, cwd=ROOT, check=True, text=True, capture_output=True).stdout
    *others, newest = shown.split()
    sentence = f"Python {', '.join(others)} or {newest}"

    admitted = SpecifierSet(PYPROJECT["project"]["requires-python"])

    assert [f"3.{n}" for n in range(30) if f"3.{n}.9" in admitted] == [*others, newest]
    for page in ("README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/deployment/index.md"):
        assert sentence in (ROOT / page).read_text(), page
    assert f"Warren needs {sentence}:" in (ROOT / "infra/find_python.sh").read_text()


def test_a_gateway_needs_no_particular_processor() -> None:
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gateway"]]

    assert [line for line in lines if "platform_machine" in line] == []


def test_every_requirement_has_an_exact_version() -> None:
    project = PYPROJECT["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )

    names = [re.split(r"[^\w-]", line.lower().replace("_", "-"))[0] for line in lines]

    assert [name for name in names if name not in pinned] == []
    assert pinned["torch"] == "2.13.0"


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, check=True, text=True, capture_output=True).stdout

    assert re.findall(r"^  make (\w+) +\S", shown, re.MULTILINE) == ["help", *TARGETS]


def planned(target: str, directory: Path, *stamps: str) -> str:
    """What ``make`` would run in a checkout where these stamps of installations exist."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (directory / name).write_bytes((ROOT / name).read_bytes())
    (directory / ".venv").mkdir()
    for stamp in stamps:
        (directory / ".venv" / stamp).touch()
    plan = ["make", "--dry-run", target]
    return subprocess.run(plan, cwd=directory, check=True, text=True, capture_output=True).stdout


def test_set_up_does_nothing_the_second_time(tmp_path: Path) -> None:
    assert "Nothing to be done" in planned("setup", tmp_path, ".serving", ".installed")


def test_the_demo_installs_only_what_serving_needs(tmp_path: Path) -> None:
    plan = planned("demo", tmp_path)

    assert re.findall(r"--editable '\.\[(.+)\]'", plan) == ["gateway,worker"]


@pytest.mark.parametrize("stamps", [(".serving",), (".serving", ".installed")])
def test_the_demo_installs_nothing_the_second_time(stamps: tuple[str, ...], tmp_path: Path) -> None:
    assert " install " not in planned("demo", tmp_path, *stamps)


@pytest.mark.parametrize("target", ["setup", "test", "check"])
def test_development_completes_the_installation_of_the_demo(target: str, tmp_path: Path) -> None:
    plan = planned(target, tmp_path, ".serving")

    assert re.findall(r"--editable '\.\[(.+)\]'", plan) == ["gateway,worker,bench,dev"]


def test_a_python_that_warren_does_not_run_on_is_refused() -> None:
    refused = subprocess.run(
        ["infra/find_python.sh"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHON": "/bin/true-python-9"},
    )

    assert refused.returncode == 1
    assert "Python 3.11, 3.12, 3.13 or 3.14" in refused.stderr


def test_a_supported_python_is_found() -> None:
    found = subprocess.run(
        ["infra/find_python.sh"],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHON": f"no-such-python {sys.executable}"},
    )

    assert found.stdout.strip() == sys.executable


def test_results_of_benchmarks_are_summaries_and_small_pictures() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "bench" / "results").iterdir()}

    assert sum(sizes.values()) < MAX_RESULTS_BYTES, sizes


@pytest.mark.parametrize("script", [".ci/run", "infra/find_python.sh"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


PRONOUNS = re.compile(r"\b(those|ones?)\b", re.IGNORECASE)
"""The words by which a text avoids a noun. httpx has 1 of them in 1,000 words, SQLAlchemy 3."""


def share(texts: Iterable[str]) -> float:
    """How many of 1,000 words are `PRONOUNS`."""
    whole = "\n".join(texts)
    return 1000 * len(PRONOUNS.findall(whole)) / len(re.findall(r"[A-Za-z][A-Za-z'-]*", whole))


def docstrings(module: Path) -> Iterator[str]:
    """The texts that stand alone in a module: its docstrings, and the texts below attributes."""
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield text


@pytest.mark.parametrize(
    ("side", "most"),
    [
        ("bench", 4),
        ("cli", 4),
        ("docs", 4),
        ("examples", 4),
        ("gateway", 2),
        ("infra", 4),
        ("kernels", 4),
        ("shared", 4),
        ("tests", 4),
        ("worker", 4),
    ],
)
def test_docstrings_repeat_the_noun(side: str, most: float) -> None:
    """The aim is 4: each change that lowers a share also lowers its limit."""
    texts = chain.from_iterable(map(docstrings, (ROOT / side).rglob("*.py")))

    assert share(texts) <= most


def test_pages_repeat_the_noun() -> None:
    """The aim is 4, as for docstrings."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

    texts = [re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages]

    assert share(texts) <= 3.8
