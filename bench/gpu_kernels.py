"""Compiles the Triton kernels of the CUDA backend without a GPU; prints registers, spills and shared memory of each.

``python -m bench.gpu_kernels [--target 80 --target 90] [--dtype bfloat16] [--heads 32/8x128 ...]``. The kernels are
compiled as the backend launches them: its launches are recorded, not made. Triton is imported where it is used, because
`make test-triton` alone has it. It ends with 1 if a kernel spills registers
or needs more shared memory than a block has.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from services.compute.backends.batch import AdapterRows, StepBatch
from services.compute.backends.cuda.codes import CodesLinear, PackedWeight
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.grouped import GroupedExperts
from services.compute.backends.cuda.kv_codes import CodeWriter
from services.compute.backends.cuda.low_rank import TritonLowRank
from services.compute.backends.cuda.paged import PagedTriton
from services.compute.backends.cuda.states import TritonStates
from services.compute.backends.draws import Chances
from services.compute.backends.kv_cache import KvCache, KvLayer
from services.compute.backends.kv_format import find_kv_format, plain_format
from services.compute.backends.shapes import AttentionShape, ExpertRouting, ExpertsShape, KvShape
from services.compute.backends.states import ScanTokens, StatePlan, StateRows
from services.compute.backends.torch.experts import ExpertStack, Router
from services.compute.backends.torch.ops import TorchOps

if TYPE_CHECKING:
    from triton.compiler import ASTSource

CPU = torch.device("cpu")
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # that a block may have, by architecture
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
_TYPES |= {torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.float8_e4m3fn: "fp8e4nv"}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """A launch that was not made."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @classmethod
    def of(cls, kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launch:
        """The launch of `kernel` with these arguments."""
        options = {name: named.pop(name) for name in _OPTIONS if name in named}
        return cls(kernel, inspect.signature(kernel.fn).bind(*given, **named).arguments, options)

    @property
    def float8(self) -> bool:
        """Whether it reads 8-bit floats, which older GPUs cannot convert."""
        return any(isinstance(of, torch.Tensor) and of.dtype is torch.float8_e4m3fn for of in self.arguments.values())

    def source(self) -> ASTSource:
        """Arguments of the compiler: the types of the arguments, and the values of those that are constants."""
        from triton.compiler import ASTSource

        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for number, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(number,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{_TYPES[value.dtype]}"
                attributes[(number,)] = [["tt.divisibility", 16]]  # as torch allocates
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]  # as Triton specializes
        return ASTSource(self.kernel, signature, constants, attributes)


@dataclass(frozen=True)
class Usage:
    """A kernel's use of a GPU."""

    registers: int  # registers per thread
    spilled: int  # bytes of a thread: its stack, since the kernels keep nothing else there
    shared: int  # bytes of a block


def recorder(module: Any, launches: list[Launch]) -> SimpleNamespace:
    """The kernels of `module`; a launch is put down instead of made."""
    from triton import JITFunction

    def record(kernel: Any) -> Any:
        class Launcher:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *given, **named: launches.append(Launch.of(kernel, given, named))

        return Launcher()

    names = [name for name, value in vars(module).items() if isinstance(value, JITFunction)]
    return SimpleNamespace(TritonError=module.TritonError, **{name: record(getattr(module, name)) for name in names})


def attention_launches(
    shape: AttentionShape, dtype: torch.dtype, kv_format: str = "", block_tokens: int = 16
) -> Iterator[Launch]:
    """Launches of one mixed step: a short decode, a long one, one that chooses its blocks, and a prompt."""
    from services.compute.backends.cuda.kernels import attention, pages

    launches: list[Launch] = []
    form = find_kv_format(kv_format) if kv_format else plain_format(dtype)
    paged = PagedTriton(shape, dtype, CPU, form.coding)
    paged._kernels, paged._pages = recorder(attention, launches), recorder(pages, launches)
    kv_shape, ops = KvShape(block_tokens, shape.n_kv_heads, shape.head_dim), TorchOps(dtype, CPU)
    cache = KvCache(form, 1, 1, kv_shape, dtype, CPU, ops, summarised=True)
    for n_rows, n_keys, most in ((1, 9, 0), (1, 900, 0), (1, 900, 32), (40, 40, 0)):
        table = torch.zeros(1, 64, dtype=torch.int64)
        numbers = torch.zeros(n_rows, dtype=torch.int64)
        batch = StepBatch(numbers, numbers, numbers, (0, n_rows), (n_keys,), table, int(n_rows == 1), pages=(most,))
        q = torch.zeros(n_rows, shape.n_heads * shape.head_dim, dtype=dtype)
        paged.attend(q, cache, 0, paged.plan(batch, block_tokens, None))
    yield from launches


def layer_launches(shape: AttentionShape, dtype: torch.dtype, hidden: int = 4096) -> Iterator[Launch]:
    """Launches of the small operations of a layer of that width, with a summary of a block, and a draw."""
    launches: list[Launch] = []
    ops = TritonOps(dtype, CPU)
    ops._kernels, ops._pages = recorder(ops._kernels, launches), recorder(ops._pages, launches)
    x, places = torch.zeros(2, hidden, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    ops.add_norm(x, x.clone(), 1.0, ops.rms_norm(torch.ones(hidden), 1e-5))
    n_heads, half = shape.n_heads + 2 * shape.n_kv_heads, shape.head_dim // 2
    heads = torch.zeros(2, n_heads, shape.head_dim, dtype=dtype)
    kv_shape = KvShape(1, shape.n_kv_heads, shape.head_dim)
    n_rotated = shape.n_heads + shape.n_kv_heads
    ops.rms_norm(torch.ones(n_rotated, shape.head_dim), 1e-5).write(heads[:, :n_rotated], heads[:, :n_rotated])
    rotation = ops.rope(torch.ones(8, half), torch.zeros(8, half))(places)
    table = torch.zeros(4, kv_shape.width, dtype=dtype)
    layer = KvLayer(plain_format(dtype), kv_shape, table)
    ops.store(layer, places, heads.flatten(1), rotation)
    ops.summarise(layer, places, torch.zeros(4, kv_shape.n_kv_heads, 2, kv_shape.head_dim, dtype=dtype))
    ops.gate("silu")(torch.zeros(2, 4 * hidden, dtype=dtype))
    ops.logit_shard(0, 8192).sample(torch.zeros(2, 8192), Chances(torch.ones(2), places, places))
    yield from launches


def cache_launches(shape: AttentionShape, dtype: torch.dtype, kv_format: str) -> Iterator[Launch]:
    """Launches that write the keys and values of a layer to a cache of codes, and summarise its blocks."""
    from services.compute.backends.cuda.kernels import kv_codes, pages

    launches: list[Launch] = []
    ops = TritonOps(dtype, CPU)
    ops._coder, ops._pages = CodeWriter(recorder(kv_codes, launches)), recorder(pages, launches)
    kv_shape, half = KvShape(16, shape.n_kv_heads, shape.head_dim), shape.head_dim // 2
    cache, places = (
        KvCache(find_kv_format(kv_format), 1, 1, kv_shape, dtype, CPU, ops, summarised=True),
        torch.zeros(2, dtype=torch.int64),
    )
    qkv = torch.zeros(2, (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim, dtype=dtype)
    rotation = ops.rope(torch.ones(8, half), torch.zeros(8, half))(places)
    cache.store(0, places, qkv, rotation)
    yield from launches


def code_launches(dtype: torch.dtype, n_in: int = 4096) -> Iterator[Launch]:
    """Products with codes of 4 and 8 bits, of few rows and of many."""
    from services.compute.backends.cuda.kernels import codes

    launches: list[Launch] = []
    kernels = recorder(codes, launches)
    ones = torch.ones(64, n_in // 32, dtype=torch.float16)
    for width, kind in ((n_in // 2, torch.uint8), (n_in, torch.int8), (n_in, torch.float8_e4m3fn)):
        packed = PackedWeight(
            torch.zeros(64, width, dtype=kind), ones, ones.byte() if width < n_in else None, None, n_in
        )
        for n_rows in (1, 100):
            CodesLinear(kernels, packed, None)(torch.zeros(n_rows, n_in, dtype=dtype))
    yield from launches


def expert_launches(dtype: torch.dtype, hidden: int = 2048, ffn: int = 1024) -> Iterator[Launch]:
    """Products of experts, of few rows and of many."""
    from services.compute.backends.cuda.kernels import grouped

    launches: list[Launch] = []
    stack = ExpertStack(
        torch.zeros(4, 2 * ffn, hidden, dtype=dtype), torch.zeros(4, hidden, ffn, dtype=dtype), None, None
    )
    shape = ExpertsShape(range(4), hidden, ffn, ExpertRouting(2, normalise=True))
    experts = GroupedExperts(
        recorder(grouped, launches), stack, shape, Router(shape.routing, None), TorchOps(dtype, CPU).gate("silu")
    )
    for n in (1, 100):
        experts(torch.zeros(n, hidden, dtype=dtype), torch.zeros(n, 4))
    yield from launches


def adapter_launches(dtype: torch.dtype, n_in: int = 4096, n_out: int = 4096) -> Iterator[Launch]:
    """Launches that adapters of the largest rank that is allowed by default add to a layer."""
    from services.compute.backends.cuda.kernels import low_rank

    launches: list[Launch] = []
    layer = TritonLowRank(recorder(low_rank, launches), n_out, n_in, 2, 64, dtype, CPU)
    rows = AdapterRows(torch.zeros(3, dtype=torch.int64), ())
    layer.add_(torch.zeros(3, n_out, dtype=dtype), torch.zeros(3, n_in, dtype=dtype), rows)
    yield from launches


def state_launches(dtype: torch.dtype) -> Iterator[Launch]:
    """Launches of layers with a state for decodes and a prompt, with the heads of published families."""
    from services.compute.backends.cuda.kernels import states

    launches: list[Launch] = []
    ours = TritonStates(recorder(states, launches), exact=dtype is torch.float32)
    plan = StatePlan.of([StateRows(0, 1, 0), StateRows(1, 3, 1)], CPU)
    x, inputs = torch.zeros(3, 4096, dtype=dtype), torch.zeros(2, 3, 4096, dtype=dtype)
    ours.convolution(torch.zeros(4096, 4), None).activated(x, inputs, plan)
    for n_heads, height, width, decays, corrected in (
        (48, 32, 128, 0, False),  # Granite 4 H 350M
        (24, 64, 256, 0, False),  # Falcon-H1
        (64, 128, 128, 0, False),  # MiniMax Text 01
        (32, 128, 128, 0, True),  # Qwen 3 Next
        (32, 128, 128, 128, True),  # Kimi Linear
        (1, 8192, 16, 8192, False),  # Jamba
    ):
        rates = torch.zeros(n_heads, height, width) if decays == height != width else None
        b, decay = torch.zeros(3, n_heads, width), torch.zeros(3, n_heads, *([decays] if decays else []))
        rate = torch.zeros(3, n_heads) if corrected else None
        tokens = ScanTokens(torch.zeros(3, n_heads, height), b, b, decay, rate, rates)
        ours.scan(tokens, torch.zeros(2, n_heads, height, width), plan)
    yield from launches


def compiled(launch: Launch, target: int) -> Usage:
    """Compile for an architecture, and read what the machine code uses."""
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(launch.source(), target=GPUTarget("cuda", target, 32), options=launch.options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        message = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    used = dict(re.findall(r"(REG|STACK):(\d+)", message.stdout))
    return Usage(int(used["REG"]), int(used["STACK"]), compiled.metadata.shared)


def _shape(text: str) -> AttentionShape:
    n_heads, n_kv_heads, head_dim = map(int, re.split("[/x]", text))
    return AttentionShape(n_heads, n_kv_heads, head_dim, head_dim**-0.5, None)


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, action="append", help="compute capability: 80, 90; default: both")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", nargs="*", type=_shape, help="query heads/KV heads x size, as 32/8x128")
    given = parser.parse_args()
    n_wrong = 0
    for shape in given.heads or [_shape("32/8x128")]:
        heads = f"{shape.n_heads}/{shape.n_kv_heads}x{shape.head_dim}"
        dtype = getattr(torch, given.dtype)
        over_codes = (
            launch
            for form in ("int8", "fp8")
            for launch in (*attention_launches(shape, dtype, form), *cache_launches(shape, dtype, form))
        )
        others = (
            *layer_launches(shape, dtype),
            *code_launches(dtype),
            *expert_launches(dtype),
            *adapter_launches(dtype),
            *state_launches(dtype),
        )
        for launch in (*attention_launches(shape, dtype), *over_codes, *others):
            for target in given.target or (80, 90):
                if launch.float8 and target < 89:
                    continue  # attention over gathered keys there
                usage = compiled(launch, target)
                wrong = usage.spilled > 0 or usage.shared > SHARED_BYTES.get(target, 99 << 10)
                n_wrong += wrong
                uses = f"{usage.registers:3} registers, {usage.spilled} bytes spilled, {usage.shared:,} bytes shared"
                name = f"{launch.kernel.fn.__name__:8}"
                print(f"sm_{target} {given.dtype} {heads:>9} {name} {uses}{'  <-' if wrong else ''}", flush=True)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
