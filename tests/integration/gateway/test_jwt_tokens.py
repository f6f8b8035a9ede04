"""Bearer tokens of a real OpenID Connect issuer."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import httpx
import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from services.common.lifecycle import StartupError
from services.gateway.settings import GatewaySettings
from services.gateway.wiring import token_verifier
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.redis_server import running_redis
from tests.integration.gateway.test_batches import begin, over, request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import oidc_provider_mock

AUDIENCE = "ryzanstein"


@dataclass(frozen=True)
class Issuer:
    url: str

    def token(self, subject: str, client_id: str = AUDIENCE) -> str:
        """An id token, by the authorization code flow."""
        back = "http://127.0.0.1/back"
        sent = {"client_id": client_id, "redirect_uri": back, "response_type": "code", "scope": "openid"}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            answer = client.post("/oauth2/authorize", params=sent, data={"sub": subject})
            code = parse_qs(urlparse(answer.headers["location"]).query)["code"][0]
            given = {"grant_type": "authorization_code", "code": code, "redirect_uri": back}
            answer = client.post("/oauth2/token", data=given | {"client_id": client_id, "client_secret": "s"})
        return str(answer.json()["id_token"])


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with oidc_provider_mock.run_server_in_thread() as server:
        yield Issuer(f"http://localhost:{server.server_port}")


@asynccontextmanager
async def identified(folder: Path, workers: list[Worker], issuer: str, **settings: Any) -> AsyncIterator[GatewayStack]:
    """A gateway that takes tokens of the issuer."""
    with running_redis(folder) as redis:
        trust = {"tenancy": True, "redis_url": redis.url, "jwt_issuer": issuer, "jwt_audience": AUDIENCE}
        async with running_stack(workers, **trust, **settings) as stack:
            yield stack


async def test_a_token_is_a_tenant_with_limits(issuer: Issuer, tmp_path: Path) -> None:
    mine = rsa.generate_private_key(65537, 2048)
    forged = {"iss": issuer.url, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 60}
    refused = {
        "another audience": issuer.token("alice", "another"),
        "another signer": jwt.encode(forged, mine, "RS256"),
        "no signature": jwt.encode(forged, None, "none"),  # type: ignore[arg-type]  # as attackers do
        "a public key as a secret": jwt.encode(forged, "k" * 32, "HS256"),
        "no key of the issuer's": jwt.encode(forged, mine, "RS256", {"kid": "unknown"}),
    }
    limits = json.dumps({"requests_per_minute": 2})
    async with identified(tmp_path, [Worker("w0")], issuer.url, jwt_limits=limits) as stack:

        async def ask(token: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {token}"}
            return await stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)

        for what, token in refused.items():
            answer = await ask(token)
            assert answer.status_code == 401, what
            assert answer.json()["error"]["message"].startswith("The token is refused: "), what
        alice = issuer.token("alice")
        assert [(await ask(alice)).status_code for _ in range(3)] == [200, 200, 429]
        assert stack.workers[0].submits[-1].tenant == "alice"
        assert (await ask(issuer.token("bob"))).status_code == 200, "a tenant of its own"


async def test_a_batch_is_of_the_token_s_tenant(issuer: Issuer, tmp_path: Path) -> None:
    async with identified(tmp_path, [Worker("w0")], issuer.url) as stack:
        carol = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=issuer.token("carol"), max_retries=0)
        async with carol as client:
            batch = await over(client, await begin(client, [request("a")]))
            assert (batch.status, stack.workers[0].submits[-1].tenant) == ("completed", "carol")


async def test_claim_without_a_tenant_name_is_rejected(issuer: Issuer, tmp_path: Path) -> None:
    named = {"jwt_tenant_claim": "iat", "jwt_jwks_url": f"{issuer.url}/jwks"}
    async with identified(tmp_path, [], issuer.url, **named) as stack:
        headers = {"authorization": f"Bearer {issuer.token('alice')}"}
        answer = await stack.http.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert "its claim `iat` must be a text" in answer.json()["error"]["message"]


async def test_an_issuer_that_is_away_is_503(tmp_path: Path) -> None:
    forged = {"iss": "http://127.0.0.1:1", "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 60}
    token = jwt.encode(forged, rsa.generate_private_key(65537, 2048), "RS256")
    async with identified(tmp_path, [], "http://127.0.0.1:1") as stack:
        answer = await stack.http.get("/v1/models", headers={"authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")


def test_settings_without_effective_authentication_are_rejected() -> None:
    for fields, words in (
        ({"jwt_issuer": "https://a"}, "RYZANSTEIN_JWT_AUDIENCE"),
        ({"jwt_issuer": "https://a", "jwt_audience": "b"}, "RYZANSTEIN_TENANCY"),
        ({"jwt_issuer": "http://a", "jwt_audience": "b", "tenancy": True}, "https://"),
        ({"admin_token": "a", "admin_token_file": "b"}, "ADMIN_TOKEN and RYZANSTEIN_ADMIN_TOKEN_FILE: set one"),
        ({"tool_parser": "mine"}, "must be auto or one of"),
    ):
        with pytest.raises(ValueError, match=words):
            GatewaySettings(**fields)
    wrong = GatewaySettings(jwt_issuer="https://a", jwt_audience="b", tenancy=True, jwt_limits='{"colour": 1}')
    with pytest.raises(StartupError, match=r"RYZANSTEIN_JWT_LIMITS: .*colour"):
        token_verifier(wrong)
