"""The URL of a PostgreSQL database, as libpq and its users write it, for asyncpg.

asyncpg reads most of libpq's parameters itself, and takes any other parameter for a setting of the
server, which refuses the connection. So each parameter is known here, or refused by its name.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from sqlalchemy.exc import DBAPIError

from shared.errors import StartupError

logger = logging.getLogger(__name__)

SETTING = "WARREN_DATABASE_URL"
_CONNECT_TIMEOUT_S = 10
_READ_BY_ASYNCPG = (
    "dbname",
    "user",
    "password",
    "passfile",
    "service",
    "sslmode",
    "sslcert",
    "sslkey",
    "sslpassword",
    "sslrootcert",
    "sslcrl",
    "sslnegotiation",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "target_session_attrs",
    "krbsrvname",
    "gsslib",
)
_FILES = ("passfile", "sslcert", "sslkey", "sslrootcert", "sslcrl")
_SERVER_SETTINGS = ("application_name", "options", "search_path")
_WITHOUT_EFFECT = (
    "client_encoding",
    "fallback_application_name",
    "gssencmode",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "prepared_statement_cache_size",
    "sslcompression",
    "sslsni",
    "statement_cache_size",
    "tcp_user_timeout",
)
"""Parameters that asyncpg does not know, and without which a connection is as good."""
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def connect_args(url: str) -> dict[str, Any]:
    """The arguments of `asyncpg.connect` for a URL that begins with postgresql:// or postgres://.
    Raises `StartupError`, which names the parameter and never the password."""
    place, _, query = url.partition("?")
    try:
        parts = urlsplit(place)
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise _refusal("it is not a valid URL") from None
    hosts = _hosts(parts.netloc.rpartition("@")[2], pairs)
    kept: list[tuple[str, str]] = []
    args: dict[str, Any] = {"timeout": _CONNECT_TIMEOUT_S, "server_settings": {}}
    for name, value in pairs:
        if name in _READERS:
            args |= _READERS[name](value)
        elif name in _SERVER_SETTINGS:
            args["server_settings"][name] = value
        elif name == "sslmode" and value not in _SSL_MODES:
            raise _refusal(f"sslmode={value[:32]!r} is not one of {', '.join(_SSL_MODES)}")
        elif name in _FILES and not Path(value).is_file():
            raise _refusal(f"{name}: there is no file {value[:256]}")
        elif name in _READ_BY_ASYNCPG:
            kept.append((name, value))
        elif name in _WITHOUT_EFFECT:
            logger.info("parameter of the database's URL ignored", extra={"parameter": name})
        elif name not in ("host", "port"):
            known = sorted({"host", "port", *_READ_BY_ASYNCPG, *_SERVER_SETTINGS, *_READERS})
            raise _refusal(f"{name[:64]!r} is not a parameter of {', '.join(known)}")
    user, at, _ = parts.netloc.rpartition("@")
    kept += [("host", ",".join(host for host, _ in hosts))] if hosts else []
    kept += [("port", ",".join(port for _, port in hosts))] if hosts else []
    written = "&".join(f"{name}={quote(value, safe=',')}" for name, value in kept)
    return {"dsn": f"postgresql://{user}{at}{parts.path}?{written}", **args}


def fault_of_settings(error: BaseException | None) -> StartupError | None:
    """The error of a connection that the settings explain; None for any other error."""
    # Imported here because it takes 60 ms, and most gateways have their database in a file.
    from asyncpg import (
        CantChangeRuntimeParamError,
        InvalidAuthorizationSpecificationError,
        InvalidCatalogNameError,
        UndefinedObjectError,
    )
    from asyncpg.exceptions import ClientConfigurationError

    cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else error
    match cause:
        case InvalidAuthorizationSpecificationError():
            remedy = "correct the user and the password, or pg_hba.conf"
        case InvalidCatalogNameError():
            remedy = "create the database, or correct its name"
        case ClientConfigurationError() | UndefinedObjectError() | CantChangeRuntimeParamError():
            remedy = "correct the parameter"
        case _:
            return None
    return _refusal(f"{cause}: {remedy}")


def _hosts(netloc: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each host with its port. SQLAlchemy's users write several as host=NAME:PORT&host=NAME:PORT,
    libpq's as NAME:PORT,NAME:PORT or host=NAME,NAME&port=PORT,PORT."""
    named = [one for name, value in pairs if name == "host" for one in value.split(",")]
    ports = [one for name, value in pairs if name == "port" for one in value.split(",")]
    found = [_host(unquote(one)) for one in named or netloc.split(",") if one]
    if len(ports) > 1 and len(ports) != len(found):
        raise _refusal("port: expected one port, or as many as there are hosts")
    given = ports if len(ports) == len(found) else ports * len(found)
    if given:
        found = [(host, port) for (host, _), port in zip(found, given, strict=True)]
    for _, port in found:
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise _refusal(f"port: expected a number from 1 to 65535, not {port[:16]!r}")
    return found


def _host(text: str) -> tuple[str, str]:
    if text.startswith("/"):  # the directory of a Unix socket
        return text, "5432"
    host, bracket, port = text.rpartition("]")
    if not bracket:
        host, _, port = text.partition(":")
        return host, port or "5432"
    return host.lstrip("["), port.lstrip(":") or "5432"


def _timeout(value: str) -> dict[str, Any]:
    if not value.isdecimal():
        raise _refusal("connect_timeout: expected a number of seconds")
    return {"timeout": int(value) or None}


def _ssl(value: str) -> dict[str, Any]:
    """SQLAlchemy's and asyncpg's own name of ``sslmode``."""
    modes = {"true": "require", "false": "disable"}
    mode = modes.get(value.lower(), value)
    if mode not in _SSL_MODES:
        raise _refusal(f"ssl={value[:32]!r} is not one of {', '.join(_SSL_MODES)}")
    return {"ssl": mode}


def _channel_binding(value: str) -> dict[str, Any]:
    if value not in ("disable", "prefer"):
        raise _refusal("channel_binding=require is not supported: use sslmode=verify-full instead")
    return {}


_READERS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "connect_timeout": _timeout,
    "ssl": _ssl,
    "channel_binding": _channel_binding,
}


def _refusal(reason: str) -> StartupError:
    return StartupError(f"{SETTING}: {reason}")
