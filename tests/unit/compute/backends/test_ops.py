"""Every backend that this machine has computes what the reference does; a CPU's rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from services.compute.backends.base import Expert, ModelBackend, Ops
from services.compute.backends.cpu.backend import OneDnnBackend
from services.compute.backends.kv_cache import KvLayer
from services.compute.backends.kv_format import plain_format
from services.compute.backends.opening import open_backend
from services.compute.backends.shapes import ExpertRouting, ExpertsShape, KvShape
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Dense, Stacked

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
N_ROWS, SIZE, HEAD_DIM, BLOCK_SIZE = 61, 512, 64, 16
ON_CPU: dict[str, Callable[[], ModelBackend]] = {
    "cpu in float32": lambda: open_backend(torch.float32, CPU),
    "cpu in bfloat16": lambda: open_backend(torch.bfloat16, CPU),
    "cpu in bfloat16 by oneDNN": lambda: OneDnnBackend(torch.bfloat16),
}
BACKENDS = dict(ON_CPU)
if torch.cuda.is_available():
    BACKENDS |= {
        "cuda in float32": lambda: open_backend(torch.float32, CUDA),
        "cuda in bfloat16": lambda: open_backend(torch.bfloat16, CUDA),
    }

# Computes rows [n, SIZE] that stand at positions [n]: one result for each.
Function = Callable[[Tensor, Tensor], Tensor]


def functions(ops: Ops, dtype: torch.dtype, device: torch.device) -> dict[str, Function]:
    """Every operation of `ops`, with the same weights for every backend."""

    def normal(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + shape[-1])
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEAD_DIM)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        out = heads(x.clone())
        rope(positions)(out)
        return out

    def stored(x: Tensor, positions: Tensor) -> Tensor:
        shape, qkv = KvShape(1, 2, HEAD_DIM), x.clone()
        table = torch.zeros(2 * N_ROWS, shape.width, dtype=dtype, device=device)
        ops.store(KvLayer(plain_format(dtype), shape, table), positions + BLOCK_SIZE, qkv, rope(positions))
        assert not table[:BLOCK_SIZE].any()
        return torch.cat((qkv[:, : -shape.width], table[positions + BLOCK_SIZE]), dim=1)

    # Of so many terms that oneDNN sums them by the number of rows, were it allowed to.
    weight = Stacked((Dense(normal(30, 3 * SIZE)), Dense(normal(66, 3 * SIZE))))
    product, biased = (ops.linear(weight, bias) for bias in (None, normal(96)))
    lookup, (tied_lookup, tied_product) = ops.embedding(weight), ops.tied(weight, None)
    tables = zip(normal(4 * 192, SIZE).chunk(4), normal(4 * SIZE, 96).chunk(4), strict=True)
    mixture = [Expert(Stacked((Dense(up),)), Stacked((Dense(down),))) for up, down in tables]
    experts = ops.experts(mixture, ExpertsShape(range(2, 6), SIZE, 96, ExpertRouting(2, normalise=True)), "silu")
    by_groups = ExpertRouting(
        2, True, "sigmoid", corrected=True, n_groups=4, n_kept_groups=2, group_score="top2", scale=1.5
    )
    grouped = ops.experts(mixture, ExpertsShape(range(2, 6), SIZE, 96, by_groups), "silu", normal(8).float())
    norm, head_norm = ops.rms_norm(normal(SIZE).float(), 1e-5), ops.rms_norm(normal(8, HEAD_DIM).float(), 1e-5)
    layer_norm = ops.layer_norm(normal(SIZE), normal(SIZE), 1e-5)
    angles = torch.arange(N_ROWS, device=device).unsqueeze(1) / torch.arange(1, 25, device=device)
    rope, shard = ops.rope(angles.cos(), angles.sin()), ops.logit_shard(0, SIZE)
    actual: dict[str, Function] = {
        "linear": lambda x, _: product(x.repeat(1, 3)),
        "linear with a bias": lambda x, _: biased(x.repeat(1, 3)),
        "linear in float32": lambda x, _: product.in_float32(x.repeat(1, 3)),
        "embedding": lambda _, positions: lookup(positions % 96),
        "embedding that is the head": lambda _, positions: tied_lookup(positions % 96),
        "head that is the embedding": lambda x, _: tied_product(x.repeat(1, 3)),
        "rms norm": lambda x, _: norm(x),
        "rms norm of heads": lambda x, _: head_norm(heads(x)),
        "layer norm": lambda x, _: layer_norm(x),
        "rope": rotated,
        "store": stored,
        "experts, half of them another rank's": lambda x, _: experts(x, x[:, :8]),
        "experts in groups": lambda x, _: grouped(x, x[:, :8]),
        "sigmoid": lambda x, _: ops.sigmoid(x[:, :1]),
        "add": lambda x, _: ops.add(x.clone(), x.flip(-1).contiguous(), 0.75),
        "best columns": lambda x, _: shard.best(x.float(), 5)[0].sort(dim=-1).values,
        "mass of columns": lambda x, _: shard.mass(x.float()),
    }
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        activation, gate = ops.activation(name), ops.gate(name)
        actual[name] = lambda x, _, function=activation: function(x)  # type: ignore[misc]
        actual[f"gated by {name}"] = lambda x, _, function=gate: function(x)  # type: ignore[misc]
    return actual


@pytest.fixture(scope="module", autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


NAMES = list(functions(TorchOps(torch.float32, CPU), torch.float32, CPU))


def rows(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(N_ROWS, SIZE, generator=torch.Generator().manual_seed(0))
    return x.bfloat16().to(device), torch.arange(N_ROWS, device=device)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_results_equal_the_reference(backend: str, name: str) -> None:
    of = BACKENDS[backend]()
    x, positions = rows(of.device)
    actual = functions(of.ops, of.dtype, of.device)[name](x.to(of.dtype), positions)
    exact = functions(TorchOps(torch.float32, of.device), torch.float32, of.device)[name](x.float(), positions)
    if exact.dtype is torch.int64:  # keys: there is one right answer
        assert torch.equal(actual, exact)
        return
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[of.dtype]
    assert (actual.float() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_on_a_cpu_a_rows_bits_depend_on_that_row_alone(backend: str, name: str) -> None:
    of = ON_CPU[backend]()
    x, positions = rows(CPU)
    x = x.to(of.dtype)
    function = functions(of.ops, of.dtype, CPU)[name]
    expected = function(x, positions)
    for n in (1, 17, 32):
        for low in range(0, N_ROWS - n, n):
            part = slice(low, low + n)
            assert torch.equal(function(x[part], positions[part]), expected[part]), (n, low)
