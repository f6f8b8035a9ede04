"""How much of a prompt each worker holds, as the coordinator answers: by the numbers of its roster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import kv_pb2, worker_pb2

from services.router.membership import Member
from services.router.pool import Pool
from services.router.snapshot import Floats

PLACES = (worker_pb2.KV_PLACE_DEVICE, worker_pb2.KV_PLACE_HOST, worker_pb2.KV_PLACE_DISK)  # rows of depths

Indices = NDArray[np.intp]


class Roster:
    """The places of workers by the coordinator's numbers, as one version of its roster has them."""

    def __init__(self, message: kv_pb2.Roster | None = None) -> None:
        """Without a message it names no place, and its version is 0."""
        message = message or kv_pb2.Roster()
        self.version = message.version
        self._places = [(each.worker_id, each.incarnation, each.place) for each in message.places]
        self.below_devices = any(place != worker_pb2.KV_PLACE_DEVICE for *_, place in self._places)
        self._located: WeakKeyDictionary[Pool, tuple[int, Indices]] = WeakKeyDictionary()
        self._devices = {
            (worker_id, incarnation): number
            for number, (worker_id, incarnation, place) in enumerate(self._places)
            if place == worker_pb2.KV_PLACE_DEVICE
        }

    def device_of(self, member: Member) -> int:
        """The number of the device of a worker's process; -1 if it has none."""
        return self._devices.get((member.worker_id, member.incarnation), -1)

    def locate(self, pool: Pool) -> Indices:
        """The cell of each number in a pool's flat depths, [places, n_workers + 1]. No worker has the last column."""
        known = self._located.get(pool)
        if known is None or known[0] != pool.version:
            width = len(pool.members) + 1
            cells = np.full(len(self._places), width - 1, dtype=np.intp)
            for number, (worker_id, incarnation, place) in enumerate(self._places):
                member = pool.members.get(worker_id)
                if member is not None and member.incarnation == incarnation and place in PLACES:
                    cells[number] = place * width + member.index
            known = self._located[pool] = pool.version, cells
        return known[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeldPrefixes:
    """The answer about one prompt."""

    roster: Roster
    held: Sequence[kv_pb2.HeldPrefix]

    @classmethod
    def by_worker(cls, depths: Iterable[kv_pb2.WorkerDepth]) -> HeldPrefixes:
        """The answer of an older coordinator, which names the workers each time."""
        held = [
            (kv_pb2.WorkerPlace(worker_id=depth.worker_id, incarnation=depth.incarnation, place=place), blocks)
            for depth in depths
            for place, blocks in zip(PLACES, (depth.blocks, depth.host_blocks, depth.disk_blocks), strict=True)
        ]
        size = (len(held) + 7) // 8
        return cls(
            Roster(kv_pb2.Roster(places=[place for place, _ in held])),
            [
                kv_pb2.HeldPrefix(blocks=blocks, places=(1 << number).to_bytes(size, "little"))
                for number, (_, blocks) in enumerate(held)
            ],
        )

    @staticmethod
    def deepest_at(answers: Sequence[HeldPrefixes], member: Member) -> int | None:
        """Leading blocks on a worker's device; None if another place may hold more, or may load some."""
        own = deepest = 0
        for answer in answers:
            if answer.roster.below_devices:
                return None
            number = answer.roster.device_of(member)
            for each in answer.held:
                deepest = max(deepest, each.blocks)
                if number >= 0 and number >> 3 < len(each.places) and each.places[number >> 3] >> (number & 7) & 1:
                    own = each.blocks
        return own if own == deepest else None

    @staticmethod
    def joined(answers: Sequence[HeldPrefixes], pool: Pool) -> Floats | None:
        """The depths by the answers of several coordinators; None without an answer."""
        if not answers:
            return None
        depths = answers[0].depths(pool)
        for answer in answers[1:]:  # while their number changes, two may follow a worker
            np.maximum(depths, answer.depths(pool), out=depths)
        return depths

    def depths(self, pool: Pool) -> Floats:
        """Leading blocks that each place of each worker holds, [places, n_workers].

        One assignment for all: a loop over a thousand workers takes longer than the rest of a decision.
        """
        depths = np.zeros((len(PLACES), len(pool.members) + 1))
        if self.held:
            cells = self.roster.locate(pool)
            masks = np.frombuffer(b"".join([each.places for each in self.held]), np.uint8).reshape(len(self.held), -1)
            which, numbers = np.unpackbits(masks, axis=1, count=len(cells), bitorder="little").nonzero()
            depths.ravel()[cells[numbers]] = np.array([float(each.blocks) for each in self.held])[which]
        return depths[:, :-1]
