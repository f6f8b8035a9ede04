"""Settings of a rank process, and the layout of the shared memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from services.common.grammar import MAX_GRAMMAR_BYTES
from services.compute.ranks.config import COLLECTIVE_HEADER_BYTES, RankGroupConfig
from services.compute.ranks.line import control_bytes
from services.worker.ipc.life_lock import LOCK_BYTES
from services.worker.ipc.ring import ring_bytes

SETTINGS_VARIABLE = "RYZANSTEIN_RANK_SETTINGS"

_MIB = 1 << 20
_FRAME_HEADER_BYTES = 28  # header and padding of a frame in a plan
STAGING_BYTES = 16 * _MIB  # per rank; a copy of this size delays the next step by a few milliseconds


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """The server as its ranks find it: the process id and two of its descriptors."""

    server_pid: int
    segment_fd: int
    doorbell_fd: int
    launched_at: float  # time.time() when the launcher was started, for the start-up table


@dataclass(frozen=True, slots=True)
class RankSettings:
    """All settings of a rank process; the environment carries them as JSON."""

    config: RankGroupConfig
    endpoint: ServerEndpoint

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        fields["config"]["eos_token_ids"] = tuple(fields["config"]["eos_token_ids"])
        return cls(RankGroupConfig(**fields["config"]), ServerEndpoint(**fields["endpoint"]))


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Offsets in the group's segment, which server and ranks each derive from the config."""

    control: int
    life_locks: tuple[int, ...]
    plans: int
    plan_capacity: int
    results: tuple[int, ...]
    result_capacity: int
    collectives: int
    collective_bytes: int  # per rank and parity
    staging: tuple[int, ...]  # one area per rank, for copies of KV blocks between rank and server
    staging_bytes: int
    size: int

    @classmethod
    def of(cls, config: RankGroupConfig) -> GroupLayout:
        """Lay out the segment. Untouched pages use no memory, so capacities are large."""
        # A plan may admit every slot at full length; `GroupLink.send` refuses plans of more than half the capacity.
        plan_capacity = min(max(4 * _MIB, 10 * config.max_running * config.max_model_len), 128 * _MIB)
        plan_capacity += config.max_running * MAX_GRAMMAR_BYTES
        plan_capacity += 2 * config.frames_per_step * (config.frame_bytes + _FRAME_HEADER_BYTES)
        result_capacity = 8 * _MIB
        collective = 256 << 10
        locks = control_bytes(config.ranks)
        plans = locks + config.ranks * LOCK_BYTES
        at = plans + ring_bytes(plan_capacity, config.ranks)
        results = []
        for _ in range(config.ranks):
            results.append(at)
            at += ring_bytes(result_capacity, 1)
        at = -(-at // 4096) * 4096
        staging = -(-(at + config.ranks * (COLLECTIVE_HEADER_BYTES + 2 * collective)) // 4096) * 4096
        return cls(
            control=0,
            life_locks=tuple(locks + rank * LOCK_BYTES for rank in range(config.ranks)),
            plans=plans,
            plan_capacity=plan_capacity,
            results=tuple(results),
            result_capacity=result_capacity,
            collectives=at,
            collective_bytes=collective,
            staging=tuple(staging + rank * STAGING_BYTES for rank in range(config.ranks)),
            staging_bytes=STAGING_BYTES,
            size=staging + config.ranks * STAGING_BYTES,
        )
