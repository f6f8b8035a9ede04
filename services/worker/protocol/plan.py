"""Plan of one step, which the scheduler sends to all ranks, and rank 0's result.

The scheduler decides in the server process. Every rank keeps the same state per slot (known tokens, block table,
sampling parameters) and changes it only by these deltas. A decode chunk carries no known token, because the rank knows
the token it drew in the step before; so the server can plan step n + 1 while the ranks compute step n.

A decode chunk may carry proposals: guesses of the tokens that follow. The rank draws a token at every row, as it would
without the guesses, up to the first draw that differs from the guess. So a step yields one token or several.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """Gives `slot` to a request. Must precede the slot's first chunk, in the same plan or an earlier one."""

    slot: int
    sampling: Sampling  # the gateway's message; its `stop_token_ids` are all tokens that end the text, EOS included
    token_ids: tuple[int, ...]  # all known tokens: prompt, then tokens generated earlier (resume, preemption)
    n_prompt: int  # tokens from this position on count as generated
    embed: bool = False  # return the pooled hidden state instead of a token
    second_from: int = 0  # position of the second of two texts; 0: one text
    adapter: int = -1  # slot of the adapter of all its rows; -1: none
    restore: int = -1  # row of states that its own begins as; -1: it begins at its first token
    spans: tuple[tuple[int, int, int], ...] = ()  # each frame's first row, lines and columns


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of an image, whose rows follow each other in a sequence."""

    first: int  # position of its first row
    n_tokens: int
    pixels: bytes  # uint8 [height, width, 3]
    columns: int = 1  # rows side by side in the frame

    @property
    def end(self) -> int:
        """Position after its last row."""
        return self.first + self.n_tokens


class TowerWork(NamedTuple):
    """Layers of the tower that a step computes for a frame; they follow those of the plan before, or the pixels."""

    slot: int
    frame: Frame
    start: int  # first layer
    stop: int  # layer after the last one; with the tower's last layer, the frame's rows are complete

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.stop - self.start


class Chunk(NamedTuple):
    """One request's share of a step: positions [start, start + n_tokens). A NamedTuple, for speed, as `SlotResult`."""

    slot: int
    start: int
    n_tokens: int
    draws: bool  # the last row draws the token of the next position; with proposals all rows do, in order
    new_blocks: tuple[int, ...] = ()  # appended to the slot's block table before the step
    proposals: tuple[int, ...] = ()  # guesses of the tokens after `start`; all rows but the first compute them


class Save(NamedTuple):
    """A copy of a slot's state, for models whose layers keep one."""

    slot: int
    position: int  # inside of the slot's chunk or at its end: the state after the tokens before it
    row: int  # row of states that gets the copy


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Applied in field order, the tower before chunks, during which states are saved."""

    step: int
    released: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    saves: tuple[Save, ...] = ()
    tower: tuple[TowerWork, ...] = ()  # for the frames of this step and of later ones

    @property
    def n_tokens(self) -> int:
        """Rows of the step's forward pass."""
        return sum(chunk.n_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Parts of rank 0's time of a step, in microseconds."""

    wait: int = 0
    forward: int = 0
    communication: int = 0
    sample: int = 0

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return {field.name: getattr(self, field.name) / 1e6 for field in fields(self)}


class SlotResult(NamedTuple):
    """A step's result for a slot. A NamedTuple, for speed: there is one per running request and step."""

    slot: int
    token_ids: tuple[int, ...] = ()  # drawn, in order: the accepted proposals, then one more token or NO_TOKEN
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # rows of the chunk, if requested
    pooled: tuple[float, ...] = ()  # [hidden_size]
    failure: str = ""  # why its grammar failed after these tokens
    forced: tuple[int, ...] = ()  # tokens that its grammar forces next


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0's answer to a plan: a record for each slot that drew, failed, was pooled or scored."""

    step: int
    slots: tuple[SlotResult, ...] = ()
    times: StepTimes = StepTimes()
