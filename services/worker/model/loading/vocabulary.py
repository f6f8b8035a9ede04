"""Reads the tokens of a checkpoint for grammars, as a trie of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from services.worker.model.files import read_json
from services.worker.model.loading.tokenizer import read_tokenizer
from services.worker.model.spec import ModelError


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the tokenizer of `folder`; takes up to a second. Raises ValueError if grammars cannot use it."""
    try:
        files = read_tokenizer(folder, read_json(folder / "tokenizer_config.json"), vocab_size)
    except ModelError as error:
        raise ValueError(str(error)) from error
    return LLTokenizer(files.json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
