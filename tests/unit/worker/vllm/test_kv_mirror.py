"""vLLM's events, replayed, give the prefixes that our hashes name."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.blockhash import ImageSpan, adapted_root, wire_chain
from services.worker.engine.kv_events import KvEventLog
from services.worker.vllm.kv_mirror import KvMirror

TOKENS = list(range(100, 196))


def stored(hashes: list[int], parent: int | None, tokens: list[int], size: int = 32, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**event, "block_size": size, "lora_id": None, **more}


def mirror() -> tuple[KvMirror, KvEventLog]:
    log = KvEventLog()
    return KvMirror("root", log, lambda: None), log


def replayed(log: KvEventLog) -> set[int]:
    held: set[int] = set()
    for event in log.since(0) or ():
        held = (set() if event.cleared else held | set(event.stored)) - set(event.removed)
    return held


@pytest.mark.parametrize("adapter", ["", "d1"])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_blocks_of_any_size_have_the_hashes_of_their_prefix(salt: str, adapter: str) -> None:
    cache, log = mirror()
    keys = [tuple(filter(None, (adapter, salt))), (adapter,) if adapter else None]
    more = {"extra_keys": keys if salt or adapter else None, "lora_name": adapter or None}
    cache.apply([stored([1, 2], None, TOKENS[:64], **more)])
    cache.apply([stored([3], 2, TOKENS[64:], lora_name=adapter or None), stored([1], None, TOKENS[:32], **more)])
    assert cache.hashes() == wire_chain(adapted_root("root", adapter), salt, TOKENS)
    assert (replayed(log), cache.n_blocks) == (set(cache.hashes()), 3)


@pytest.mark.parametrize("prefix", ["", "d1:path:"])  # vLLM names an adapter that changes the vision tower
def test_blocks_with_images_have_the_hashes_of_their_prefix(prefix: str) -> None:
    first, second = bytes(range(32)), bytes(range(32, 64))
    tokens = [7, 7, *[9] * 40, 7, 7, *[9] * 20, *TOKENS[:32]]
    keys = [[(prefix + first.hex(), 2), "tenant"], [(prefix + first.hex(), -30), (prefix + second.hex(), 12)], None]
    cache, _ = mirror()
    cache.apply([stored([1, 2, 3], None, tokens, extra_keys=keys)])
    assert cache.hashes() == wire_chain("root", "tenant", tokens, [ImageSpan(2, 42, first), ImageSpan(44, 64, second)])


def test_blocks_after_a_missing_block_are_no_prefix() -> None:
    cache, log = mirror()
    cache.apply([stored([1, 2, 3], None, TOKENS), stored([9], 1, TOKENS[:32])])
    cache.apply([{"type": "BlockRemoved", "block_hashes": [2]}])
    branch = wire_chain("root", "", [*TOKENS[:32], *TOKENS[:32]])
    assert (cache.hashes(), replayed(log)) == (branch, set(branch))
    cache.apply([{"type": "AllBlocksCleared"}])
    assert (cache.hashes(), replayed(log)) == ([], set())


def test_blocks_that_are_no_prefix_of_this_model_are_skipped() -> None:
    cache, _ = mirror()
    cache.apply(
        [
            stored([1], 77, TOKENS[:32]),  # its parent is unknown
            stored([3], None, TOKENS[:32], group_idx=1),
            stored([4], None, TOKENS[:8], size=8),
        ]
    )
    assert cache.hashes() == []
