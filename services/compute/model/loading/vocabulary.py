"""Reads the tokens of a checkpoint for grammars, as a trie of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from services.compute.model.files import read_json
from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.parts import read_gguf
from services.compute.model.loading.tokenizer import read_tokenizer, tokenizer_of
from services.compute.model.spec import ModelError


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the tokenizer of a folder or file; takes up to a second. Raises ValueError if grammars cannot use it."""
    try:
        if path.is_file():
            files = tokenizer_of(hub_files(read_gguf(path).metadata))
        else:
            files = read_tokenizer(path, read_json(path / "tokenizer_config.json"), vocab_size)
    except ModelError as error:
        raise ValueError(str(error)) from error
    return LLTokenizer(files.json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
