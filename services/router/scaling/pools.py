"""The pools that routers scale, as the chart writes them into the ConfigMap of the models."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from services.router.scaling.decision import Targets

KEY = "scaling"
# A floor of the schedule holds from this time before its hour, so that workers have started when the hour begins.
START_AHEAD = timedelta(minutes=5)

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = get_args(Weekday)


class ScalingMode(StrEnum):
    """The component that sets the replicas: the routers' leader, or KEDA by routers' reports."""

    BUILTIN = "builtin"
    KEDA = "keda"


class ScheduledFloor(BaseModel):
    """The fewest replicas of a pool during an hour of some weekdays, in UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hour: int = Field(ge=0, le=23)
    min: int = Field(ge=1)
    days: tuple[Weekday, ...] = WEEKDAYS

    def holds(self, at: datetime) -> bool:
        """Whether a time in UTC is in the hour."""
        return at.hour == self.hour and WEEKDAYS[at.weekday()] in self.days


class ScaledPool(BaseModel):
    """A pool of workers. Their ids are the names of its StatefulSet's pods, with several models and `.0`, `.1` …"""

    # Unknown fields are those of a later version.
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)

    name: str = Field(min_length=1)
    mode: ScalingMode
    stateful_set: str = Field(min_length=1)
    models: tuple[str, ...] = Field(min_length=1)
    min: int = Field(ge=0)
    max: int = Field(ge=1)
    first_token_seconds: float = Field(gt=0)
    token_milliseconds: float = Field(gt=0)
    kv_percent: float = Field(gt=0, le=100)
    idle_seconds: float = Field(ge=0)
    scale_down_after_seconds: float = Field(ge=0)
    schedule: tuple[ScheduledFloor, ...] = ()

    def targets(self, now: datetime) -> Targets:
        """For decisions at a time in UTC. The schedule raises `min`, to `max` at most."""
        floors = (each.min for each in self.schedule if each.holds(now) or each.holds(now + START_AHEAD))
        return Targets(
            least=min(max([self.min, *floors]), self.max),
            most=self.max,
            first_token_s=self.first_token_seconds,
            token_ms=self.token_milliseconds,
            kv_share=self.kv_percent / 100,
            idle_s=self.idle_seconds,
            down_after_s=self.scale_down_after_seconds,
        )

    def ordinal(self, worker_id: str) -> int | None:
        """The ordinal of a worker's pod; None for workers of other pools."""
        prefix, _, number = worker_id.partition(".")[0].rpartition("-")
        return int(number) if prefix == self.stateful_set and number.isdecimal() else None


class Scaling(BaseModel):
    """All scaled pools, and the Lease (coordination.k8s.io) of their leader."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lease: str = ""
    pools: tuple[ScaledPool, ...] = ()

    @property
    def builtin(self) -> tuple[ScaledPool, ...]:
        """The pools that the leader scales."""
        return tuple(pool for pool in self.pools if pool.mode is ScalingMode.BUILTIN)

    def find(self, name: str) -> ScaledPool | None:
        """A pool by name."""
        return next((pool for pool in self.pools if pool.name == name), None)
