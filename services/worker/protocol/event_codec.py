"""Rare messages from a rank to the server: the rank has its weights, is ready, or has failed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import numpy as np

from services.compute.ranks.memory import MemoryAccount
from services.worker.protocol.words import Kind, MalformedMessageError, Words


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the loaded model that the server needs."""

    vocab_size: int
    hidden_size: int  # numbers of an embedding, or of a classifier
    weight_formats: dict[str, str] = field(default_factory=dict)  # in memory, by the weights' name in every layer


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank is warm and waits for plans."""

    rank: int
    pid: int
    phases: dict[str, float]  # seconds, in the order they happened
    memory: MemoryAccount
    n_blocks: int  # usable KV blocks, the same on every rank; ids 1 to n_blocks
    model: ModelFacts
    kv_block_bytes: int = 0  # this rank's part of a block, over all layers
    state_bytes: int = 0  # the same of a sequence's state; 0: the model has none
    snapshot_s: float = 0.0  # seconds that a copy of a state takes


@dataclass(frozen=True, slots=True)
class RankError:
    """A rank has failed; it exits after this message."""

    rank: int
    pid: int
    error: str  # one line
    traceback: str
    suspects: tuple[int, ...] = ()  # ranks that did not arrive at a collective in time


def encode_event(event: RankStarted | RankError) -> bytes:
    """Return the event as bytes: the kind, then JSON padded with blanks to whole words."""
    kind = Kind.STARTED if isinstance(event, RankStarted) else Kind.ERROR
    text = json.dumps(asdict(event)).encode()
    return int(kind).to_bytes(4, "little") + text + b" " * (-len(text) % 4)


def decode_event(words: Words) -> RankStarted | RankError:
    """Inverse of `encode_event`. Raises MalformedMessageError."""
    if words[0] not in (Kind.STARTED, Kind.ERROR):
        raise MalformedMessageError("not an event")
    fields = json.loads(np.ascontiguousarray(words[1:]).tobytes())
    if words[0] == Kind.ERROR:
        fields["suspects"] = tuple(fields["suspects"])
        return RankError(**fields)
    fields["memory"] = MemoryAccount(**fields["memory"])
    fields["model"] = ModelFacts(**fields["model"])
    return RankStarted(**fields)


def encode_warming() -> bytes:
    """Return the message of a rank that has its weights, and computes first steps."""
    return int(Kind.WARMING).to_bytes(4, "little")


def encode_stop() -> bytes:
    """Return the message that stops the ranks."""
    return int(Kind.STOP).to_bytes(4, "little")
