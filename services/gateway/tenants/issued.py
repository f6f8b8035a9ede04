"""Issued API keys: `rz-ID-SECRET`. The id finds the record; only salted hashes of the secret are stored."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated

import msgspec

from services.common.patterns import END
from services.gateway.tenants.tenant import Tenant

_FORM = re.compile(r"^rz-([a-z0-9]{12})-([A-Za-z0-9_-]{43})$")
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_HEX_SHA256 = "^[0-9a-f]{64}" + END


class SecretHash(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A secret that opens a key."""

    salt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}" + END)]
    sha256: Annotated[str, msgspec.Meta(pattern=_HEX_SHA256)]  # digest of the salt's text and the secret
    until: float = 0.0  # seconds since the epoch; 0: no end

    def opens(self, secret: str, now: float) -> bool:
        """Whether it is this secret, compared in constant time, and still valid."""
        return compare_digest(self.sha256, _salted(self.salt, secret)) and (not self.until or now < self.until)


class IssuedKey(Tenant, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key with its tenant's name and limits, as it is stored."""

    id: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{12}" + END)]
    secrets: tuple[SecretHash, ...]
    created_at: int = 0  # seconds since the epoch
    until: float = 0.0  # the whole key's end; 0: no end

    @property
    def key_id(self) -> str:
        """See :class:`Tenant`."""
        return self.id

    def opens(self, secret: str, now: float) -> bool:
        """Whether a secret opens the key now. All hashes are compared, so the time leaks nothing."""
        matches = [one.opens(secret, now) for one in self.secrets]
        return any(matches) and not (self.until and now >= self.until)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """The key that a client sent."""

    id: str
    secret: str

    @classmethod
    def parse(cls, key: str) -> PresentedKey | None:
        """The parts of an issued key; None for a key of another form."""
        match = _FORM.match(key)
        return cls(*match.groups()) if match else None

    def __str__(self) -> str:
        return f"rz-{self.id}-{self.secret}"


def new_id() -> str:
    """A key's id, which is no secret."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(12))


def new_secret() -> tuple[str, SecretHash]:
    """A secret of 256 random bits, and what is stored of it."""
    secret, salt = secrets.token_urlsafe(32), secrets.token_hex(16)
    return secret, SecretHash(salt=salt, sha256=_salted(salt, secret))


def still_valid(hashes: Sequence[SecretHash], now: float) -> tuple[SecretHash, ...]:
    """The secrets that have not ended."""
    return tuple(one for one in hashes if not one.until or now < one.until)


# An unknown id costs the same comparison as a known one.
NO_KEY = IssuedKey(id="0" * 12, secrets=(SecretHash(salt="0" * 32, sha256="0" * 64),))


def _salted(salt: str, secret: str) -> str:
    # One round: 256 random bits cannot be guessed, and every request pays for this.
    return sha256(f"{salt}{secret}".encode()).hexdigest()
