"""Token ids for the calibration, from a text, a file of JSON lines, or Python's own documentation."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.compute.model.files import decode_json
from services.compute.model.spec import ModelError


def read_texts(file: Path | None) -> list[str]:
    """Return the texts of `file`: one, or those of the lines of a .jsonl; None: the topics of Python's help.

    Raises ModelError naming the file and the line.
    """
    if file is None:
        try:
            topics: dict[str, str] = import_module("pydoc_data.topics").topics
        except ModuleNotFoundError as error:
            raise ModelError("--calibration: this Python has no pydoc_data, whose text is the default") from error
        return list(topics.values())
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--calibration {file}: {error}") from error
    return _lines(file, text) if file.suffix == ".jsonl" else [text]


def _lines(file: Path, text: str) -> list[str]:
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = decode_json(line)
        except ValueError as error:
            raise ModelError(f"--calibration {file}: line {number}: not JSON: {error}") from error
        content = value.get("text") if isinstance(value, dict) else None
        if not isinstance(content, str):
            raise ModelError(f'--calibration {file}: line {number}: expected an object with the string "text"')
        texts.append(content)
    return texts


def digest(texts: list[str]) -> str:
    """Return a hash of the texts."""
    return sha256("\0".join(texts).encode()).hexdigest()


def sequences(texts: list[str], tokenizer: Tokenizer, start: int | None, samples: int, length: int) -> Tensor:
    """Return `samples` pieces of the texts, evenly spaced, or as many as there are: [n, length] int64.

    The texts are joined; each begins with the token `start` if there is one. Raises ModelError if there is no piece.
    """
    before = [] if start is None else [start]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [token for text in encoded for token in (*before, *text.ids)]
    n_pieces = len(ids) // length
    if not n_pieces:
        raise ModelError(f"--calibration: {len(ids)} tokens; at least --length {length} are needed")
    pieces = torch.tensor(ids[: n_pieces * length]).view(n_pieces, length)
    chosen = torch.linspace(0, n_pieces - 1, min(samples, n_pieces)).round().long()
    return pieces[chosen]
