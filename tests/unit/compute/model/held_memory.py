"""How much memory a process takes for something, in a process of its own.

An earlier test's garbage, which is collected or used again meanwhile, would be counted otherwise. The process imports
this module and none of the tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cpu.backend import HostMemory, KernelBackend, OneDnnBackend
from services.compute.kernels.bfloat16 import open_kernels
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.compute.ranks.config import RankGroupConfig
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.rank.loading import load


def in_a_process(measured: Callable[..., int], *args: object) -> int:
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(measured, *args).result()


def by_our_kernels() -> ModelBackend:
    return KernelBackend(open_kernels())


def by_one_dnn() -> ModelBackend:
    return OneDnnBackend(torch.float32)


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
        most[0] = max(most[0], memory.held() - before)  # the watcher may not have run since what came last


def most_of_a_load(checkpoint: Path, backend: Callable[[], ModelBackend]) -> int:
    opened = backend()
    with most_held() as most:
        model = load_model(describe(checkpoint), SingleRank(), opened)
    assert model.vocab_local == 131_072
    return most[0]


def most_of_adapters(config: RankGroupConfig, adapter: Path) -> int:
    model = load(config, SingleRank(), by_our_kernels())
    HostMemory().release()
    with most_held() as most:
        for slot in range(5):
            forgotten = ("1",) if slot == 4 else ()
            model.load_adapter(AdapterOrder(slot % 4, str(adapter), str(slot), keep=slot > 0, forget=forgotten))
    return most[0]
