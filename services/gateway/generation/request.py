"""A validated request, the same for all APIs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace
from ryzanstein.v1 import worker_pb2

from services.common.blockhash import ImageSpan
from services.gateway.api.ignored import Ignored
from services.gateway.generation.group import SequenceGroup
from services.gateway.names.route import Condition
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.patience import StartPatience

_SEED_MASK = (1 << 64) - 1
_WORKERS = [name for name in worker_pb2.Sampling.DESCRIPTOR.fields_by_name if name != "seed"]  # named alike here
_values = attrgetter(*_WORKERS)
LAST_PRIORITY = 100  # priority of requests that wait for all others, such as those of batches


class SamplingOptions(Struct, frozen=True):
    """How tokens are chosen and when a sequence ends."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: str = ""  # in llguidance's form; empty: any text
    attention: worker_pb2.Attention | None = None  # the keys that decodes attend to; None: all

    def to_proto(self) -> worker_pb2.Sampling:
        """The worker's part of it."""
        # Without a seed of its own a request gets one here, so that another worker can continue it exactly.
        seed = random.getrandbits(64) if self.seed is None else self.seed & _SEED_MASK
        return worker_pb2.Sampling(**dict(zip(_WORKERS, _values(self), strict=True)), seed=seed)

    def described(self) -> dict[str, int | float]:
        """The options that a span has; none of them is a part of the prompt."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    @property
    def deterministic(self) -> bool:
        """Whether the same request always gives the same tokens."""
        return self.temperature == 0 or self.seed is not None


class Caller(Struct, frozen=True):
    """On whose behalf a request runs."""

    tenant: str = ""
    priority: int = 0
    weight: int = 0
    session: str = ""
    traceparent: str = ""
    ignored: Ignored = field(default_factory=Ignored)  # collects what translations of its body leave out
    admitted_at: float = 0.0  # event-loop time
    time_limit_s: float = 0.0  # limit of the whole request from then on; 0: none
    handed_on: frozenset[Condition] = frozenset()  # conditions on which another model takes it over
    wait_s: float | None = None  # longest search for a first worker, where that is one of them
    keep_alive_s: float | None = None  # how long its model stays awake after it; negative: for good
    mirrored: bool = False  # a second answer, which no client gets: not resumed, counted apart
    patience: StartPatience = field(default_factory=StartPatience)

    @property
    def deadline(self) -> float | None:
        """The event-loop time at which the request's time is over; None: never."""
        return self.admitted_at + self.time_limit_s if self.time_limit_s else None


def spans_of(images: Sequence[worker_pb2.Image]) -> list[ImageSpan]:
    """The images of a prompt, for its hashes."""
    return [ImageSpan(image.first, image.first + image.tokens, image.digest) for image in images]


class GenerationRequest(Struct, frozen=True):
    """One sequence to generate, or one embedding to compute."""

    request_id: str
    model: ServedModel
    prompt_ids: list[int]
    options: SamplingOptions
    caller: Caller
    block_hashes: list[int]
    embed: bool = False
    second_from: int = 0  # position of the second of two texts; 0: one text
    group: SequenceGroup | None = None  # group of a request with several sequences
    prediction_ids: list[int] | None = None  # tokens of the expected answer; None: the client sent none
    images: Sequence[worker_pb2.Image] = ()  # images of the prompt, in order

    @property
    def adapter(self) -> worker_pb2.Adapter | None:
        """The adapter of its model, for workers."""
        adapter = self.model.adapter
        return worker_pb2.Adapter(name=adapter.name, digest=adapter.digest, source=adapter.source) if adapter else None

    def choice(self, index: int) -> GenerationRequest:
        """The request of choice `index`: same prompt, a seed of its own that follows from the request's seed."""
        if index == 0:
            return self
        seed = None if self.options.seed is None else self.options.seed + index
        return replace(self, request_id=f"{self.request_id}-{index}", options=replace(self.options, seed=seed))
