"""HTTP GET with the standard library alone: an image of the worker has no HTTP client."""

import base64
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from cli.gateway_client import reason_of
from shared.errors import StartupError
from shared.proxies import proxy_of

_TIMEOUT_S = 5.0


class Fetched(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """The headers by name, in lower case."""
    body: bytes


def fetch(url: str, headers: Mapping[str, str] | None = None) -> Fetched:
    """Fetch ``url``, whatever its status. A user in the URL becomes basic authentication.

    Raises `OSError` if there is no answer, or the proxy that the environment names cannot be used,
    and `ValueError` if the URL or the answer is not HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{parts.scheme or 'a URL without a scheme'} is not HTTP")
    sent = dict(headers or {})
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        sent["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    opener = build_opener(ProxyHandler(_proxies(url, parts.scheme)))
    request = Request(url, headers=sent)  # noqa: S310 (the scheme was checked)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return Fetched(response.status, _lower(response.headers), response.read())
    except HTTPError as error:
        with error:
            return Fetched(error.code, _lower(error.headers), error.read())
    except HTTPException as error:
        raise ValueError(f"that is not HTTP: {error}") from None
    except URLError as error:
        raise OSError(reason_of(OSError(error.reason))) from None


def _proxies(url: str, scheme: str) -> dict[str, str]:
    try:
        proxy = proxy_of(url)
    except StartupError as error:
        raise OSError(str(error)) from None
    if proxy is None:
        return {}
    if proxy.startswith("socks"):
        raise OSError("this check cannot use the SOCKS proxy that the environment names")
    return {scheme: proxy}


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
