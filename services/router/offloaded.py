"""Prefix tokens that a worker would load from its host memory or disk. Pure functions over what workers report.

A worker loads tokens in `tokens * bytes per token / bytes per second`, by its own measurements, and does not begin a
load that takes longer than computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ryzanstein.v1 import kv_pb2, worker_pb2

from services.common.blockhash import HASH_BLOCK_TOKENS
from services.router.membership import Member
from services.router.snapshot import Floats, OffloadedPrefix


def offloaded_prefix(
    members: Mapping[str, Member], depths: Sequence[kv_pb2.WorkerDepth], token_ms: Floats
) -> OffloadedPrefix | None:
    """What each worker would load after the blocks of its device; None if none does."""
    tokens, load_ms = np.zeros(len(members)), np.zeros(len(members))
    for depth in depths:
        member = members.get(depth.worker_id)
        if member is None or member.incarnation != depth.incarnation or not (depth.host_blocks or depth.disk_blocks):
            continue
        at = depth.blocks
        for place in member.state.kv_places:  # fastest first, as the worker loads
            n_tokens = (_blocks(depth, place.place) - at) * HASH_BLOCK_TOKENS
            if n_tokens <= 0 or not place.load_bytes_per_s:
                continue
            ms = 1e3 * n_tokens * member.state.kv_bytes_per_token / place.load_bytes_per_s
            if ms < n_tokens * token_ms[member.index]:
                at = _blocks(depth, place.place)
                tokens[member.index] += n_tokens
                load_ms[member.index] += ms
    return OffloadedPrefix(tokens, load_ms) if np.count_nonzero(tokens) else None


def _blocks(depth: kv_pb2.WorkerDepth, place: int) -> int:
    if place == worker_pb2.KV_PLACE_HOST:
        return int(depth.host_blocks)
    return int(depth.disk_blocks) if place == worker_pb2.KV_PLACE_DISK else 0
