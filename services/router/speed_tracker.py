"""The speeds that a pool's members report."""

from __future__ import annotations

import math

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.snapshot import Floats, Speeds
from services.router.speeds import ReportedSpeeds, StepGrowth, speeds_of

# Half-life of the averaged time per token. The reported rate varies with the last prompts; the average shows how fast
# the worker itself is.
TOKEN_HALF_LIFE_S = 10.0
# For this long after a worker's first request, its reported speeds stem mostly from the start-up probe.
PROBED_S = 0.5
# How long derived speeds serve all decisions: they change slowly.
SPEEDS_FRESH_S = 0.1

# Rows of the table: four values of the last state, in its order; the time of a step, its batch (0: no request yet)
# and when it was measured; averaged seconds per prompt token; the time of the first request (0: none yet).
_RATE, _MAX_TOKENS, _KV_BYTES, _PULL_RATE, _STEP_MS, _STEP_BATCH, _STEP_AT, _TOKEN_S, _BUSY_AT = range(9)
_MEASURED = [_STEP_MS, _STEP_BATCH, _RATE, _BUSY_AT]


class SpeedTracker:
    """The speeds of a pool's members. Times are seconds of the pool's clock."""

    def __init__(self) -> None:
        self._table: Floats = np.zeros((9, 0))  # [rows, n_workers]
        self._growth = StepGrowth()
        self._known: Speeds | None = None
        self._known_at = 0.0

    def join(self) -> None:
        """A worker joins, in the last column."""
        self._table = np.concatenate([self._table, np.zeros((9, 1))], axis=1)
        self._known = None

    def leave(self, index: int) -> None:
        """The worker in column `index` leaves."""
        self._table = np.delete(self._table, index, axis=1)
        self._known = None

    def restarted(self, member: Member) -> None:
        """Forget the speeds of the worker's last process."""
        self._table[_MEASURED, member.index] = 0.0

    def on_state(self, member: Member, state: worker_pb2.WorkerState, last_seen: float, now: float) -> None:
        """Apply the speeds of a reported state; the state before it arrived at `last_seen`."""
        column, running = self._table[:, member.index], state.running
        if not column[_RATE]:  # its first report: until now it had the others' mean
            self._known = None
        if rate := state.prefill_tokens_per_s:
            # A short half-life at first: later measurements soon outweigh the probe and the first few requests.
            half_life_s = min(now - column[_BUSY_AT], TOKEN_HALF_LIFE_S) if column[_BUSY_AT] else 0.0
            old = math.exp2((last_seen - now) / half_life_s) if half_life_s else 0.0
            column[_TOKEN_S] = old * column[_TOKEN_S] + (1.0 - old) / rate
        if running and not column[_BUSY_AT]:
            column[_BUSY_AT] = now
        column[: _PULL_RATE + 1] = (rate, state.max_request_tokens, state.kv_bytes_per_token, state.pull_bytes_per_s)
        if (step_ms := state.decode_step_ms) > 0 and (running or not column[_STEP_BATCH]):
            # An idle worker keeps step time and batch of its last busy moment: one means nothing without the other.
            column[_STEP_MS], column[_STEP_BATCH], column[_STEP_AT] = step_ms, running, now
            if running:
                self._growth.learn(running, step_ms)

    def speeds(self, now: float) -> Speeds:
        """The derived speeds, cached for SPEEDS_FRESH_S: deriving them is half of the work of a decision."""
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
