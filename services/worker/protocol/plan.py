"""What the scheduler tells the ranks in one step, and what rank 0 answers.

The scheduler decides once, in the server process; every rank keeps the same per-slot state (known tokens,
block table, sampling parameters) and changes it only by these deltas. A decode chunk therefore carries no
token: the rank already knows the one it sampled in the step before, which lets the server plan step n + 1
while step n is still being computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one request is chosen. Values are validated at the gRPC edge."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 64 bits; noise is a function of (seed, position, token)
    min_tokens: int = 0  # the ids in `end_token_ids` cannot be drawn before this many generated tokens
    end_token_ids: tuple[int, ...] = ()  # EOS (unless ignored) and stop token ids
    logprobs: int | None = None  # None: none; n: the drawn token's and the n most likely ones'
    prompt_logprobs: int | None = None
    grammar: str = ""  # that the generated text follows; it ends only where the grammar can
    ignore_eos: bool = False  # with a grammar: end only where nothing else can follow


@dataclass(frozen=True, slots=True)
class Admission:
    """Gives `slot` to a request. Must precede the slot's first chunk, in the same plan or an earlier one."""

    slot: int
    sampling: SamplingParams
    token_ids: tuple[int, ...]  # all known tokens: prompt, then what was generated before (resume, preemption)
    n_prompt: int  # tokens from this position on count as generated
    pool: bool = False  # return the pooled hidden state instead of a token


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's share of a step: positions [start, start + n_tokens)."""

    slot: int
    start: int
    n_tokens: int
    sample: bool  # draw the token of position start + n_tokens
    new_blocks: tuple[int, ...] = ()  # appended to the slot's block table before the step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Applied in field order: released, admissions, chunks."""

    step: int
    released: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Rows of the step's forward pass."""
        return sum(chunk.n_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural log, of the distribution before sampling filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where rank 0 spent a step, in microseconds."""

    wait: int = 0
    forward: int = 0
    communication: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0's answer to a plan. `slots[i]` drew `token_ids[i]`."""

    step: int
    slots: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by slot, where asked for
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # of this chunk's rows
    pooled: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by slot, [hidden_size]
    failures: dict[int, str] = field(default_factory=dict)  # by slot: why its grammar cannot be followed; no token
    times: StepTimes = StepTimes()
