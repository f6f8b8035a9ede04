"""Bearer tokens of an OpenID Connect issuer: checks signature, audience and expiry; a claim names the tenant."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from typing import Any

import jwt
import msgspec

from services.gateway.errors import ApiError
from services.gateway.tenants.keys import unauthorized
from services.gateway.tenants.tenant import Tenant, TenantLimits

log = logging.getLogger(__name__)

# Asymmetric only: with HS256 a public key would serve as a secret.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEYS_LIVE_S = 300.0
_BETWEEN_FETCHES_S = 5.0  # unknown key ids must not make a client's requests ours to the issuer
_FETCH_S = 3.0
_MAX_DOCUMENT_BYTES = 1 << 20
_LEEWAY_S = 30
_MAX_REMEMBERED = 10_000


class TokenLimits(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a tenant that comes by a token."""


@dataclass(frozen=True, slots=True)
class JwtIssuer:
    """Requirements of valid tokens."""

    issuer: str
    audience: str
    jwks_url: str  # empty: the issuer's discovery document names it
    tenant_claim: str
    limits: Tenant  # limits of every tenant that the issuer names


class JwtVerifier:
    """Finds the tenant of a token. The issuer is asked for its keys at the first token, and when they are old."""

    def __init__(self, issuer: JwtIssuer) -> None:
        self._issuer = issuer
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching = asyncio.Lock()
        self._verified: dict[str, tuple[float, Tenant]] = {}

    @staticmethod
    def reads(key: str) -> bool:
        """Whether a bearer token has the form of a JWT."""
        return key.startswith("eyJ") and key.count(".") == 2

    async def identify(self, token: str) -> Tenant:
        """The tenant; raises :class:`ApiError`: 401 with the reason, or 503 while the issuer's keys are unknown."""
        digest = sha256(token.encode()).hexdigest()
        until, tenant = self._verified.get(digest, (0.0, None))
        if tenant is not None and time.time() < until:
            return tenant
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            claims = self._claims(token, key)
        except jwt.PyJWTError as error:
            raise unauthorized(f"The token is refused: {error}.") from error
        tenant = self._tenant(claims)
        if len(self._verified) >= _MAX_REMEMBERED:
            self._verified.pop(next(iter(self._verified)))
        self._verified[digest] = (min(float(claims["exp"]), time.time() + _KEYS_LIVE_S), tenant)
        return tenant

    def of_name(self, name: str) -> Tenant:
        """The tenant that tokens with this name in their claim belong to."""
        return msgspec.structs.replace(self._issuer.limits, name=name)

    def _claims(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        options: Any = {"require": ["exp", "iss", "aud", self._issuer.tenant_claim]}
        return jwt.decode(
            token,
            key,
            algorithms=_ALGORITHMS,
            issuer=self._issuer.issuer,
            audience=self._issuer.audience,
            leeway=_LEEWAY_S,
            options=options,
        )

    def _tenant(self, claims: Mapping[str, Any]) -> Tenant:
        name = claims[self._issuer.tenant_claim]
        if not isinstance(name, str) or not name:
            raise unauthorized(f"The token is refused: its claim `{self._issuer.tenant_claim}` must be a text.")
        return self.of_name(name)

    async def _key(self, key_id: str | None) -> jwt.PyJWK:
        async with self._fetching:
            now = time.monotonic()
            old = self._known(key_id) is None or now - self._fetched_at > _KEYS_LIVE_S
            if old and now - self._tried_at > _BETWEEN_FETCHES_S:
                self._tried_at = now
                await self._fetch()
        if not self._keys:
            message = "Tokens cannot be checked at the moment: the issuer's keys could not be read."
            raise ApiError(503, message, "server_error", code="keys_unavailable", retry_after_s=_BETWEEN_FETCHES_S)
        key = self._known(key_id)
        if key is None:
            raise unauthorized(f"The token is refused: its issuer has no key `{key_id}`.")
        return key

    def _known(self, key_id: str | None) -> jwt.PyJWK | None:
        """The key of an id; an issuer with one key may leave the id out of its tokens."""
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _fetch(self) -> None:
        """Read the issuer's keys; what is known stays when it does not answer."""
        try:
            keys = jwt.PyJWKSet.from_dict(await asyncio.to_thread(self._read_keys)).keys
        except (OSError, HTTPException, ValueError, KeyError, jwt.PyJWTError) as error:
            log.warning("the keys of %s cannot be read: %s", self._issuer.issuer, error)
            return
        self._keys = {key.key_id: key for key in keys}
        self._fetched_at = time.monotonic()

    def _read_keys(self) -> dict[str, Any]:
        url = self._issuer.jwks_url
        if not url:
            discovery = _get(f"{self._issuer.issuer.rstrip('/')}/.well-known/openid-configuration")
            if discovery.get("issuer") != self._issuer.issuer:
                raise ValueError(f"its discovery document is {discovery.get('issuer')!r}'s")
            url = str(discovery["jwks_uri"])
        return _get(url)


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
        document = json.loads(answer.read(_MAX_DOCUMENT_BYTES))
    if not isinstance(document, dict):
        raise ValueError(f"{url} is no JSON object")
    return document
