"""Follows vLLM's prefix cache by its events, and names its blocks by our hashes.

An event holds the tokens of its blocks. So our chain is computed anew from the block before, and a coordinator compares
the prefixes of any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.blockhash import HASH_BLOCK_TOKENS, ImageSpan, adapted_root, chain_root, extend_chain, wire_hash
from services.worker.engine.kv_events import KvEventLog

BlockHash = int | bytes


@dataclass(slots=True)
class _Block:
    """A cached block of vLLM."""

    parent: BlockHash | None
    tail: bytes  # our digest of the prefix up to the block's end
    wire: list[int]  # our hashes of the block, parents first
    children: set[BlockHash] = field(default_factory=set)


class KvMirror:
    """The blocks that vLLM has cached, in our hashes, and their changes in a log."""

    def __init__(self, hash_root: str, log: KvEventLog, announce: Callable[[], None]) -> None:
        """Calls `announce` after every change of `log`."""
        self._hash_root, self._log, self._announce = hash_root, log, announce
        self._blocks: dict[BlockHash, _Block] = {}  # parents before children

    @property
    def n_blocks(self) -> int:
        """Number of cached blocks of vLLM."""
        return len(self._blocks)

    def hashes(self) -> list[int]:
        """Wire hashes of all blocks, parents before children."""
        return [value for block in self._blocks.values() for value in block.wire]

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        """Apply a batch of decoded events, and number the changes."""
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for block_hash in event["block_hashes"]:
                        self._remove(block_hash)
                case "AllBlocksCleared":
                    self.clear()
        if self._log.flush():
            self._announce()

    def clear(self) -> None:
        """Everything is lost."""
        if self._blocks:
            self._blocks.clear()
            self._log.cleared()
            self._announce()

    def _store(self, event: dict[str, Any]) -> None:
        size, parent_hash = event["block_size"], event["parent_block_hash"]
        # Groups of layers with windows keep parts of a prefix, which are no prefix. A block of a size that our hashes
        # do not divide has no digest at its end.
        if event.get("group_idx") or size % HASH_BLOCK_TOKENS:
            return
        for at, block_hash in enumerate(event["block_hashes"]):
            if block_hash not in self._blocks:
                before = self._before(parent_hash, event, at)
                if before is None:
                    return  # its prefix is unknown here
                tokens: Sequence[int] = event["token_ids"][at * size : (at + 1) * size]
                digests = extend_chain(before, tokens, _images(event, at, tokens))
                block = _Block(parent_hash, digests[-1], [wire_hash(digest) for digest in digests])
                self._blocks[block_hash] = block
                if parent_hash is not None:
                    self._blocks[parent_hash].children.add(block_hash)
                self._log.stored(block.wire)
            parent_hash = block_hash

    def _before(self, parent_hash: BlockHash | None, event: dict[str, Any], at: int) -> bytes | None:
        """The digest that a block extends; None if the block before it is not held."""
        if parent_hash is None:
            # vLLM knows an adapter by its digest.
            return chain_root(adapted_root(self._hash_root, event.get("lora_name") or ""), _salt(event, at))
        parent = self._blocks.get(parent_hash)
        return parent.tail if parent else None

    def _remove(self, block_hash: BlockHash) -> None:
        """Forget a block and all blocks after it: without it they are no prefix."""
        block = self._blocks.get(block_hash)
        if block is None:
            return
        for child in tuple(block.children):
            self._remove(child)
        del self._blocks[block_hash]
        if block.parent is not None and block.parent in self._blocks:
            self._blocks[block.parent].children.discard(block_hash)
        self._log.removed(block.wire)


def _salt(event: dict[str, Any], at: int) -> str:
    """The salt of a first block: its only extra key that is a text, besides the name of its adapter."""
    texts = [key for key in _extra_keys(event, at) if isinstance(key, str)]
    return next(iter(texts[1:] if event.get("lora_name") else texts), "")


def _images(event: dict[str, Any], at: int, tokens: Sequence[int]) -> list[ImageSpan]:
    """The images of a block: their keys are a name that ends with the digest, and the place of their first token."""
    spans = []
    for name, offset in (key for key in _extra_keys(event, at) if not isinstance(key, str)):
        first = max(offset, 0)
        end = next((here for here in range(first, len(tokens)) if tokens[here] != tokens[first]), len(tokens))
        spans.append(ImageSpan(first, end, bytes.fromhex(name.rpartition(":")[2])))
    return spans


def _extra_keys(event: dict[str, Any], at: int) -> Sequence[Any]:
    """The contents of a block's hash besides its tokens."""
    keys = (event.get("extra_keys") or ())[at : at + 1]
    return (keys[0] if keys else None) or ()
