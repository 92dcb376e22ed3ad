"""The error tree."""

import pytest

from shared import errors
from shared.errors import WarrenError


def subclasses(root: type[WarrenError]) -> list[type[WarrenError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in subclasses(child))]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawing = errors.__doc__ or ""
    names = {line.split("── ")[1].split()[0] for line in drawing.splitlines() if "── " in line}
    names |= {"UndecodableMessage", "StartupError", "WarrenError"}

    assert {error.__name__ for error in subclasses(WarrenError)} == names


@pytest.mark.parametrize("error", subclasses(errors.RequestError) + subclasses(errors.ServiceError))
def test_a_failure_survives_the_wire(error: type[WarrenError]) -> None:
    rebuilt = errors.from_code(error.code, "message", "param")

    assert rebuilt.code == error.code
    assert (rebuilt.message, rebuilt.param) == ("message", "param")


def test_an_unknown_code_is_an_internal_error() -> None:
    assert isinstance(errors.from_code("from_the_future", "m"), errors.InternalError)
