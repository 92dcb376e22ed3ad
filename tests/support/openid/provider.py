"""An OpenID provider on a real port: Authlib's authorization server, with discovery, codes with
PKCE, and signed tokens. Its page lets a browser sign in as anyone whom the provider knows."""

import secrets
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from html import escape
from types import SimpleNamespace
from typing import Any

import flask
from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import ClientMixin
from authlib.oauth2.rfc6749.grants import AuthorizationCodeGrant
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oidc.core import AuthorizationCodeMixin, OpenIDCode
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from werkzeug.serving import make_server

CLIENT_ID = "warren"
CLIENT_SECRET = "what only the gateway knows: 100% of it"
_KEY_BITS = 2048


@dataclass
class OpenIdProvider:
    """What a test decides about the provider, at any time."""

    people: dict[str, dict[str, Any]]
    """The claims of everyone who can sign in, by subject."""
    key: RSAKey
    redirect_uri: str = ""
    url: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    """Claims of the next tokens that differ from the right claims."""
    forge: Callable[[str], str] | None = None
    """Turns each of the next tokens into another token."""
    published: dict[str, Any] = field(default_factory=dict)
    """What it says of itself otherwise than what is right."""
    requests: list[str] = field(default_factory=list)
    """The paths that were requested."""

    def sign(self, **claims: Any) -> str:
        """A token of this provider, valid for a minute. A claim of None is left out."""
        now = int(time.time())
        header = {"alg": "RS256", "kid": self.key.kid}
        claims = {"iss": self.url, "iat": now, "exp": now + 60, **claims}
        return jwt.encode(
            header, {name: one for name, one in claims.items() if one is not None}, self.key
        )


def new_key() -> RSAKey:
    return RSAKey.generate_key(_KEY_BITS, {"kid": secrets.token_hex(4), "use": "sig"})


first_key = cache(new_key)
"""The key of a provider until it changes its keys. To make one takes longer than a test."""


def unsigned(token: str) -> str:
    """A token with the same claims that nobody has signed."""
    header = urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    return f"{header}.{token.split('.')[1]}."


@contextmanager
def openid_provider(people: dict[str, dict[str, Any]]) -> Iterator[OpenIdProvider]:
    """A provider that knows these people, at ``http://localhost``: to a browser, another site than
    a gateway at 127.0.0.1."""
    provider = OpenIdProvider(people, first_key())
    server = make_server("127.0.0.1", 0, _application(provider), threaded=True)
    provider.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class _Client(ClientMixin):  # type: ignore[misc]
    redirect_uri: str

    def get_client_id(self) -> str:
        return CLIENT_ID

    def get_default_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_allowed_scope(self, scope: str) -> str:
        return scope

    def check_redirect_uri(self, redirect_uri: str) -> bool:
        return redirect_uri == self.redirect_uri

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret == CLIENT_SECRET

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == "client_secret_basic"

    def check_response_type(self, response_type: str) -> bool:
        return response_type == "code"

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type == "authorization_code"


@dataclass
class _Code(AuthorizationCodeMixin):  # type: ignore[misc]
    subject: str
    redirect_uri: str
    scope: str
    nonce: str
    code_challenge: str
    code_challenge_method: str

    def get_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_scope(self) -> str:
        return self.scope

    def get_nonce(self) -> str:
        return self.nonce

    def get_auth_time(self) -> int:
        return int(time.time())


def _application(provider: OpenIdProvider) -> flask.Flask:
    codes: dict[str, _Code] = {}
    app = flask.Flask(__name__)
    server = AuthorizationServer(
        app,
        query_client=lambda name: _Client(provider.redirect_uri) if name == CLIENT_ID else None,
        save_token=lambda token, request: None,
    )
    id_tokens = _id_tokens(provider, codes)
    server.register_grant(_grant(codes), [CodeChallenge(required=True), id_tokens])
    _publish(app, provider)
    _serve(app, server, provider)
    return app


def _grant(codes: dict[str, _Code]) -> type[AuthorizationCodeGrant]:
    class CodeGrant(AuthorizationCodeGrant):  # type: ignore[misc]
        TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_basic",)

        def save_authorization_code(self, code: str, request: Any) -> None:
            asked = request.payload
            codes[code] = _Code(
                request.user.subject,
                asked.redirect_uri,
                asked.scope,
                asked.data["nonce"],
                asked.data["code_challenge"],
                asked.data["code_challenge_method"],
            )

        def query_authorization_code(self, code: str, client: _Client) -> _Code | None:
            return codes.get(code)

        def delete_authorization_code(self, authorization_code: _Code) -> None:
            for code in [one for one, kept in codes.items() if kept is authorization_code]:
                del codes[code]

        def authenticate_user(self, authorization_code: _Code) -> SimpleNamespace:
            return SimpleNamespace(subject=authorization_code.subject)

    return CodeGrant


def _id_tokens(provider: OpenIdProvider, codes: dict[str, _Code]) -> OpenIDCode:
    class IdTokens(OpenIDCode):  # type: ignore[misc]
        def resolve_client_private_key(self, client: _Client) -> RSAKey:
            return provider.key

        def get_encode_header(self, client: _Client) -> dict[str, Any]:
            return {"alg": "RS256", "kid": provider.key.kid}

        def get_client_claims(self, client: _Client) -> dict[str, Any]:
            return {"iss": provider.url, "aud": CLIENT_ID}

        def exists_nonce(self, nonce: str, request: Any) -> bool:
            return any(code.nonce == nonce for code in codes.values())

        def generate_user_info(self, user: SimpleNamespace, scope: str) -> dict[str, Any]:
            return {"sub": user.subject, **provider.people[user.subject], **provider.changes}

        def encode_id_token(self, token: Any, request: Any) -> str:
            encoded: str = super().encode_id_token(token, request)
            return encoded if provider.forge is None else provider.forge(encoded)

    return IdTokens(require_nonce=True)


def _publish(app: flask.Flask, provider: OpenIdProvider) -> None:
    @app.before_request
    def note() -> None:
        provider.requests.append(flask.request.path)

    @app.get("/.well-known/openid-configuration")
    def metadata() -> dict[str, Any]:
        return {
            "issuer": provider.url,
            "authorization_endpoint": f"{provider.url}/authorize",
            "token_endpoint": f"{provider.url}/token",
            "jwks_uri": f"{provider.url}/jwks",
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
            **provider.published,
        }

    @app.get("/jwks")
    def jwks() -> Any:
        return KeySet([provider.key]).as_dict(private=False)


def _serve(app: flask.Flask, server: AuthorizationServer, provider: OpenIdProvider) -> None:
    @app.get("/authorize")
    def ask() -> str:
        server.get_consent_grant(end_user=SimpleNamespace(subject=""))
        buttons = (
            f'<button name="person" value="{escape(one)}">Continue as {escape(one)}</button>'
            for one in provider.people
        )
        return f'<!doctype html><form method="post">{"".join(buttons)}</form>'

    @app.post("/authorize")
    def consent() -> Any:
        user = SimpleNamespace(subject=flask.request.form["person"])
        grant = server.get_consent_grant(end_user=user)
        return server.create_authorization_response(grant=grant, grant_user=user)

    @app.post("/token")
    def token() -> Any:
        return server.create_token_response()
