"""Reads the tokens of a checkpoint for grammars, as a trie of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from services.compute.model.loading.folder import open_folder
from services.compute.model.spec import ModelError


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the tokenizer of a folder or file; takes up to a second. Raises ValueError if grammars cannot use it."""
    try:
        tokenizer = open_folder(path, vocab_size=vocab_size).tokenizer
    except ModelError as error:
        raise ValueError(str(error)) from error
    return LLTokenizer(tokenizer.json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
