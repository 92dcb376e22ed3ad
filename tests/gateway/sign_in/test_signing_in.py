"""People sign in with a real provider in this process, and somebody tries to get in otherwise."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import msgspec
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from gateway.intake.keys.accepted import Keys
from gateway.intake.signer import Signer
from gateway.metrics import Metrics
from gateway.sign_in.access import Access
from gateway.sign_in.endings import SessionEndings
from gateway.sign_in.signing_in import CALLBACK_PATH, NotSignedIn, SignIn
from gateway.store.state import Store
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.settings import GatewaySettings
from tests.gateway.intake.keys.test_audited import audited
from tests.support import PATIENCE_S
from tests.support.deployment.processes import free_port
from tests.support.gateway.http import LiveGateway, chat_body, eventually, live_gateway
from tests.support.openid.fixtures import AUDIENCE
from tests.support.openid.provider import CLIENT_ID, OpenIdProvider, new_key, unsigned
from tests.support.workers.scripted_worker import ScriptedWorker

STATUS = "/admin/v1/status"


async def begun(gateway: LiveGateway, view: str = "fleet") -> str:
    """The provider's page to which the gateway sends the browser."""
    response = await gateway.http.get("/console/sign-in", params={"view": view})
    assert response.status_code == 303
    return response.headers["location"]


async def consented(page: str, person: str) -> str:
    """The path and query with which the provider sends the browser back."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as browser:
        response = await browser.post(page, data={"person": person})
    back = urlsplit(response.headers["location"])
    return f"{back.path}?{back.query}"


async def signed_in(gateway: LiveGateway, person: str) -> str:
    """Sign in; returns the place in the console to which the browser comes."""
    back = await consented(await begun(gateway), person)
    return (await gateway.http.get(back)).headers["location"]


async def test_an_operator_signs_in_and_out(
    signing_in: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warren.audit")
    assert (await signing_in.http.get(STATUS)).status_code == 401

    place = await signed_in(signing_in, "olga")

    session = (await signing_in.http.get("/console/session")).json()
    assert (place, session["person"]) == ("/#fleet", "olga@example.com")
    assert (await signing_in.http.get(STATUS)).status_code == 200
    own = {"origin": signing_in.url}
    await signing_in.http.post("/admin/v1/workers/none/drain", headers=own)
    assert (await signing_in.http.post("/console/sign-out", headers=own)).status_code == 204
    assert (await signing_in.http.get(STATUS)).status_code == 401
    acts = [(act, fact.get("person")) for act, fact in audited(caplog)]
    assert acts == [
        ("login refused", None),
        ("signed in", "olga@example.com"),
        ("operator's request", "olga@example.com"),
        ("signed out", "olga@example.com"),
        ("login refused", None),
    ]
    assert await signing_in.sample("warren_gateway_sign_ins_total") == 1


async def test_people_have_the_scopes_and_the_tenant_of_their_role(
    signing_in: LiveGateway, worker: ScriptedWorker
) -> None:
    await signed_in(signing_in, "rene")
    own = {"origin": signing_in.url}

    answer = await signing_in.http.post("/v1/chat/completions", json=chat_body(), headers=own)
    streamed = await signing_in.http.post(
        "/v1/chat/completions", json=chat_body(stream=True), headers=own
    )

    assert (answer.status_code, worker.jobs[-1].job.tenant) == (200, "lab")
    assert "x-stream-token" not in streamed.headers
    refused = await signing_in.http.get(STATUS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        403,
        "insufficient_permissions",
    )


async def test_whoever_has_no_role_is_not_signed_in(
    signing_in: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warren.audit")

    place = await signed_in(signing_in, "stranger")

    assert place == "/#sign-in-denied"
    assert (await signing_in.http.get(STATUS)).status_code == 401
    reasons = [fact["reason"] for act, fact in audited(caplog) if act == "login refused"]
    assert reasons[0] == "no role for 'stranger'"


async def test_the_cookies_are_out_of_reach_of_scripts_and_other_sites(
    signing_in: LiveGateway,
) -> None:
    page = await begun(signing_in)
    back = await signing_in.http.get(await consented(page, "olga"))

    cookies = SimpleCookie()
    for header in back.headers.get_list("set-cookie"):
        cookies.load(header)
    session, begun_cookie = cookies["warren-session"], cookies["warren-sign-in"]
    assert (session["httponly"], session["samesite"], session["path"]) == (True, "strict", "/")
    assert (session["max-age"], begun_cookie["max-age"]) == (str(8 * 3600), "0")
    query = {name: value for name, (value,) in parse_qs(urlsplit(page).query).items()}
    assert query["code_challenge_method"] == "S256"
    assert len({query["state"], query["nonce"], query["code_challenge"]}) == 3


async def test_over_tls_the_cookies_belong_to_this_host_alone(
    bus: MemoryBus, described: dict[str, Any], sign_in_options: Mapping[str, Any]
) -> None:
    behind_tls = {**described, "url": "https://warren.example"}
    sign_in_options["oidc_file"].write_text(json.dumps(behind_tls))
    async with live_gateway(bus, **sign_in_options) as gateway:
        response = await gateway.http.get("/console/sign-in")

    cookie = response.headers["set-cookie"]
    assert cookie.startswith("__Host-warren-sign-in=")
    assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert "domain" not in cookie.lower()


async def test_another_site_changes_nothing_with_a_session(
    signing_in: LiveGateway, worker: ScriptedWorker
) -> None:
    await signed_in(signing_in, "olga")

    statuses = set()
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {}):
        for path in ("/v1/chat/completions", "/admin/v1/keys", "/console/sign-out"):
            sent = await signing_in.http.post(path, json=chat_body(), headers=headers)
            statuses.add(sent.status_code)

    assert (statuses, worker.jobs) == ({403}, [])
    assert (await signing_in.http.get(STATUS)).status_code == 200


async def test_a_token_for_something_else_signs_nobody_in(
    signing_in: LiveGateway, provider: OpenIdProvider
) -> None:
    provider.changes = {"nonce": "of another sign-in"}
    of_another = await signed_in(signing_in, "olga")
    provider.changes, provider.forge = {}, unsigned
    without_signature = await signed_in(signing_in, "olga")

    assert (of_another, without_signature) == ("/#sign-in-failed", "/#sign-in-failed")
    assert (await signing_in.http.get(STATUS)).status_code == 401
    assert await signing_in.sample("warren_gateway_sign_ins_total") == 2


async def test_a_code_signs_in_once(signing_in: LiveGateway) -> None:
    back = await consented(await begun(signing_in), "olga")
    kept = dict(signing_in.http.cookies)
    first = await signing_in.http.get(back)
    signing_in.http.cookies.clear()

    without = await signing_in.http.get(back)
    again = await signing_in.http.get(
        back, headers={"cookie": f"warren-sign-in={kept['warren-sign-in']}"}
    )

    places = [one.headers["location"] for one in (first, without, again)]
    assert places == ["/#fleet", "/#sign-in-expired", "/#sign-in-failed"]


async def test_another_browsers_code_signs_nobody_in(signing_in: LiveGateway) -> None:
    attackers = await consented(await begun(signing_in), "stranger")
    signing_in.http.cookies.clear()
    await begun(signing_in)  # the victim's own

    response = await signing_in.http.get(attackers)

    assert response.headers["location"] == "/#sign-in-failed"


async def test_a_code_without_its_verifier_is_worth_nothing(
    signing_in: LiveGateway,
) -> None:
    stolen = await consented(await begun(signing_in), "olga")
    code = parse_qs(urlsplit(stolen).query)["code"][0]
    mine = await begun(signing_in)
    state = parse_qs(urlsplit(mine).query)["state"][0]

    response = await signing_in.http.get(CALLBACK_PATH, params={"code": code, "state": state})

    assert response.headers["location"] == "/#sign-in-failed"


async def test_the_provider_may_refuse(signing_in: LiveGateway) -> None:
    state = parse_qs(urlsplit(await begun(signing_in)).query)["state"][0]
    query = {"state": state, "error": "access_denied"}

    response = await signing_in.http.get(CALLBACK_PATH, params=query)

    assert response.headers["location"] == "/#sign-in-denied"


async def test_many_people_at_once_do_not_flood_the_provider(
    provider: OpenIdProvider, described: dict[str, Any], tmp_path: Path
) -> None:
    access = msgspec.convert(described, Access)
    endings = SessionEndings(Store(GatewaySettings(data_dir=tmp_path)))
    sign_in = SignIn(access, Signer(b"secret"), Keys(None), Metrics(), endings, max_at_once=1)
    may_go = threading.Event()

    def wait(token: str) -> str:
        may_go.wait(PATIENCE_S)
        return token

    async def prepared() -> tuple[dict[str, str], str]:
        page, kept = await sign_in.begin("chat")
        return dict(parse_qsl(urlsplit(await consented(page, "olga")).query)), kept

    async def is_asked() -> bool:
        return "/token" in provider.requests

    provider.forge = wait
    first, second = await prepared(), await prepared()
    returning = asyncio.create_task(sign_in.complete(*first))
    await eventually(is_asked)

    with pytest.raises(NotSignedIn) as refused:
        await sign_in.complete(*second)
    may_go.set()

    assert refused.value.outcome == "busy"
    assert (await returning)[0].name == "olga@example.com"


async def test_a_tenant_with_a_role_is_not_erased(signing_in: LiveGateway) -> None:
    await signed_in(signing_in, "olga")
    own = {"origin": signing_in.url}

    refused = await signing_in.http.delete("/admin/v1/tenants/lab", headers=own)

    assert refused.status_code == 409
    assert "the role research" in refused.json()["error"]["message"]


async def test_views_are_names_and_lead_to_no_other_site(signing_in: LiveGateway) -> None:
    for view in ("//evil.example", "https://evil.example", "a" * 33):
        response = await signing_in.http.get("/console/sign-in", params={"view": view})
        assert response.status_code == 400


async def test_what_is_no_session_is_refused(signing_in: LiveGateway) -> None:
    await begun(signing_in)
    of_the_sign_in = signing_in.http.cookies["warren-sign-in"]
    signing_in.http.cookies.clear()

    for cookie in ("", "a.b.c", "x" * 3000, of_the_sign_in):
        headers = {"cookie": f"warren-session={cookie}"}
        response = await signing_in.http.get(STATUS, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_any_gateway_of_the_deployment_accepts_a_session(
    signing_in: LiveGateway, broker: MemoryBroker, sign_in_options: Mapping[str, Any]
) -> None:
    await signed_in(signing_in, "olga")
    session = signing_in.http.cookies["warren-session"]
    headers = {"cookie": f"warren-session={session}"}

    statuses = []
    for secret in (sign_in_options["secret"], "another secret of 32 bytes or more"):
        options = {**sign_in_options, "port": free_port(), "secret": secret}
        async with live_gateway(broker, **options) as other:
            statuses.append((await other.http.get(STATUS, headers=headers)).status_code)

    assert statuses == [200, 401]


async def test_sessions_of_older_gateways_are_told_apart(
    described: dict[str, Any], tmp_path: Path
) -> None:
    signer, access = Signer(b"secret"), msgspec.convert(described, Access)
    endings = SessionEndings(Store(GatewaySettings(data_dir=tmp_path)))
    sign_in = SignIn(access, signer, Keys(None), Metrics(), endings)
    key, expires_at = OctKey.import_key(signer.session_key), int(time.time() + PATIENCE_S)

    def cookie_of(person: str) -> str:
        claims = {"sub": person, "name": person, "role": "llm-operators", "exp": expires_at}
        return jwt.encode({"alg": "HS256"}, claims, key)

    def id_of(cookie: str) -> str:
        session = sign_in.session_of(f"{sign_in.session_cookie}={cookie}")
        assert session is not None
        return session.id

    olgas, renes = cookie_of("olga"), cookie_of("rene")

    assert id_of(olgas) == id_of(olgas) != id_of(renes)


async def test_a_gateway_works_without_its_provider(
    bus: MemoryBus, worker: ScriptedWorker, provider: OpenIdProvider, sign_in_options: Any
) -> None:
    described = json.loads(sign_in_options["oidc_file"].read_text())
    described["issuer"] = f"http://localhost:{free_port()}"
    sign_in_options["oidc_file"].write_text(json.dumps(described))
    async with live_gateway(bus, **sign_in_options) as gateway:
        place = (await gateway.http.get("/console/sign-in")).headers["location"]
        token = {"authorization": f"Bearer {provider.sign(sub='ci', aud=AUDIENCE)}"}

        assert place == "/#sign-in-unavailable"
        assert (await gateway.http.get("/live")).status_code == 200
        assert (await gateway.http.get("/v1/models", headers=token)).status_code == 503
        assert (await gateway.http.get("/v1/models")).status_code == 401
        assert await gateway.sample("warren_gateway_sign_ins_total") == 1


async def test_programs_of_operators_send_access_tokens(
    signing_in: LiveGateway, provider: OpenIdProvider
) -> None:
    claims = {"sub": "ci", "groups": ["llm-operators"]}
    tokens = {
        "right": provider.sign(aud=AUDIENCE, **claims),
        "for the console": provider.sign(aud=CLIENT_ID, **claims),
        "expired": provider.sign(aud=AUDIENCE, exp=int(time.time()) - 3600, **claims),
        "without a role": provider.sign(aud=AUDIENCE, sub="ci"),
        "unsigned": unsigned(provider.sign(aud=AUDIENCE, **claims)),
    }
    provider.key = new_key()
    tokens["of an unknown key"] = provider.sign(aud=AUDIENCE, **claims)
    provider.key = new_key()
    tokens["right"] = provider.sign(aud=AUDIENCE, **claims)

    statuses = {
        name: (
            await signing_in.http.get(STATUS, headers={"authorization": f"Bearer {token}"})
        ).status_code
        for name, token in tokens.items()
    }

    assert statuses == {name: 200 if name == "right" else 401 for name in tokens}
