"""Every quantized type of GGUF is taken apart without loss: its numbers have the bits of gguf's own dequantization."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from services.compute.backends.cpu.codes import pack, plan
from services.compute.cpu import has_vectors
from services.compute.kernels.bfloat16 import open_kernels
from services.compute.model.formats.gguf.blocks import QUANTIZED
from services.compute.model.formats.gguf.container import read_container
from services.compute.model.formats.gguf.tensors import BlockReader, GgufTensors
from services.compute.model.formats.gguf.types import TYPES
from services.compute.model.shard import Shard, Span

N_OUT, N_IN = 64, 1024
# Bytes of a block that hold float16 numbers; random bytes there would be NaN or infinite.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "MXFP4": (), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return blocks of random codes and scales for a tensor of `shape`: [..., bytes of a row] uint8."""
    chance, kind = np.random.default_rng(seed), next(kind for kind in TYPES.values() if kind.name == name)
    blocks = chance.integers(0, 256, (*shape[:-1], shape[-1] // kind.block, kind.n_bytes), dtype=np.uint8)
    for at in _HALVES[name]:
        scale = chance.normal(scale=0.05, size=blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = chance.integers(0, 140, blocks.shape[:-1])  # E8M0 exponents; 0 and 1 are subnormal
    return blocks.reshape(*shape[:-1], -1)


@pytest.fixture(params=list(QUANTIZED))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[BlockReader, torch.Tensor]:
    """A file with one random tensor of a type, and its numbers by gguf."""
    kind = gguf.GGMLQuantizationType[request.param]
    blocks = random_blocks(request.param, (N_OUT, N_IN))
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    writer.add_tensor("w.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = tmp_path / "one.gguf"
    reader = BlockReader(GgufTensors(file, read_container(file)))
    return reader, torch.from_numpy(gguf.dequantize(blocks, kind).reshape(N_OUT, N_IN))


# All; rows; columns of whole groups, of whole blocks, and within both, as 3 ranks would divide them.
SPANS = [
    (Span(0, N_OUT), Span(0, N_IN)),
    (Span(2, 5), Span(0, N_IN)),
    (Span(0, N_OUT), Span(N_IN // 2, N_IN)),
    (Span(1, 2), Span(336, 688)),
    (Span(1, 4), Span(341, 341 * 2)),
]


def test_parts_have_the_bits_of_ggufs_numbers(stored: tuple[BlockReader, torch.Tensor]) -> None:
    reader, expected = stored
    for rows, cols in SPANS:
        weight = reader.weight(Shard("w", (N_OUT, N_IN), rows, cols))
        actual, wanted = weight.rows(0, len(rows)), expected[rows.start : rows.stop, cols.start : cols.stop]
        assert weight.shape == wanted.shape
        assert torch.equal(actual.view(torch.int32), wanted.contiguous().view(torch.int32))
        low, high = weight.ends()
        assert low <= wanted.min()
        assert high >= wanted.max()
        order = torch.arange(len(rows) - 1, -1, -1)
        assert torch.equal(weight.take(order).rows(0, len(rows)), wanted[order])


@pytest.mark.skipif(not has_vectors(), reason="this CPU has none of our kernels")
def test_integers_take_the_memory_that_is_predicted(
    stored: tuple[BlockReader, torch.Tensor], request: pytest.FixtureRequest
) -> None:
    part = plan(stored[0].weight(Shard.whole("w", (N_OUT, N_IN))))
    assert part is not None
    kind = next(kind for kind in TYPES.values() if kind.name == request.node.callspec.params["stored"])
    assert pack(open_kernels(), [part], 0).nbytes * 8 == N_OUT * N_IN * kind.kept_bits
