"""A canary: a model that takes a route over by steps, or not, after a comparison of both on mirrored requests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.names.route import Mirror, ModelName, ModelRoute, Target

State = Literal["running", "promoted", "rolled_back", "stopped"]
_SHARES = (0.25, 0.5, 1.0)  # parts of the clients' requests after the first step
_FEW = 20  # sequences below which no model is judged
_WORSE = 0.02  # share of errors more than the target's
_AGREEMENT = 0.5  # least share of a greedy answer before the first differing token
_PACE, _PACE_S = 1.5, 0.005  # times the target's time between tokens, and seconds more
_FIRST, _FIRST_S = 3.0, 0.5  # the same of the first token; mirrored requests have the last priority
_PARTS = 100_000
_MIRRORED = 16  # mirrored requests of a gateway at a time


class CanaryOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An administrator's order to start a canary."""

    model: ModelName
    share: Annotated[float, Meta(gt=0, le=1)] = 0.05  # mirrored part of the requests
    sequences: Annotated[int, Meta(ge=_FEW, le=100_000)] = 200  # compared ones for each step


class Canary(CanaryOrder, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A canary as Redis has it."""

    base: ModelRoute  # the route before
    live_before: bool  # whether that was a live route
    version: int  # version of the live route that the canary has made
    by: str
    at: float  # time of the last change, seconds since the epoch
    step: int = 0  # 0: mirrored requests alone
    state: State = "running"
    reason: str = ""

    @property
    def weight(self) -> float:
        """The model's part of the clients' requests."""
        return 0.0 if self.step == 0 else _SHARES[self.step - 1]

    @property
    def route(self) -> ModelRoute:
        """The route at this step."""
        weight, targets = self.weight, self.base.targets
        if weight == 1:
            return msgspec.structs.replace(self.base, targets=(Target(model=self.model),), mirror=None)
        total = sum(target.weight for target in targets)
        old = [
            Target(model=target.model, weight=round(_PARTS * (1 - weight) * target.weight / total))
            for target in targets
            if target.model != self.model
        ]
        new = [Target(model=self.model, weight=round(_PARTS * weight))] if weight else []
        mirror = Mirror(model=self.model, share=self.share, max_running=_MIRRORED)
        return msgspec.structs.replace(self.base, targets=(*old, *new), mirror=mirror)


class Tally(msgspec.Struct, kw_only=True):
    """Sums over the compared sequences of a step; times in seconds."""

    sequences: float = 0
    failed: float = 0
    target_failed: float = 0
    refused: float = 0  # texts that could not be kept to their grammar
    target_refused: float = 0
    greedy: float = 0
    agreement: float = 0  # share of each greedy answer before the first differing token
    timed: float = 0  # sequences of which all times are known
    first_s: float = 0
    target_first_s: float = 0
    pace_s: float = 0
    target_pace_s: float = 0

    def add(self, other: Tally) -> None:
        """Add other sequences."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def worse(self) -> str:
        """Why the model is worse than the target, as far as that is known; empty: it is not."""
        if self.sequences < _FEW:
            return ""
        for name, failed, before in (
            ("errors", self.failed, self.target_failed),
            ("refusals by grammar", self.refused, self.target_refused),
        ):
            if failed - before > max(_WORSE * self.sequences, 1):
                return f"{name}: {failed / self.sequences:.1%} against {before / self.sequences:.1%}"
        if self.greedy >= _FEW and self.agreement < _AGREEMENT * self.greedy:
            return f"greedy answers differ after {self.agreement / self.greedy:.1%} of their tokens"
        slow = self.pace_s - self.target_pace_s > _PACE_S * self.timed
        if self.timed >= _FEW and slow and self.pace_s > _PACE * self.target_pace_s:
            return f"time between tokens: {self._times(self.pace_s, self.target_pace_s)}"
        late = self.first_s - self.target_first_s > _FIRST_S * self.timed
        if self.timed >= _FEW and late and self.first_s > _FIRST * self.target_first_s:
            return f"first token: {self._times(self.first_s, self.target_first_s)}"
        return ""

    def _times(self, mine: float, other: float) -> str:
        return f"{1000 * mine / self.timed:.1f} ms against {1000 * other / self.timed:.1f} ms"
