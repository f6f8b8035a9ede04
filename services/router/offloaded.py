"""Prefix tokens that a worker would load from its host memory or disk. Pure functions over what workers report.

A worker loads tokens in `tokens * bytes per token / bytes per second`, by its own measurements, and does not begin a
load that takes longer than computing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.common.blockhash import HASH_BLOCK_TOKENS
from services.router.held import PLACES
from services.router.membership import Member
from services.router.snapshot import Floats, OffloadedPrefix


def offloaded_prefix(members: Mapping[str, Member], depths: Floats, token_ms: Floats) -> OffloadedPrefix | None:
    """The prefix that each worker would load from its tiers; None if none does. `depths`: [places, n_workers]."""
    below = np.flatnonzero(depths[worker_pb2.KV_PLACE_HOST :].sum(axis=0))
    if not len(below):
        return None
    tokens, load_ms = np.zeros(len(members)), np.zeros(len(members))
    by_index = tuple(members.values())
    for member in (by_index[index] for index in below.tolist()):
        held = depths[:, member.index].tolist()
        at = held[worker_pb2.KV_PLACE_DEVICE]
        for place in member.state.kv_places:  # fastest first, as the worker loads
            n_tokens = (held[place.place] - at) * HASH_BLOCK_TOKENS if place.place in PLACES else 0.0
            if n_tokens <= 0 or not place.load_bytes_per_s:
                continue
            ms = 1e3 * n_tokens * member.state.kv_bytes_per_token / place.load_bytes_per_s
            if ms < n_tokens * token_ms[member.index]:
                at = held[place.place]
                tokens[member.index] += n_tokens
                load_ms[member.index] += ms
    return OffloadedPrefix(tokens, load_ms) if np.count_nonzero(tokens) else None
