"""Who may sign in with an OpenID provider, and as what, from a file that the operator writes::

    {
      "issuer": "https://login.example/realms/staff",
      "client_id": "warren",
      "client_secret": "...",
      "url": "https://warren.example",
      "roles": {
        "llm-operators": {"tenant": "ops", "scopes": ["generate", "cancel", "operator"]},
        "research": {"tenant": "research"}
      }
    }

A role is for the people whose claim ``groups`` has its name; ``*`` is for everyone whom the
provider signs in.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Self
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta, Struct

from gateway.intake.keys.api_key import DEFAULT_SCOPES, TENANT, Scope
from shared.errors import StartupError
from shared.settings import GatewaySettings, secret_in

_ANYONE = "*"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_NAMES = ("email", "preferred_username", "name", "client_id", "azp", "sub")
"""The claims that may name a person, or a program, the most telling first."""
_MAX_NAME_CHARS = 128
LONGEST_SESSION_HOURS = 168
_ID_CHARS = 20

Claims = Mapping[str, Any]


class SignInRole(Struct, frozen=True, forbid_unknown_fields=True):
    """The rights of the people whose claim has a certain value."""

    tenant: Annotated[str, Meta(pattern=rf"^{TENANT.pattern}\Z")]
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES


class Person(Struct, frozen=True):
    """Who has signed in."""

    id: str
    """A hash of the issuer and the subject, in place of the id of an API key."""
    name: str
    role: str


class Access(Struct, frozen=True, forbid_unknown_fields=True):
    """The provider, and the roles that it may give."""

    issuer: str
    client_id: Annotated[str, Meta(min_length=1)]
    url: str
    """The origin at which browsers reach the gateways, such as ``https://warren.example``."""
    roles: Annotated[dict[str, SignInRole], Meta(min_length=1)]
    client_secret: str = ""
    claim: str = "groups"
    """A claim that is a text or a list of texts. A dot leads into an object, as in
    ``realm_access.roles``."""
    audience: str = ""
    """The audience of access tokens that programs may send; empty: none are accepted."""
    scope: str = "openid profile email"
    """The scope that the gateway requests from the provider."""
    session_hours: Annotated[float, Meta(gt=0, le=LONGEST_SESSION_HOURS)] = 8.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_url("issuer", self.issuer)
        if _check_url("url", self.url).path not in ("", "/"):
            raise ValueError("url: expected no path, as in https://warren.example")
        if "openid" not in self.scope.split():
            raise ValueError("scope: expected openid among its words")
        if self.audience == self.client_id:
            raise ValueError("audience: expected another value than client_id's")

    def __repr__(self) -> str:
        """Without the client's secret, which no log and no traceback may show."""
        return f"Access(issuer={self.issuer!r}, client_id={self.client_id!r})"

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self | None:
        """Read the file; None if there is none. Raises `StartupError`."""
        path = settings.oidc_file
        if path is None:
            return None
        try:
            access = msgspec.json.decode(secret_in(path), type=cls)
        except msgspec.MsgspecError as error:
            raise StartupError(f"{path} does not describe an OpenID provider: {error}") from None
        if settings.keys_file is None:
            raise StartupError(
                "WARREN_OIDC_FILE has no effect without API keys, because everyone may do "
                "everything: set WARREN_KEYS_FILE, too"
            )
        return access

    @property
    def origin(self) -> str:
        """The ``Origin`` of the console's requests."""
        return self.url.rstrip("/").lower()

    @property
    def is_secure(self) -> bool:
        return self.origin.startswith("https:")

    def role_in(self, tenant: str) -> str | None:
        """The name of a role in a tenant; None if there is none."""
        return next((name for name, role in self.roles.items() if role.tenant == tenant), None)

    def person_of(self, claims: Claims) -> Person | None:
        """Who has these claims, with the first role of the file that they give; None if they give
        none."""
        values = _values(claims, self.claim)
        if self.claim == "email" and claims.get("email_verified") is not True:
            values = []  # whoever registers with the provider chooses the address
        role = next((name for name in self.roles if name == _ANYONE or name in values), None)
        if role is None:
            return None
        names = (claims.get(name) for name in _NAMES)
        name = next(name for name in names if isinstance(name, str) and name)
        subject = f"{self.issuer}\0{claims['sub']}"
        digest = hashlib.sha256(subject.encode()).hexdigest()
        return Person(digest[:_ID_CHARS], name[:_MAX_NAME_CHARS], role)


def _check_url(name: str, url: str) -> SplitResult:
    """The parts of a URL with TLS, or on this machine. Raises ValueError."""
    parts = urlsplit(url)
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
    if not is_safe or not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{name}: expected an https:// URL without a user and a query")
    return parts


def _values(claims: Claims, name: str) -> list[str]:
    """The texts of a claim."""
    found: Any = claims.get(name)
    if found is None:
        found = claims
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)]
