"""The machine's resources that the processes of a fleet use, and their metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from redis import Redis

from bench.fleet.counted import Messages
from bench.fleet.installation import Fleet

_DECISIONS = "ryzanstein_router_decision_seconds_bucket"


@dataclass(frozen=True, slots=True)
class ComponentRates:
    """Use of all processes of a component by second."""

    cpu_s: float
    wakeups: float
    messages: float
    kib: float


@dataclass(frozen=True, slots=True)
class ComponentUse:
    """Use of all processes of a component: totals since their start, and what they hold now."""

    at: float  # time of the reading, in seconds of the monotonic clock
    processes: int
    cpu_s: float
    wakeups: int  # voluntary context switches
    messages: Messages  # gRPC messages; commands of Redis
    rss_mib: float
    descriptors: int  # the most that one process holds

    @classmethod
    def read(cls, processes: Sequence[psutil.Process], messages: Messages) -> ComponentUse:
        """Read it now."""
        return cls(
            time.monotonic(),
            len(processes),
            sum(_cpu_s(process.pid) for process in processes),
            sum(process.num_ctx_switches().voluntary for process in processes),
            messages,
            sum(process.memory_info().rss for process in processes) / 2**20,
            max(process.num_fds() for process in processes),
        )

    def rates(self, before: ComponentUse) -> ComponentRates:
        """The use since an earlier reading."""
        seconds, messages = self.at - before.at, self.messages - before.messages
        return ComponentRates(
            (self.cpu_s - before.cpu_s) / seconds,
            (self.wakeups - before.wakeups) / seconds,
            messages.count / seconds,
            messages.size / 1024 / seconds,
        )


def _cpu_s(pid: int) -> float:
    """CPU time of a process by its own clock, as of clock_getcpuclockid(3): /proc counts in steps of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)


def component_uses(fleet: Fleet) -> dict[str, ComponentUse]:
    """The use of every component."""
    with Redis.from_url(fleet.redis.url) as client:
        redis = client.info("stats")
    size = redis["total_net_input_bytes"] + redis["total_net_output_bytes"]
    uses = {"redis": ComponentUse.read([fleet.redis_usage], Messages(redis["total_commands_processed"], size))}
    for component in dict.fromkeys(process.component for process in fleet.processes):
        processes = fleet.of(component)
        messages = sum((Messages.read(process.messages) for process in processes), Messages())
        uses[component] = ComponentUse.read([process.usage for process in processes], messages)
    return uses


async def decision_buckets(fleet: Fleet) -> Mapping[float, float]:
    """Decisions of all routers by the upper bound of their time in seconds, cumulated."""
    buckets = defaultdict[float, float](float)
    for router in fleet.of("router"):
        for sample in await _samples(f"http://127.0.0.1:{router.environment['METRICS_PORT']}", _DECISIONS):
            buckets[float(sample.labels["le"])] += sample.value
    return buckets


async def gateway_samples(fleet: Fleet, name: str) -> Sequence[Sample]:
    """The samples of a metric of all gateways."""
    return [sample for url in fleet.urls for sample in await _samples(url, name)]


async def _samples(url: str, name: str) -> Sequence[Sample]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        families = text_string_to_metric_families((await client.get(f"{url}/metrics")).text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """The time within which a share of the decisions between two readings came, interpolated within a bucket."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total, low, below = counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= share * total and count > below:
            return low if bound == float("inf") else low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return 0.0
