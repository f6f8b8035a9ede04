"""Decides which adapter gets which slot: pins, shares of tenants, and the adapter that was used longest ago.

An adapter keeps its slot while requests use it. A tenant whose adapters fill its share of the slots, half of those that
are not pinned, replaces its own adapters only: it takes none that others have used a moment ago.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

# For this long after its last use, an adapter is protected from tenants that have their share of the slots.
PROTECTED_S = 60.0
# An adapter waits this long for a slot before a busy one takes no more requests, so that its slot becomes free.
PATIENCE_S = 1.0


@dataclass(slots=True, eq=False)
class SlotUser:
    """An adapter that has a slot or waits for one."""

    digest: str
    name: str  # that clients use
    tenant: str  # that used it last
    used_at: float
    waits_since: float = 0.0
    slot: int = -1  # -1: it waits for one
    users: int = 0  # requests that run or wait with it
    loaded: bool = False


class AdapterSlotTable:
    """The slots, and the adapters that wait for one. Times are seconds of `clock`."""

    def __init__(self, n_slots: int, clock: Callable[[], float]) -> None:
        self.pinned: Collection[str] = frozenset()  # digests; fewer than there are slots
        self._clock = clock
        self._n_slots = n_slots
        self._free = list(range(n_slots))
        self._placed: list[SlotUser] = []
        self._waiting: list[SlotUser] = []  # by arrival

    def add(self, digest: str, name: str, tenant: str) -> SlotUser:
        """An adapter without a slot."""
        return SlotUser(digest, name, tenant, self._clock())

    def wait(self, user: SlotUser) -> None:
        """An adapter wants a slot; `place` will give it one."""
        user.waits_since = self._clock()
        self._waiting.append(user)

    def use(self, user: SlotUser, tenant: str) -> None:
        """Begin one use."""
        user.users += 1
        user.tenant, user.used_at = tenant, self._clock()

    def unuse(self, user: SlotUser) -> None:
        """End one use."""
        user.users -= 1
        user.used_at = self._clock()

    def drop(self, user: SlotUser) -> None:
        """Forget an adapter that could not be loaded."""
        if user.slot >= 0:
            self._placed.remove(user)
            self._free.append(user.slot)
        elif user in self._waiting:
            self._waiting.remove(user)

    def place(self) -> tuple[list[SlotUser], list[SlotUser]]:
        """Give slots to waiting adapters, first to tenants with few; returns those that got one, and the evicted."""
        placed, evicted = [], []
        for user in sorted(self._waiting, key=lambda one: (one.digest not in self.pinned, self._held(one.tenant))):
            if not self._free:
                if (victim := self._victim(user)) is None:
                    continue
                self._placed.remove(victim)
                self._free.append(victim.slot)
                evicted.append(victim)
            user.slot = self._free.pop()
            self._waiting.remove(user)
            self._placed.append(user)
            placed.append(user)
        return placed, evicted

    def yields(self, user: SlotUser) -> bool:
        """Whether an adapter should take no more requests, because another one has waited for its slot for long.

        Its requests end some time; without this rule, a slot whose requests overlap would never become free.
        """
        oldest = next((one for one in self._waiting if self._clock() - one.waits_since > PATIENCE_S), None)
        return oldest is not None and user is next(iter(self._replaceable(oldest)), None)

    @property
    def in_use(self) -> bool:
        """Whether every slot is in use by requests, or pinned."""
        return not self._free and all(one.users or not one.loaded or one.digest in self.pinned for one in self._placed)

    def _victim(self, user: SlotUser) -> SlotUser | None:
        """The adapter that gives way to `user`; None if none may."""
        return next((one for one in self._replaceable(user) if not one.users and one.loaded), None)

    def _replaceable(self, user: SlotUser) -> list[SlotUser]:
        """The adapters that may give way to `user` once they are unused, in this order."""
        yields = [one for one in self._placed if one.digest not in self.pinned]
        if self._held(user.tenant) >= self._share:
            unused = self._clock() - PROTECTED_S
            yields = [one for one in yields if one.tenant == user.tenant or (not one.users and one.used_at <= unused)]
        return sorted(yields, key=lambda one: (self._held(one.tenant) <= self._share, one.used_at))

    def _held(self, tenant: str) -> int:
        return sum(one.tenant == tenant and one.digest not in self.pinned for one in self._placed)

    @property
    def _share(self) -> int:
        return max(1, (self._n_slots - len(self.pinned)) // 2)
