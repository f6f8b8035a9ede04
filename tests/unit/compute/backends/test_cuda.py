"""Parts of CUDA's backend that a CPU can run: memory is counted, numbers are copied, tokens are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.cuda.memory import CudaMemory
from services.compute.backends.cuda.nccl import NcclCommunicator
from services.compute.backends.cuda.transfers import PinnedTransfers
from services.compute.backends.torch.ops import TorchOps
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.protocol.order_codec import CopyOrder
from services.worker.rank.block_copy import BlockCopier
from tests.unit.compute.backends.tape import on_gpu
from tests.unit.compute.sampling.drawing import draw

pytestmark = on_gpu
CUDA = torch.device("cuda")


def test_memory_equals_torch_allocations_and_free_device_memory() -> None:
    memory, size = CudaMemory(CUDA), 256 << 20
    torch.cuda.empty_cache()
    held, available = memory.held(), memory.available(1)
    block = torch.empty(size, dtype=torch.uint8, device=CUDA)
    assert memory.held() - held == size
    assert available - memory.available(1) >= size
    del block
    reserved = memory.report().reserved
    assert memory.report().peak == reserved, "counted from the report before"
    memory.release()
    after = memory.report()
    assert reserved - after.reserved >= size
    assert after.reserved <= after.total - after.free


def test_tokens_equal_those_drawn_on_a_cpu() -> None:
    logits = torch.randn(10, 512, generator=torch.Generator().manual_seed(4)) * 3
    params = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, seed=2, top_k=5),
        Sampling(temperature=1.3, seed=3, top_p=0.8),
        Sampling(temperature=1.0, seed=4, min_p=0.1),
        Sampling(temperature=0.9, seed=5, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(temperature=0.9, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
        Sampling(repetition_penalty=1.8),
        Sampling(logit_bias={7: 100.0}),
        Sampling(logprobs=5),
    ]
    known = [[3, 7, 7, 200, 7]] * len(params)
    here = draw(logits, params, known=known, n_prompt=2)
    there = draw(logits.to(CUDA), params, known=known, n_prompt=2, ops=TorchOps(torch.float32, CUDA))
    assert np.array_equal(here.token_ids, there.token_ids)
    assert here.logprobs.keys() == there.logprobs.keys() == {9}
    ours, theirs = here.logprobs[9], there.logprobs[9]
    assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
    assert theirs.top_logprobs == pytest.approx(ours.top_logprobs, abs=1e-5)


def test_uploads_are_whole_and_aligned_and_numbers_come_back() -> None:
    transfers = PinnedTransfers(CUDA)
    for round_ in range(6):  # more than there are buffers, and larger ones
        arrays = [np.arange(size, dtype=np.int64) * (round_ + 1) for size in (3, 8 << round_, 1)]
        tables = np.arange(15, dtype=np.int64).reshape(5, 3)
        warmth = np.linspace(0, 1, 3 + round_, dtype=np.float32)
        heat, *actual, table = transfers.up([warmth, *arrays, tables])
        assert np.array_equal(heat.cpu(), warmth)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (*actual, table))
        assert all(np.array_equal(tensor.cpu(), array) for tensor, array in zip(actual, arrays, strict=True))
        assert np.array_equal(table.cpu(), tables)
        assert np.array_equal(transfers.down(actual[1]).values(), arrays[1])


def test_a_collective_of_nccl_is_replayed(tmp_path: Path) -> None:
    """By the one rank that there is; what a group of several does, nothing here can show."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        comm = NcclCommunicator(RankLine(Segment.create("test", 4096), 0, 0), 30.0)
        x, graph = torch.ones(4, 8, device=CUDA), torch.cuda.CUDAGraph()
        comm.all_reduce(x)  # opens the connection, which nothing may do in a capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = comm.all_reduce(x * 2)
        x.fill_(3)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 6))
    finally:
        dist.destroy_process_group()


def test_blocks_pass_shared_memory_that_is_pinned() -> None:
    area = Segment.create("test", 1 << 20).view
    CudaMemory(CUDA).pin(area)
    assert torch.frombuffer(area, dtype=torch.uint8).is_pinned()
    here, there = [[torch.randn(6, 4, 32, device=CUDA) for _ in range(3)] for _ in range(2)]
    for layers, blocks, out in ((here, [2, 4], True), (there, [3, 1], False)):
        BlockCopier(layers, area).copy(CopyOrder(out, np.array(blocks)))
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours[[2, 4]], theirs[[3, 1]])
