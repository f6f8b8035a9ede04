"""What a decoder takes of memory: while it is loaded, and afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

from services.worker.backends.base import ModelBackend
from services.worker.backends.collectives import SingleRank
from services.worker.backends.cpu.backend import HostMemory, KernelBackend, OneDnnBackend
from services.worker.kernels.bfloat16 import open_kernels, why_not
from services.worker.model.build import load_model

TABLE = 131_072 * 256 * 2  # bytes of the embedding in bfloat16: nearly all of the model


def by_our_kernels() -> ModelBackend:
    if reason := why_not(torch.bfloat16):
        pytest.skip(reason)
    return KernelBackend(open_kernels())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with a large vocabulary whose embedding is the head."""
    folder = tmp_path_factory.mktemp("tied")
    config = transformers.LlamaConfig(
        vocab_size=131_072,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@contextmanager
def most_held() -> Iterator[list[int]]:
    """Put the most that this process holds meanwhile into the list, beyond what it held before."""
    memory, most, done = HostMemory(), [0], threading.Event()
    before = memory.held()

    def watch() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], memory.held() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


@pytest.mark.parametrize(
    ("backend", "tables"),
    [
        (by_our_kernels, 1),  # packed, and looked up in there
        (lambda: OneDnnBackend(torch.float32), 4),  # the table, and oneDNN's packed one; each number twice as long
    ],
    ids=["our kernels", "oneDNN"],
)
def test_a_model_is_loaded_without_a_second_copy(
    checkpoint: Path, backend: Callable[[], ModelBackend], tables: int
) -> None:
    opened = backend()
    with most_held() as most:
        model = load_model(checkpoint, SingleRank(), opened)
    assert model.vocab_local == 131_072
    assert tables * 0.95 * TABLE < most[0] < (tables + 0.5) * TABLE
