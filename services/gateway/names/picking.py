"""The choice of a route's target. It depends on its inputs alone, so that all gateways choose alike without a state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

from msgspec import Struct

from services.gateway.names.route import ModelRoute, Target

_FRACTIONS = 1 << 64


class Origin(Struct, frozen=True):
    """The properties of a request by which its target is chosen."""

    tenant: str
    session: str
    draw: str  # a random text of the request

    def key(self, route: ModelRoute) -> str:
        """The text that decides; a request without a session, or without a tenant, has the next narrower one."""
        session = f"session {self.tenant}\0{self.session}" if self.session else f"request {self.draw}"
        if route.sticky == "tenant":
            return f"tenant {self.tenant}" if self.tenant else session
        return session if route.sticky == "session" else f"request {self.draw}"


def pick(name: str, targets: Iterable[Target], key: str) -> Target:
    """One of the targets, each with the probability of its weight (at least one is above 0).

    Weighted rendezvous hashing (Mosharaf and others 2009): a change of weights moves only as many keys as it must.
    """
    weighted = (target for target in targets if target.weight)
    return max(weighted, key=lambda target: -target.weight / math.log(fraction(name, target.model, key)))


def fraction(*parts: str) -> float:
    """A number between 0 and 1, neither included, that the texts determine; uniform over them."""
    digest = blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / _FRACTIONS
