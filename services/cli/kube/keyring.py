"""The CAs of an installation, and the steps in which one replaces another without a refused connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from services.common.tls.issuing import Authority, Issued

AUTHORITY_LIFE = timedelta(days=1825)
LEAF_LIFE = timedelta(days=90)
# The kubelet writes a changed secret into its pods within two minutes.
_SPREAD = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Keyring:
    """The CA that issues certificates, its successor and its predecessor; all services trust all three.

    A new CA is first trusted, then issues, then the old CA is removed; each step takes a run.
    """

    current: Authority
    stepped: float  # time of the last step, seconds since the epoch
    incoming: Authority | None = None
    outgoing: bytes = b""  # its certificate

    @staticmethod
    def new(now: float) -> Keyring:
        """A first CA."""
        return Keyring(Authority.new(AUTHORITY_LIFE, now), now)

    @property
    def trusted(self) -> bytes:
        """The content of every `ca.crt`."""
        incoming = self.incoming.own.certificate if self.incoming else b""
        return self.current.own.certificate + incoming + self.outgoing

    def advanced(self, now: float, *, replace_authority: bool) -> Keyring:
        """The next step of a replacement, which begins when it is asked for, or when the CA's last third begins."""
        if self.incoming or self.outgoing:
            if now - self.stepped < _SPREAD.total_seconds():
                return self
            if self.incoming:
                return Keyring(self.incoming, now, outgoing=self.current.own.certificate)
            return replace(self, stepped=now, outgoing=b"")
        if replace_authority or last_third(self.current.own, now):
            return replace(self, stepped=now, incoming=Authority.new(AUTHORITY_LIFE, now))
        return self

    def to_data(self) -> dict[str, bytes]:
        """The data of its secret."""
        data = {"tls.crt": self.current.own.certificate, "tls.key": self.current.own.key}
        data["stepped"] = str(self.stepped).encode()
        if self.incoming:
            data |= {"incoming.crt": self.incoming.own.certificate, "incoming.key": self.incoming.own.key}
        if self.outgoing:
            data["outgoing.crt"] = self.outgoing
        return data

    @staticmethod
    def from_data(data: Mapping[str, bytes]) -> Keyring:
        """Read the data of a secret; raises KeyError for one that is missing."""
        incoming = Authority(Issued(data["incoming.crt"], data["incoming.key"])) if "incoming.crt" in data else None
        current = Authority(Issued(data["tls.crt"], data["tls.key"]))
        return Keyring(current, float(data["stepped"]), incoming, data.get("outgoing.crt", b""))


def last_third(issued: Issued, now: float) -> bool:
    """Whether two thirds of a certificate's life are over."""
    begins, ends = issued.leaf.not_valid_before_utc.timestamp(), issued.leaf.not_valid_after_utc.timestamp()
    return now > ends - (ends - begins) / 3
