"""Options that several commands share, and settings as options.

``python -m cli.options`` prints all settings as a table.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from shared.errors import StartupError
from shared.settings import (
    CLIENT_VARIABLES,
    NOT_AVAILABLE,
    REMOVED,
    CommonSettings,
    GatewaySettings,
    Listener,
    WorkerSettings,
    option,
    secret_in,
    variable,
)

EPILOG = (
    "Every setting is also an environment variable: --max-num-seqs is WARREN_MAX_NUM_SEQS. "
    "The command line takes precedence."
)

DEFAULT_URL = "http://127.0.0.1:8000"
GatewayUrl: TypeAlias = Annotated[
    str, typer.Option(envvar=CLIENT_VARIABLES["url"], help="Base URL of a gateway.")
]
ApiKeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server requires one."),
]
ApiKeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        envvar=CLIENT_VARIABLES["api_key_file"],
        help="File that contains the API key. It takes precedence.",
    ),
]

_KEY = re.compile(r"[\x21-\x7e]+")
"""The characters that an API key may contain in an HTTP header."""
_MAIN = (
    "model",
    "host",
    "port",
    "broker",
    "keys_file",
    "device",
    "max_num_seqs",
    "max_seq_len",
    "kv_cache_bytes",
    "log_level",
)
"""The settings that help shows first."""
_Command = TypeVar("_Command", bound=Callable[..., None])
_GATEWAY_OPTIONS: dict[str, tuple[Any, Any]] = {
    "url": (GatewayUrl, DEFAULT_URL),
    "api_key": (ApiKeyOption, None),
    "api_key_file": (ApiKeyFile, None),
}


class GatewayAccess(NamedTuple):
    """A gateway, and the API key with which a command calls it."""

    url: str
    api_key: str | None


def takes_gateway(command: _Command) -> _Command:
    """Replace a command's parameter ``gateway`` by the options ``--url``, ``--api-key`` and
    ``--api-key-file``."""

    @functools.wraps(command)
    def run(*, url: str, api_key: str | None, api_key_file: Path | None, **others: Any) -> None:
        command(gateway=GatewayAccess(url, chosen_key(api_key, api_key_file)), **others)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "gateway":
            parameters.append(parameter.replace(kind=kind))
            continue
        parameters += [
            inspect.Parameter(name, kind, default=default, annotation=annotation)
            for name, (annotation, default) in _GATEWAY_OPTIONS.items()
        ]
    # typer reads the parameters from the signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def chosen_key(api_key: str | None, api_key_file: Path | None) -> str | None:
    """The API key in the file if a file is given, or else ``api_key``, without outer whitespace.
    Raises `StartupError`, which does not contain the key."""
    if api_key_file is None:
        key, source = (api_key or "").strip(), "of --api-key or OPENAI_API_KEY"
        if not key:
            return None
    else:
        key, source = secret_in(api_key_file), f"in {api_key_file}"
        if not key:
            raise StartupError(f"{api_key_file} is empty")
    if _KEY.fullmatch(key) is None:
        raise StartupError(
            f"the API key {source} contains a space, a control character or a character that is "
            "not ASCII: copy it again"
        )
    return key


def takes_settings(
    *classes: type[CommonSettings], only: Collection[str] | None = None
) -> Callable[[_Command], _Command]:
    """Give a command's ``**options`` an option for each setting of ``classes``, or only for the
    settings in ``only``.

    A boolean setting becomes a pair of flags, ``--x`` and ``--no-x``. Each other value is passed on
    as text, and `shared.settings.load` parses it like an environment variable. An option that was
    not given is None.
    """
    fields = {
        name: field
        for cls in classes
        for name, field in cls.model_fields.items()
        if only is None or name in only
    }

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        first = [name for name in _MAIN if name in fields]
        names = [*first, *(name for name in fields if name not in first)]
        options = [_parameter(name, fields[name]) for name in names]
        # typer reads the parameters from the signature.
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options]
        )
        return command

    return decorate


def chosen(cls: type[CommonSettings], options: dict[str, Any]) -> dict[str, Any]:
    """The subset of ``options`` that are settings of ``cls``."""
    return {name: value for name, value in options.items() if name in cls.model_fields}


def is_of_others(flag: str) -> bool:
    """Whether other servers have an option such as ``--enable-lora`` for what Warren does not
    do."""
    return flag.removeprefix("--").replace("-", "_") in NOT_AVAILABLE


def removed(flag: str) -> str | None:
    """What replaces the option of a setting that earlier versions had; None for any other."""
    return REMOVED.get(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))


def commands_with(flag: str) -> list[str]:
    """The services that have an option such as ``--device`` for a setting; empty if none has."""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    sides = {
        "warren gateway": GatewaySettings.model_fields,
        "warren worker": WorkerSettings.model_fields,
    }
    commands = [command for command, fields in sides.items() if name in fields]
    return [*commands, "warren serve"] if commands else []


def table() -> str:
    """All settings as a Markdown table."""
    rows = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for cls in (CommonSettings, GatewaySettings, WorkerSettings):
        own = (name for name in cls.model_fields if cls is CommonSettings or not _is_common(name))
        rows += [_row(name, cls.model_fields[name]) for name in own]
    return "\n".join(rows)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = option(name)
    is_boolean = field.annotation is bool
    declared = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_boolean else flag,
        help=f"{_meaning(field)} [default: {_default(field) or 'none'}]",
        metavar=None if is_boolean else _metavar(field),
        show_default=False,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[bool | None if is_boolean else str | None, declared],
    )


def _row(name: str, field: FieldInfo) -> str:
    default = f"`{_default(field)}`" if _default(field) else ""
    return f"| `{variable(name)}` | {default} | {_meaning(field)} |"


def _is_common(name: str) -> bool:
    return name in CommonSettings.model_fields


def _meaning(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    sentence = field.description or ""
    return f"{sentence} One of {', '.join(choices)}.".strip() if choices else sentence


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, tuple | dict):
        return ",".join(field.default)
    return "" if field.default is None else str(field.default)


def _metavar(field: FieldInfo) -> str:
    kinds = _flat(field.annotation)
    if Listener in kinds or get_origin(field.annotation) is dict:
        return "<str>"
    return next((f"<{kind.__name__}>" for kind in (int, float) if kind in kinds), "<str>")


def _choices(annotation: Any) -> list[str]:
    return [
        str(choice)
        for kind in _flat(annotation)
        if get_origin(kind) is Literal
        for choice in get_args(kind)
    ]


def _flat(annotation: Any) -> list[Any]:
    """The annotation and, recursively, the members of its unions, without ``Annotated``
    metadata."""
    members = [] if get_origin(annotation) is Literal else get_args(annotation)
    return [annotation, *(kind for member in members for kind in _flat(member))]


if __name__ == "__main__":
    print(table())  # noqa: T201
