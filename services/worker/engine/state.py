"""State, totals and facts of an engine, and the model that it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from ryzanstein.v1 import worker_pb2 as pb

from services.common.attention import DENSE, AttentionMode
from services.compute.ranks.memory import MemoryAccount
from services.worker.engine.kv_events import BlockPlace


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot of an engine."""

    phase: pb.Phase
    detail: str  # why the phase is not SERVING
    running: int = 0  # requests
    waiting: int = 0
    queued_prefill_tokens: int = 0  # known tokens that are not computed yet
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0  # reusable, evictable
    kv_blocks_total: int = 0
    max_request_tokens: int = 0  # largest sum of prompt and output tokens that fits an empty pool
    prefill_tokens_per_s: float = 0.0  # measured; 0 before the first step with prompts
    decode_step_ms: float = 0.0
    computed_tokens: int = 0  # prompt and answer tokens
    kv_bytes_per_token: int = 0  # on all ranks; 0: blocks cannot be transferred
    pull_bytes_per_s: float = 0.0  # bandwidth of pulls from other workers
    adapters: tuple[pb.ResidentAdapter, ...] = ()  # by digest
    adapter_read_ms: float = 0.0  # how long a load from files takes; 0: not measured
    adapter_copy_ms: float = 0.0  # the same from memory
    adapter_slots_in_use: bool = False  # all of them, by requests
    adapter_slots: int = 0
    adapter_waiting: int = 0  # requests whose adapter is being loaded or waits for a slot
    memory_bytes: int = 0  # memory that ranks and host tier hold now; 0: not measured
    promised_bytes: int = 0  # memory that the ranks have yet to take for their KV cache after a wake
    memory: Mapping[str, int] = field(default_factory=dict)  # `EngineFacts.memory`, by purpose
    kv_places: tuple[pb.KvPlaceState, ...] = ()  # places below the device, fastest first
    wake_ms: int = 0  # time of the last wake, from asleep to serving; 0: not measured
    standby_tokens: int = 0  # requests of this length, output included, want a standby; 0: none does
    warming: bool = False  # not serving yet: the weights are loaded, and first steps are computed

    @classmethod
    def of_all(cls, states: Sequence[EngineState]) -> EngineState:
        """The sums of the levels of several engines, with the phase of the first one that does not serve."""
        levels = (
            "running",
            "waiting",
            "queued_prefill_tokens",
            "kv_blocks_used",
            "kv_blocks_cached",
            "kv_blocks_total",
        )
        first = next((state for state in states if state.phase != pb.PHASE_SERVING), states[0])
        sums = {name: sum(getattr(state, name) for state in states) for name in (*levels, "adapter_waiting")}
        return replace(first, **sums, adapters=tuple(one for state in states for one in state.adapters))


DRAFTERS = ("prompt_lookup", "suffix", "grammar", "prediction")


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    prefill_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    discarded_tokens: int = 0  # tokens drawn after the request had ended
    adapter_evictions: int = 0  # adapters that lost their slots to others
    proposed_tokens: Counter[str] = field(
        default_factory=Counter
    )  # drafted tokens that steps verified, by one of DRAFTERS
    accepted_tokens: Counter[str] = field(default_factory=Counter)  # those that were drawn


PULL_FAILURES = ("mismatch", "gone", "busy", "timeout", "unreachable", "evicted", "corrupt", "ranks_lost", "error")


COPY_FAILURES = ("mismatch", "gone", "busy", "full", "unreachable", "error")


STORE_FAILURES = ("corrupt", "io", "late", "slow", "timeout", "error")  # see PlaceTotals.failures


@dataclass(slots=True)
class PlaceTotals:
    """KV blocks of a place below the device since the start, and how full it is."""

    hits: int = 0  # blocks that a prompt wanted, the device did not hold, and the place did
    misses: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    # Blocks: corrupt (damaged or foreign), late (evicted from the device before they were stored), slow (a load would
    # take longer than computing), timeout (a load took too long). Attempts to copy or to load some: io, error (others).
    failures: Counter[str] = field(default_factory=Counter)
    fault: str = ""  # why no block was stored at the last attempt, which is repeated; empty: none failed
    bytes: int = 0
    capacity_bytes: int = 0

    @property
    def coarse_bytes(self) -> int:
        """`bytes` in steps of a hundredth of the capacity, so that not every block is news for routers."""
        return self.bytes * 100 // self.capacity_bytes * self.capacity_bytes // 100


class TotalsByPlace(dict[BlockPlace, PlaceTotals]):
    """The totals of the places that are switched on, fastest first."""

    @property
    def host_bytes(self) -> int:
        """Bytes of KV in the host's memory, in steps of a hundredth of the capacity."""
        return self[BlockPlace.HOST].coarse_bytes if BlockPlace.HOST in self else 0

    def __add__(self, more: TotalsByPlace) -> TotalsByPlace:
        """The sums of two engines."""
        both = {place: [each[place] for each in (self, more) if place in each] for place in {**self, **more}}
        return TotalsByPlace({place: add_totals(totals) for place, totals in both.items()})


@dataclass(slots=True)
class TransferTotals:
    """KV blocks transferred between workers, and between the places of this one, since the start."""

    pulled_blocks: int = 0
    pulled_bytes: int = 0
    pulled_seconds: float = 0.0  # including failed pulls
    pull_failures: Counter[str] = field(default_factory=Counter)  # by one of PULL_FAILURES
    sent_blocks: int = 0
    sent_bytes: int = 0
    copied_blocks: int = 0  # copies of other workers' running requests
    copied_bytes: int = 0
    copy_failures: Counter[str] = field(default_factory=Counter)  # copies that standbys did not take, by reason
    copy_lag_blocks: int = 0  # complete blocks of running requests that their standbys do not hold now
    resumed_tokens: int = 0  # prompt tokens of requests that other workers had begun
    resumed_cached_tokens: int = 0  # those that were found in the prefix cache
    places: TotalsByPlace = field(default_factory=TotalsByPlace)

    def began(self, attempt: int, n_prompt: int, n_cached: int) -> None:
        """Count the cached tokens of a request's prompt if another worker had begun the request."""
        if attempt > 1:
            self.resumed_tokens += n_prompt
            self.resumed_cached_tokens += n_cached


TotalsT = TypeVar("TotalsT", EngineCounters, TransferTotals, PlaceTotals)


def add_totals(totals: Sequence[TotalsT]) -> TotalsT:
    """The sums of the totals of several engines; one engine's totals themselves."""
    if len(totals) == 1:
        return totals[0]
    sums = {each.name: getattr(totals[0], each.name) for each in fields(totals[0])}
    for more in totals[1:]:
        sums = {name: value + getattr(more, name) for name, value in sums.items()}
    return type(totals[0])(**sums)


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter that fits the engine's model."""

    name: str  # that clients use; empty if it has none yet
    digest: str
    source: str
    rank: int
    n_bytes: int = 0  # in a rank's memory, in float32
    pinned: bool = False  # it is loaded before it is asked for, and keeps its slot


def classes_message(labels: Sequence[str], function: str) -> pb.Classes:
    """The labels of a classifier, and the function that makes scores: softmax, sigmoid, identity; for gateways."""
    return pb.Classes(labels=labels, function=f"FUNCTION_{function.upper()}")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Facts about the served model, known before the engine has started."""

    architecture: str
    dtype: str
    device: str
    tensor_parallel: int
    hash_root: str  # root of the block hashes: equal only for workers with interchangeable KV
    tokenizer_json: bytes
    chat_template: str
    special_tokens: Mapping[str, str]
    add_bos_token: bool
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]  # the publisher's recommendations
    generates: bool = True  # False: it only embeds
    classes: pb.Classes | None = None  # labels of a classifier, which answers `embed` with their numbers
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before what is embedded, by name
    default_prompt: str = ""  # the name of one of them; empty: none
    kv_dtype: str = ""  # dtype of the KV cache; empty: that of `dtype`
    engine: str = "native"
    resume: str = "exact"  # or approximate: a resumed text may differ from the uninterrupted one
    pulls: bool = True  # KV blocks can be copied to and from other workers
    adapters: tuple[AdapterFacts, ...] = ()  # those of the worker's settings
    adapter_slots: int = 0  # adapters computed at a time
    attention: AttentionMode = DENSE  # mode of requests without one
    attention_modes: tuple[str, ...] = ()  # modes besides dense
    images: pb.ImageInput | None = None  # None: texts alone


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts known once the engine has started."""

    vocab_size: int
    hidden_size: int
    max_request_tokens: int
    startup_s: Mapping[str, float]  # by phase, in order
    memory: MemoryAccount  # while it serves
    weight_formats: Mapping[str, str] = field(default_factory=dict)  # in memory, by the weights' name in every layer
