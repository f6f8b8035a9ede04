"""The speeds that a pool's members have reported."""

from __future__ import annotations

import math

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.snapshot import Floats, Speeds
from services.router.speeds import ReportedSpeeds, StepGrowth, speeds_of

# A rate follows the prompts that a worker has just had; what kind of worker it is shows over this time.
TOKEN_HALF_LIFE_S = 10.0
# For this long after its first request what a worker tells of itself is mostly what it had found in a probe.
PROBED_S = 0.5
# For this long speeds that were derived from the workers' words serve all decisions: they change slowly.
SPEEDS_FRESH_S = 0.1

# Rows of the table: the first four by every state, in this order; the time of a step, its batch (0: before any
# request) and when it was measured; seconds for a token of a prompt, averaged; its first request (0: not yet).
_RATE, _MAX_TOKENS, _KV_BYTES, _PULL_RATE, _STEP_MS, _STEP_BATCH, _STEP_AT, _TOKEN_S, _BUSY_AT = range(9)
_MEASURED = [_STEP_MS, _STEP_BATCH, _RATE, _BUSY_AT]


class SpeedBook:
    """The speeds of a pool's members. Times come from the pool's clock, in seconds."""

    def __init__(self) -> None:
        self._table: Floats = np.zeros((9, 0))  # [rows, n_workers]
        self._growth = StepGrowth()
        self._known: Speeds | None = None
        self._known_at = 0.0

    def join(self) -> None:
        """A worker comes, as the last one."""
        self._table = np.concatenate([self._table, np.zeros((9, 1))], axis=1)
        self._known = None

    def leave(self, index: int) -> None:
        """The worker that was at `index` goes."""
        self._table = np.delete(self._table, index, axis=1)
        self._known = None

    def restarted(self, member: Member) -> None:
        """A new process is measured anew."""
        self._table[_MEASURED, member.index] = 0.0

    def on_state(self, member: Member, state: worker_pb2.WorkerState, last_seen: float, now: float) -> None:
        """Take what it has measured of itself; its message before came at `last_seen`."""
        column, running = self._table[:, member.index], state.running
        if not column[_RATE]:  # its first word: until now it was taken to be like the others
            self._known = None
        if rate := state.prefill_tokens_per_s:
            # What was measured before the first request, and by the first few, is soon outweighed.
            half_life_s = min(now - column[_BUSY_AT], TOKEN_HALF_LIFE_S) if column[_BUSY_AT] else 0.0
            old = math.exp2((last_seen - now) / half_life_s) if half_life_s else 0.0
            column[_TOKEN_S] = old * column[_TOKEN_S] + (1.0 - old) / rate
        if running and not column[_BUSY_AT]:
            column[_BUSY_AT] = now
        column[: _PULL_RATE + 1] = (rate, state.max_request_tokens, state.kv_bytes_per_token, state.pull_bytes_per_s)
        if (step_ms := state.decode_step_ms) > 0 and (running or not column[_STEP_BATCH]):
            # An idle worker keeps the pair of its last busy moment: alone, the time of a step says nothing.
            column[_STEP_MS], column[_STEP_BATCH], column[_STEP_AT] = step_ms, running, now
            if running:
                self._growth.learn(running, step_ms)

    def speeds(self, now: float) -> Speeds:
        """They are half of the work of a decision, which is why they are kept for a moment."""
        if self._known is None or now - self._known_at >= SPEEDS_FRESH_S:
            table, self._known_at = self._table, now
            reported = ReportedSpeeds(
                prefill_rate=table[_RATE],
                token_s=table[_TOKEN_S],
                step_ms=table[_STEP_MS],
                step_batch=table[_STEP_BATCH],
                step_age_s=now - table[_STEP_AT],
                probed=(table[_BUSY_AT] == 0) | (table[_BUSY_AT] > now - PROBED_S),
                max_request_tokens=table[_MAX_TOKENS],
                kv_bytes_per_token=table[_KV_BYTES],
                pull_bytes_per_s=table[_PULL_RATE],
                batch_doubles=self._growth.batch_doubles,
            )
            self._known = speeds_of(reported)
        return self._known
