"""A model's card apart from its workers: it outlives them, so that gateways know the model while it has none."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from google.protobuf.message import DecodeError
from ryzanstein.v1 import worker_pb2

_OF_A_WORKER = ("worker_id", "incarnation")
_OF_A_START = ("created", "startup", "memory_bytes")  # measured anew by every worker: they make no other card


@dataclass(frozen=True, slots=True)
class StoredCard:
    """A card as all workers of a model have it, without the worker that gave it."""

    card: worker_pb2.ModelCard
    digest: str

    @staticmethod
    def of(card: worker_pb2.ModelCard) -> StoredCard:
        """The card that a worker gave."""
        plain = _without(card, _OF_A_WORKER)
        digested = _without(plain, _OF_A_START)
        return StoredCard(plain, sha256(digested.SerializeToString(deterministic=True)).hexdigest())

    def pack(self) -> bytes:
        """The value in Redis."""
        return zlib.compress(self.card.SerializeToString(deterministic=True), 1)

    @staticmethod
    def unpack(packed: bytes) -> StoredCard:
        """Read a value in Redis; raises ValueError when it is no card."""
        try:
            return StoredCard.of(worker_pb2.ModelCard.FromString(zlib.decompress(packed)))
        except (zlib.error, DecodeError) as error:
            raise ValueError(str(error)) from error


def _without(card: worker_pb2.ModelCard, fields: Iterable[str]) -> worker_pb2.ModelCard:
    copy = worker_pb2.ModelCard()
    copy.CopyFrom(card)
    for name in fields:
        copy.ClearField(name)
    return copy


class Cards(Protocol):
    """The store of all gateways' cards."""

    async def digests(self) -> dict[str, str] | None:
        """The digest of each model's card; None while the store is away."""

    async def read(self, model: str) -> StoredCard | None:
        """A model's card; None if there is none, or while the store is away."""

    async def write(self, stored: StoredCard) -> bool:
        """Store a model's card; returns False while the store is away."""
