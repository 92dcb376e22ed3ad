"""The check of ``warren doctor`` that concerns people who sign in: it asks the OpenID provider."""

import asyncio
from collections.abc import Iterator

from cli.doctor.findings import Finding, failure, ok, warning
from gateway.sign_in.access import Access
from gateway.sign_in.provider import (
    ALGORITHMS,
    CodeRefused,
    IdentityProvider,
    NotAvailable,
    NotVerified,
)
from gateway.sign_in.signing_in import CALLBACK_PATH
from shared.errors import StartupError, Unavailable
from shared.settings import GatewaySettings

_CHECK = "sign-in"
_NO_CODE = "warren-doctor"
_UNKNOWN_CLIENT = frozenset({"invalid_client", "unauthorized_client"})
_PKCE = "S256"


def check_sign_in(settings: GatewaySettings) -> Iterator[Finding]:
    """Check the provider of the settings, if they have one."""
    try:
        access = Access.of(settings)
    except StartupError as error:
        yield failure(_CHECK, error.message, "correct WARREN_OIDC_FILE")
        return
    if access is not None:
        yield asyncio.run(_asked(access))


async def _asked(access: Access) -> Finding:
    provider = IdentityProvider(access, f"{access.origin}{CALLBACK_PATH}")
    try:
        published = await provider.ask()
    except NotAvailable as error:
        return failure(
            _CHECK,
            f"the provider {access.issuer} cannot be used: {error}",
            "start it, or correct the issuer; API keys work without it",
        )
    of_provider, num_keys = published.metadata, len(published.keys.keys)
    if not num_keys:
        return failure(
            _CHECK,
            f"{of_provider.jwks_uri} has no key for signatures that a gateway can read",
            f"let the provider sign with one of {', '.join(ALGORITHMS)}",
        )
    signatures = of_provider.id_token_signing_alg_values_supported
    if signatures is not None and not set(signatures) & set(ALGORITHMS):
        return failure(
            _CHECK,
            f"the provider signs with {', '.join(signatures)}, which a gateway does not accept",
            f"let it sign with one of {', '.join(ALGORITHMS)}",
        )
    if problem := await _client_problem(provider):
        return failure(_CHECK, problem, "correct client_id and client_secret, or the provider")
    challenges = of_provider.code_challenge_methods_supported
    if challenges is not None and _PKCE not in challenges:
        return warning(
            _CHECK,
            f"the provider does not say that it checks PKCE with {_PKCE}",
            f"switch on PKCE with {_PKCE} at the provider",
        )
    return ok(_CHECK, f"{access.issuer} answers, has {num_keys} keys, and knows {access.client_id}")


async def _client_problem(provider: IdentityProvider) -> str | None:
    """Why the provider would give this client no tokens. It is asked for the tokens of a code that
    does not exist, because a provider looks at the client first."""
    try:
        await provider.redeem(_NO_CODE, nonce="", verifier=_NO_CODE)
    except CodeRefused as refused:
        if refused.error in _UNKNOWN_CLIENT:
            return f"the provider refuses the client or its secret ({refused.error})"
    except NotVerified as error:
        return f"the provider answers requests for tokens otherwise: {error}"
    except Unavailable as error:
        return f"the provider answers no requests for tokens: {error.__cause__}"
    return None
