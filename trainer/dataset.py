"""Tokens on disk and batches by step number: the batch of a step depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from trainer.corpus import CorpusText
from trainer.tokenizer import END_OF_TEXT, token_id

Tokens: TypeAlias = NDArray[np.uint16]


@dataclass(frozen=True)
class Dataset:
    """Training tokens by group: each an [n] array of documents joined by the end-of-text token."""

    groups: dict[str, Tokens]

    def batch(self, seed: int, step: int, shares: dict[str, float], rows: int, length: int) -> Tensor:
        """Windows [rows, length + 1] of int64 tokens for one step, drawn from the groups by `shares`."""
        rng = np.random.default_rng((seed, step))
        names = sorted(name for name in shares if len(self.groups.get(name, ())) > length + 1)
        weights = np.array([shares[name] for name in names])
        chosen = rng.choice(len(names), size=rows, p=weights / weights.sum())
        windows = [self._window(names[index], rng, length + 1) for index in chosen]
        return torch.from_numpy(np.stack(windows).astype(np.int64))

    def _window(self, name: str, rng: np.random.Generator, size: int) -> Tokens:
        tokens = self.groups[name]
        start = int(rng.integers(0, len(tokens) - size + 1))
        return tokens[start : start + size]


def encode_documents(documents: Iterable[CorpusText], tokenizer: Tokenizer, seed: int) -> Dataset:
    """Encodes documents, shuffled by seed within their group, each preceded by the end-of-text token."""
    grouped: dict[str, list[str]] = {}
    for document in documents:
        grouped.setdefault(document.group.value, []).append(document.text)
    separator = token_id(tokenizer, END_OF_TEXT)
    return Dataset({name: _encode(texts, tokenizer, separator, seed) for name, texts in sorted(grouped.items())})


def _encode(texts: list[str], tokenizer: Tokenizer, separator: int, seed: int) -> Tokens:
    order = np.random.default_rng(seed).permutation(len(texts))
    encoded = tokenizer.encode_batch_fast([texts[index] for index in order])
    parts = [np.array([separator, *encoding.ids], dtype=np.uint16) for encoding in encoded]
    return np.concatenate([*parts, np.array([separator], dtype=np.uint16)])
