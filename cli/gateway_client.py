"""HTTP requests to a gateway. They need httpx, which an image of the worker does not have."""

import re
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from cli.options import GatewayAccess
from cli.runtime import needs
from shared.errors import (
    InternalError,
    Overloaded,
    RequestError,
    StartupError,
    Unavailable,
    WarrenError,
    from_code,
)
from shared.proxies import proxy_of

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
_SILENCE_S = 45.0
"""Three of the pauses after which a gateway pings a stream; less than `PATIENCE_S` of a chat."""
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
_NOT_TLS = re.compile(r"WRONG_VERSION_NUMBER|PACKET_LENGTH|record layer failure", re.IGNORECASE)
"""What OpenSSL says if a server answers in plain HTTP."""
_KEY_ID = re.compile(r"wk-[0-9a-f]+-")
_KEY_OPTIONS = "set OPENAI_API_KEY, or name a file that contains it with --api-key-file"
_PASSING = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
)


class ServerError(msgspec.Struct):
    """An error as OpenAI's API describes it. Other servers leave fields out, or give them other
    types."""

    message: str
    code: Any = None
    param: Any = None


class _ErrorBody(msgspec.Struct):
    error: ServerError | str


def connect(
    url: str, api_key: str | None = None, transport: "httpx.BaseTransport | None" = None
) -> "httpx.Client":
    """Create a client for the server at ``url``, with or without ``/v1`` at its end. A connection
    on which nothing comes for 45 s is lost. Raises `StartupError`."""
    with needs("gateway"):
        import httpx

    url = base_url(url)
    try:
        proxy = proxy_of(str(httpx.URL(url)))
        # Loading the certificates takes longer than most requests.
        is_plain = url.startswith("http:") and not (proxy or "").startswith("https:")
        return httpx.Client(
            base_url=url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(_SILENCE_S, connect=CONNECT_TIMEOUT_S),
            transport=transport,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if is_plain
            else httpx.create_ssl_context(),
            proxy=proxy,
            trust_env=False,  # `proxy_of` has read the environment
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise StartupError(f"{url} is not a URL: {error}") from None


def unanswered(url: object, error: Exception, kind: str = "gateway") -> str:
    """That no gateway answers at ``url``, why, and through which proxy it was asked."""
    proxy = proxy_of(str(url))
    if proxy is None:
        return f"no {kind} answers at {url}: {reason_of(error)}"
    return (
        f"no {kind} answers at {url} through the proxy {proxy.rpartition('@')[2]}, which the "
        f"environment names: {reason_of(error)}"
    )


def base_url(url: str) -> str:
    """A server's URL with a scheme, and without ``/v1`` at its end."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def reason_of(error: Exception) -> str:
    """Why a request failed, without the number of the system's error."""
    reason = _ERROR_NUMBER.sub("", str(error)) or type(error).__name__
    if _NOT_TLS.search(reason):
        return f"it does not speak TLS; try http:// instead of https:// ({reason})"
    return reason


def key_problem(url: str, api_key: str | None) -> str:
    """Why the server at ``url`` answers 401, in terms of a command's options."""
    if not api_key:
        return f"{url} requires an API key: {_KEY_OPTIONS}"
    known = _KEY_ID.match(api_key)
    which = f"the API key {known[0]}..." if known else "the API key"
    return f"{url} does not accept {which} of --api-key, --api-key-file or OPENAI_API_KEY"


def is_passing(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status >= 500 or status in _PASSING


def error_of(response: "httpx.Response") -> WarrenError | None:
    """The error in the body of a response. None if there is none, as in the page of a proxy."""
    try:
        return as_error(msgspec.json.decode(response.content, type=_ErrorBody).error)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def as_error(problem: ServerError | str) -> WarrenError:
    """The error that a server describes; an `InternalError` if Warren does not know its code."""
    if isinstance(problem, str):
        return InternalError(problem)
    code = problem.code if isinstance(problem.code, str) else ""
    param = problem.param if isinstance(problem.param, str) else None
    return from_code(code, problem.message, param)


def request(client: "httpx.Client", method: str, path: str, **more: Any) -> "httpx.Response":
    """Send a request; returns the gateway's response.

    Raises the gateway's error; `Unavailable` if it does not answer or cannot, `StartupError` if it
    refuses the API key, and `RequestError` for what a proxy refuses.
    """
    import httpx

    try:
        response = client.request(method, path, **more)
    except (httpx.HTTPError, httpx.InvalidURL) as lost:
        raise Unavailable(unanswered(client.base_url, lost)) from lost
    if response.is_success:
        return response
    status, error = response.status_code, error_of(response)
    if error is None:
        kind = Unavailable if is_passing(status) else RequestError
        raise kind(f"HTTP {status} from {client.base_url}")
    if is_passing(status) and not isinstance(error, Overloaded):
        raise Unavailable(error.message)
    api_key = client.headers.get("authorization", "").removeprefix("Bearer ")
    if status == HTTPStatus.UNAUTHORIZED:
        refusal = key_problem(str(client.base_url).rstrip("/"), api_key)
        raise StartupError(f"{refusal}: {error.message}" if api_key else refusal)
    if status == HTTPStatus.FORBIDDEN:
        hint = "use an API key that has it" if api_key else "use an API key"
        raise StartupError(f"{error.message.rstrip('.')}; {hint}: {_KEY_OPTIONS}")
    raise error


def request_json(client: "httpx.Client", method: str, path: str, **more: Any) -> Any:
    """Send a request; returns the JSON of the response. Raises like `request`, and `RequestError`
    for the page of another server."""
    response = request(client, method, path, **more)
    try:
        return response.json()
    except ValueError:
        raise RequestError(f"{response.url} is not answered with JSON: is it a gateway?") from None


def answer_of(gateway: GatewayAccess, method: str, path: str, **more: Any) -> Any:
    """The JSON with which a gateway answers a single request. Raises like `connect` and
    `request_json`."""
    with connect(*gateway) as client:
        return request_json(client, method, path, **more)


def lines_of(response: "httpx.Response") -> Iterator[bytes]:
    """The complete lines of a streamed response, without their ends. `httpx.Response.iter_lines`
    splits them at U+2028 and others, too, which JSON may contain."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
