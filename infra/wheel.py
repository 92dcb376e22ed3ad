"""Builds the wheel, whose only import package is ``warren``.

In a checkout the packages have short names, such as ``shared`` and ``kernels``. Installed under
these names, they would hide other people's packages, or be hidden by them. The wheel therefore
contains them as ``warren.shared`` and ``warren.kernels``, and ``warren.py`` as the package that
contains them. Only imports change: code that needs the name of a module takes it from ``__name__``.
An editable installation imports the checkout under the short names.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

PACKAGE = "warren"
_MAIN = f'"""``python -m {PACKAGE}``."""\n\nfrom {PACKAGE} import main\n\nmain()\n'


class BuildPackage(build_py):  # type: ignore[misc] # setuptools has no types
    """``build_py`` that nests the packages afterwards."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            names = {name.partition(".")[0] for name in self.distribution.packages or ()}
            nest(Path(self.build_lib), names)


class NameOnePackage(egg_info):  # type: ignore[misc]
    """``egg_info`` that lists the package by which an installation is imported."""

    def run(self) -> None:
        super().run()
        (Path(self.egg_info) / "top_level.txt").write_text(f"{PACKAGE}\n")


def nest(library: Path, names: Iterable[str]) -> None:
    """Move the packages with these names in ``library`` into one, and let them import each other
    from there."""
    package = library / PACKAGE
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    (library / f"{PACKAGE}.py").rename(package / "__init__.py")
    (package / "__main__.py").write_text(_MAIN)
    for name in names:
        (library / name).rename(package / name)
    pattern = re.compile(rf"^( *)(from|import) ({'|'.join(names)})\b", re.MULTILINE)
    for module in package.rglob("*.py"):
        module.write_text(pattern.sub(rf"\1\2 {PACKAGE}.\3", module.read_text()))
