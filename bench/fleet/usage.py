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
from bench.fleet.installation import HOST, Fleet

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
        for sample in await _samples(f"http://{HOST}:{router.environment['METRICS_PORT']}", _DECISIONS):
            buckets[float(sample.labels["le"])] += sample.value
    return buckets


async def gateway_samples(fleet: Fleet, name: str) -> Sequence[Sample]:
    """The samples of a metric of all gateways."""
    return [sample for url in fleet.urls for sample in await _samples(url, name)]


async def _samples(url: str, name: str) -> Sequence[Sample]:
    families = text_string_to_metric_families(await _metrics(url))
    return [sample for family in families for sample in family.samples if sample.name == name]


async def _metrics(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return (await client.get(f"{url}/metrics")).text


def quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """The time within which a share of the decisions between two readings came, interpolated within a bucket."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total, low, below = counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= share * total and count > below:
            return low if bound == float("inf") else low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return 0.0


@dataclass(frozen=True, slots=True)
class IndexState:
    """The index of the workers' KV blocks, as sums over all coordinators."""

    events: float = 0.0  # applied since their start
    entries: float = 0.0  # pairs of block and worker
    synced: float = 0.0  # workers whose events they have all
    lag_s: float = 0.0  # how long the worker that has been out of step the longest has been so

    def __add__(self, other: IndexState) -> IndexState:
        return IndexState(
            self.events + other.events,
            self.entries + other.entries,
            self.synced + other.synced,
            max(self.lag_s, other.lag_s),
        )


async def index_state(fleet: Fleet) -> IndexState:
    """The state of the index, which coordinators bring up to date each second. Raises httpx.HTTPError."""
    states = [await _index_state(process.environment["METRICS_PORT"]) for process in fleet.of("kv-coordinator")]
    return sum(states, IndexState())


async def _index_state(port: str) -> IndexState:
    text = await _metrics(f"http://{HOST}:{port}")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    prefix = "ryzanstein_coordinator"
    return IndexState(
        values[f"{prefix}_events_total", "events"],
        values[f"{prefix}_entries",],
        values.get((f"{prefix}_workers", "synced"), 0.0),  # absent until the first worker is known
        values[f"{prefix}_lag_seconds",],
    )
