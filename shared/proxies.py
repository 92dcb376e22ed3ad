"""The HTTP proxy for a URL, from the variables that curl and most programs read: ``HTTP_PROXY``,
``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, in capitals or not.

Libraries differ in what they accept there. httpx takes an IPv6 network in ``NO_PROXY`` for an
invalid URL, and sends requests for this machine to the proxy.
"""

from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from shared.errors import StartupError

_SCHEMES = ("http", "https", "socks5", "socks5h")


def proxy_of(url: str) -> str | None:
    """The URL of the proxy for requests to ``url``; None if there is none. A proxy is never used
    for this machine itself, nor for a host, a domain or a network in ``NO_PROXY``.

    Raises `StartupError` if the proxy's own URL cannot be used, and `ValueError` if ``url`` has a
    port that is not a number.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = getproxies_environment()
    name = next((kind for kind in (parts.scheme, "all") if kind in proxies), None)
    if name is None or _is_direct(host, parts.port, proxies.get("no", "")):
        return None
    proxy = proxies[name]
    return _checked(proxy if "://" in proxy else f"http://{proxy}", f"{name}_proxy".upper())


def _is_direct(host: str, port: int | None, exceptions: str) -> bool:
    """Whether ``NO_PROXY`` names a host, or the host is this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    entries = [entry.strip().strip("[]") for entry in exceptions.split(",")]
    try:
        address = ip_address(host)
    except ValueError:
        netloc = host if port is None else f"{host}:{port}"
        return bool(proxy_bypass(netloc, {"no": ",".join(entries)}))
    if address.is_loopback or "*" in entries:
        return True
    for entry in entries:
        try:
            if address in ip_network(entry, strict=False):
                return True
        except ValueError:  # the entry is a name
            continue
    return False


def _checked(proxy: str, variable: str) -> str:
    try:
        parts = urlsplit(proxy)
        is_url = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise StartupError(
            f"{variable} does not name a proxy such as http://proxy.example:3128: correct it, or "
            "list the host in NO_PROXY"
        )
    if parts.scheme.startswith("socks") and find_spec("socksio") is None:
        raise StartupError(
            f"{variable} names a SOCKS proxy, which needs the package socksio: install it, or list "
            "the host in NO_PROXY"
        )
    return proxy
