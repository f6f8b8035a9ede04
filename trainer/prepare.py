"""From the machine's standard library to a tokenizer and a dataset, kept beside the checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trainer.chat import chat_documents
from trainer.corpus import CorpusText, Group, Split, library_root, read_library, split
from trainer.dataset import Dataset, encode_documents
from trainer.tokenizer import save_tokenizer, train_tokenizer

HELD_OUT_LIMIT = 300_000
# Tests are two thirds of the library's text; every third one is enough for the tokenizer.
TESTS_IN_TOKENIZER = 3


@dataclass(frozen=True)
class Prepared:
    """What a run starts from."""

    tokenizer: Tokenizer
    dataset: Dataset


def prepare(out: Path, training: Path, vocab_size: int, max_positions: int, seed: int) -> Prepared:
    """Reads the corpus and writes tokenizer, held-out text and tokens; a second call reads them back."""
    cache = training / "tokens.npz"
    if cache.exists():
        with np.load(cache) as arrays:
            groups = {name: arrays[name] for name in arrays.files}
        return Prepared(Tokenizer.from_file(str(out / "tokenizer.json")), Dataset(groups))
    training.mkdir(parents=True, exist_ok=True)
    sides = split(read_library(library_root()), seed)
    train = [*sides.train, *chat_documents(sides.train)]
    tokenizer = train_tokenizer(tokenizer_texts(train), vocab_size)
    save_tokenizer(tokenizer, out, max_positions)
    write_held_out(out / "heldout.jsonl", sides)
    dataset = encode_documents(train, tokenizer, seed)
    partial = training / "tokens.partial.npz"
    np.savez(partial, allow_pickle=False, **dataset.groups)
    partial.replace(cache)
    return Prepared(tokenizer, dataset)


def tokenizer_texts(train: list[CorpusText]) -> list[str]:
    """Texts the tokenizer learns from: the training side, with the tests thinned out."""
    tests = [document.text for document in train if document.group is Group.TESTS]
    return [d.text for d in train if d.group is not Group.TESTS] + tests[::TESTS_IN_TOKENIZER]


def write_held_out(path: Path, sides: Split) -> None:
    """Writes held-out documents, one JSON object a line, in turn from each group, up to 300 kB."""
    queues = {
        group: [document for document in sides.held_out if document.group is group]
        for group in (Group.LIBRARY, Group.DOCUMENTATION, Group.TESTS)
    }
    lines: list[str] = []
    size = 0
    while any(queues.values()):
        for queue in queues.values():
            if not queue:
                continue
            line = held_out_line(queue.pop(0))
            if size + len(line.encode()) <= HELD_OUT_LIMIT:
                lines.append(line)
                size += len(line.encode())
    path.write_text("".join(lines), encoding="utf-8")


def held_out_line(document: CorpusText, limit: int = 16_000) -> str:
    """One held-out document as a JSON line; a long file gives its first `limit` characters, to leave room."""
    record = {"path": document.path, "group": document.group.value, "text": document.text[:limit]}
    return json.dumps(record, ensure_ascii=False) + "\n"
