"""A request of the scheduler: known tokens, planned positions, a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ryzanstein.v1.worker_pb2 import Sampling

from services.common.blockhash import HASH_BLOCK_TOKENS, ImageSpan, extend_chain, wire_hash
from services.compute.token_logprobs import NO_TOKEN, TokenLogprobs
from services.worker.drafting.drafts import Drafts
from services.worker.engine.output import Finish, Output, Prefill, checked, overflowed
from services.worker.protocol.plan import Admission, Chunk, Frame, SlotResult


class Status(Enum):
    """State of a request. A RETIRING request keeps its blocks until no plan in flight refers to them."""

    WAITING = "waiting"
    # Waits for blocks that a running request computes or that come from another place, or for its turn in quarantine.
    DEFERRED = "deferred"
    RUNNING = "running"
    RETIRING = "retiring"  # preempted, will wait again
    DONE = "done"


@dataclass(slots=True, eq=False)
class Request:
    """The caller's parameters and the scheduler's progress.

    Positions of the sequence are always in this order:

        0 <= n_published * block_tokens <= n_written <= n_planned <= n_expected <= limit
    """

    token_ids: list[int]  # prompt, then generated tokens (those of earlier attempts included)
    n_prompt: int
    sampling: Sampling  # its `stop_token_ids` are all tokens that end the text, EOS included
    max_tokens: int = 0  # generated tokens, earlier attempts included; 0: as many as fit
    tenant: str = ""
    weight: int = 1
    priority: int = 0  # lower runs first
    chain_root: bytes = b""
    embed: bool = False  # wants the pooled hidden state instead of tokens
    second_from: int = 0  # position of the second of two texts; 0: one text
    cacheable: bool = True  # False: neither reads nor feeds the prefix cache (start-up probe)
    adapter: int = -1  # slot of its adapter on the ranks; -1: none. Set before the request is queued
    trial_tokens: int = 0  # > 0: a suspect; it runs without another suspect until it generated this many tokens here
    prediction_ids: Sequence[int] = ()  # tokens of an expected answer, from which drafts are taken
    images: Sequence[ImageSpan] = ()  # images of the prompt, for its digests
    frames: Sequence[Frame] = ()  # their frames, by position

    # Kept by the scheduler.
    status: Status = Status.WAITING
    arrival: int = 0  # order of submission
    queued_at: float = 0.0
    admitted_at: float = 0.0  # first admission
    slot: int = -1
    limit: int = 0  # the sequence never grows beyond this many tokens
    n_planned: int = 0  # positions covered by plans; those of proposals that fall are planned anew
    n_written: int = 0  # positions covered by returned plans
    n_published: int = 0  # blocks offered to the prefix cache
    n_begun: int = 0  # position of the first row since its admission
    prefills: bool = True  # no plan since its admission draws: its next rows are those of a prompt
    n_encoded: int = 0  # frames that plans since the admission encode to the end, or that end before them
    n_layers: int = 0  # layers of the tower that these plans compute for the frame after them
    n_charged: int = 0  # positions charged to its tenant
    n_in_flight: int = 0  # plans in flight that compute anything for the request
    n_preempted: int = 0
    cleared_at: int = 0  # generated tokens that clear a suspect
    cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # one per full hash block of token_ids
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    announced: bool = False  # the first output was returned
    patient: bool = True  # may still wait for the blocks of a producer
    looked_up: int | None = None  # most cached blocks since the look-up in other places; None: none in this wait
    end_token_ids: frozenset[int] = field(init=False)  # copy of `sampling.stop_token_ids` for fast look-ups
    scores_prompt: bool = field(init=False)  # prompt log-probabilities are wanted
    narrows: bool = field(init=False)  # generated tokens attend to some keys only
    drafts: Drafts | None = None  # None: nothing is proposed

    def __post_init__(self) -> None:
        self.end_token_ids = frozenset(self.sampling.stop_token_ids)
        self.scores_prompt = self.sampling.HasField("prompt_logprobs")
        self.narrows = bool(self.sampling.attention.window or self.sampling.attention.pages)

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks may replace computing: not when the output needs every prompt position."""
        return self.cacheable and not (self.embed or self.scores_prompt)

    @property
    def n_generated(self) -> int:
        """Number of known tokens after the prompt."""
        return len(self.token_ids) - self.n_prompt

    @property
    def n_expected(self) -> int:
        """Number of known tokens once the plans in flight have returned, if all of their proposals stand."""
        return max(len(self.token_ids), self.n_planned + 1)

    def advance(self, chunk: Chunk, record: SlotResult) -> Output | None:
        """Take the result of a chunk; returns its output if the chunk drew."""
        _, start, n_rows, draws, _, proposals = chunk
        _, token_ids, logprobs, prompt_logprobs, pooled, failure, forced = record
        n_known = len(self.token_ids)
        finish = self._append(token_ids)
        n = len(self.token_ids) - n_known
        if proposals:
            n_rows = max(1, n)  # those that computed the tokens before the last
            self.n_planned = start + n_rows
        self.n_written = start + n_rows
        if self.scores_prompt and not self.announced:
            self.prompt_logprobs += prompt_logprobs
        if not draws:
            return None
        if self.drafts is not None and self.drafts.forced is not None:
            self.drafts.forced.force(forced, len(self.token_ids))
        prefill = None if self.announced else self.prefill()
        self.announced = True
        if self.embed:
            return checked(Output(0, (), Finish.EMBEDDED, prefill, embedding=pooled))
        if failure and finish is None:
            finish = Finish.FAILED
        output = Output(n_known - self.n_prompt, token_ids[:n], finish, prefill, logprobs[:n], (), failure)
        return overflowed(output) if finish is None and n < len(token_ids) else checked(output)

    def _append(self, token_ids: Sequence[int]) -> Finish | None:
        """Append drawn tokens up to NO_TOKEN or the end of the text; returns the finish reason, if it ends."""
        for token in token_ids:
            if token == NO_TOKEN:
                break
            self.token_ids.append(token)
            if token in self.end_token_ids:
                return Finish.STOP
            if len(self.token_ids) >= self.limit:
                return Finish.LENGTH
        return None

    def restart(self) -> None:
        """Forget the progress of a preempted request, whose blocks are released."""
        self.n_planned = self.n_written = self.n_published = 0
        self.looked_up = None
        if not self.announced:
            self.prompt_logprobs.clear()

    def begin(self, start: int, n_published: int) -> None:
        """Begin, perhaps again, at position `start`: what is before is cached."""
        self.n_planned = self.n_written = self.n_begun = start
        self.n_published, self.prefills = n_published, True
        self.n_encoded, self.n_layers = sum(frame.end <= start for frame in self.frames), 0

    def admission(self, restore: int = -1) -> Admission:
        """The message by which ranks learn of the request, before its first chunk; `restore` as in `Admission`."""
        return Admission(
            self.slot,
            self.sampling,
            tuple(self.token_ids),
            self.n_prompt,
            self.embed,
            self.second_from,
            self.adapter,
            restore,
            tuple((frame.first, frame.n_tokens // frame.columns, frame.columns) for frame in self.frames),
        )

    def prefill(self) -> Prefill:
        """The prompt's times, cached tokens and log-probabilities, for the first output."""
        return Prefill(self.queued_at, self.admitted_at, self.cached_tokens, tuple(self.prompt_logprobs))

    def check(self, block_tokens: int, *, caches: bool = True) -> None:
        """Raise AssertionError when the positions of a running request are out of order."""
        assert self.n_published * block_tokens <= self.n_written <= self.n_planned
        assert self.n_planned <= self.n_expected <= self.limit
        assert not caches or self.n_planned <= len(self.blocks) * block_tokens

    @property
    def n_shareable(self) -> int:
        """Number of known tokens whose KV and states other requests may find.

        Generated tokens that attend to some keys only have KV and states of their own.
        """
        return self.n_prompt if self.narrows else len(self.token_ids)

    def extend_digests(self) -> None:
        """Hash the full blocks of shareable tokens that have no digest yet."""
        done, end = len(self.digests), self.n_shareable
        if end // HASH_BLOCK_TOKENS > done:
            parent = self.digests[-1] if done else self.chain_root
            first = done * HASH_BLOCK_TOKENS
            self.digests += extend_chain(parent, self.token_ids[first:end], self.images, first)

    def block_digests(self, block_tokens: int, first: int, end: int) -> list[bytes]:
        """Digests of the device blocks [first, end); a block's digest is that of its last hash block."""
        per_block = block_tokens // HASH_BLOCK_TOKENS
        return self.digests[(first + 1) * per_block - 1 : end * per_block : per_block]

    def block_hashes(self, block_tokens: int, index: int) -> tuple[int, ...]:
        """Wire hashes of the hash blocks inside device block `index`."""
        per_block = block_tokens // HASH_BLOCK_TOKENS
        return tuple(wire_hash(digest) for digest in self.digests[index * per_block : (index + 1) * per_block])
