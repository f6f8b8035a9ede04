"""The kernels for 64-bit ARM on a machine of another kind: cross-compiled, run by QEMU, called like a library."""

from __future__ import annotations

import ctypes
import functools
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.compute.kernels import build
from services.compute.kernels.library import FUNCTIONS
from services.compute.kernels.signatures import Function, most_arguments
from tests.programs import find, program

DRIVER = Path(__file__).with_name("arm_driver.c")
_BF16, _FLOAT, _LONG = 2, 4, 8
_ORDER = [f for f in FUNCTIONS if f.replayed], [f for f in FUNCTIONS if not f.replayed and f.result == "void"]


def compile_driver(name: str, folder: Path) -> Path:
    """Compile the kernels of that name into a program for ARM, which needs no library of it.

    Debian's cross-compiler takes seconds. ziglang, which every machine has, first compiles a C library, for a minute:
    so all names are linked for one kind of CPU. Less optimized than in an installation, they compile in half the time.
    """
    driver, objects = folder / name, folder / f"{name}.o"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RYZANSTEIN_TARGET", "linux-aarch64")
        patch.setattr(build, "_FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build._FLAGS))
        kinds, compiler = build.TARGETS["linux-aarch64"], _cross_compiler() or build.packaged_compiler("musl")
        build.compile_kernels(compiler, kinds[name], objects, "-r", str(DRIVER))
        linking = [*compiler(kinds["neon"]), str(objects), "-static", "-lm", "-lpthread", "-o", str(driver)]
    subprocess.run(linking, check=True)
    return driver


def _cross_compiler() -> build.Compiler | None:
    path = find("aarch64-linux-gnu-gcc")
    return (lambda kind: [path, f"-march={kind.march}"]) if path else None


class EmulatedLibrary:
    """Looks like a library that `ctypes` has opened."""

    def __init__(self, driver: Path, threads: int) -> None:
        command = [program("qemu-aarch64"), "-cpu", "max", str(driver), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        codes = [*_ORDER[0], None, *_ORDER[1]]  # as in calls.h
        self._calls = {
            function.name: functools.partial(self._call, code, function)
            for code, function in enumerate(codes)
            if function
        }

    def __enter__(self) -> EmulatedLibrary:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._calls[name]

    def _call(self, code: int, function: Function, *arguments: Any) -> None:
        named = dict(zip(function.names, arguments, strict=True))
        sizes = SIZES[function.name](named)
        words, regions = [], list[tuple[int, int]]()
        for name, kind, argument in zip(function.names, function.kinds, arguments, strict=True):
            words.append(struct.pack("<f4x", argument) if kind == "float" else struct.pack("<q", argument or 0))
            regions.append((argument or 0, sizes[name] if kind == "pointer" and argument else -1))
        missing = most_arguments(FUNCTIONS) - len(words)
        held = [(address, size) for address, size in regions if size >= 0]
        stdin, stdout = self._pipes()
        stdin.write(struct.pack("<q", code) + b"".join(words) + bytes(8 * missing))
        stdin.write(np.array([size for _, size in regions] + [-1] * missing, np.int64).tobytes())
        stdin.write(b"".join(ctypes.string_at(address, size) for address, size in held))
        stdin.flush()
        for address, size in held:
            result = stdout.read(size)
            assert len(result) == size, f"{function.name} ended the program"
            ctypes.memmove(address, result, size)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def _rows(n: int, stride: int, width: int, size: int) -> int:
    """Bytes of n rows."""
    return ((n - 1) * stride + width) * size


def _longs(address: int, n: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (n,))


def _count(address: int, n: int) -> int:
    """One more than the largest of n indices."""
    return int(_longs(address, n).max(initial=0)) + 1


def _count32(address: int, n: int) -> int:
    """The same of indices of 32 bits."""
    return int(np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (n,)).max(initial=0)) + 1


def _linear(a: Mapping[str, Any]) -> dict[str, int]:
    packed = -(-a["n"] // 64) * 64 * a["k"] * _BF16
    y = _rows(a["m"], a["ldy"], a["n"], _FLOAT if a["wide"] else _BF16)
    return {"x": _rows(a["m"], a["ldx"], a["k"], _BF16), "packed": packed, "bias": a["n"] * _FLOAT, "y": y, "spare": 0}


def _pack_weight(a: Mapping[str, Any]) -> dict[str, int]:
    return {"weight": a["n"] * a["k"] * _BF16, "packed": -(-a["n"] // 64) * 64 * a["k"] * _BF16}


def _unpack_rows(a: Mapping[str, Any]) -> dict[str, int]:
    packed = -(-_count(a["rows"], a["m"]) // 64) * 64 * a["k"] * _BF16
    return {"packed": packed, "rows": a["m"] * _LONG, "y": a["m"] * a["k"] * _BF16}


def _quantize_rows(a: Mapping[str, Any]) -> dict[str, int]:
    width = a["n_in"] if not a["order"] else _count32(a["order"], a["k"])
    return {"x": _rows(a["m"], a["ldx"], width, _BF16), "order": 4 * a["k"], "inputs": a["m"] * a["stride"]}


def _codes(a: Mapping[str, Any], n: int) -> dict[str, int]:
    rows = -(-n // 64) * 64
    blocks = -(-a["k"] // a["block"])
    scales = rows * -(-blocks // a["common"]) * (2 if a["half"] else _FLOAT)
    return {"codes": rows * a["k"] * a["bits"] // 8, "scales": scales, "offsets": scales}


def _quantized_linear(a: Mapping[str, Any]) -> dict[str, int]:
    y = _rows(a["m"], a["ldy"], a["n"], _FLOAT if a["wide"] else _BF16)
    return {"inputs": a["m"] * a["stride"], "bias": a["n"] * _FLOAT, "y": y, **_codes(a, a["n"])}


def _pack_codes(a: Mapping[str, Any]) -> dict[str, int]:
    return {"codes": a["n"] * a["k"], "packed": -(-a["n"] // 64) * 64 * a["k"] * a["bits"] // 8}


def _look_up(a: Mapping[str, Any]) -> dict[str, int]:
    rows = {"rows": a["m"] * _LONG, "y": a["m"] * a["n_in"] * _BF16, "order": 4 * a["k"]}
    return rows | _codes(a, _count(a["rows"], a["m"]))


def _rms_norm(a: Mapping[str, Any]) -> dict[str, int]:
    width = a["groups"] * a["n"]
    x, y = (_rows(a["m"], a[stride], width, _BF16) for stride in ("ldx", "ldy"))
    return {"x": x, "weight": width * _FLOAT, "y": y}


def _rotate(a: Mapping[str, Any]) -> dict[str, int]:
    angles = _count(a["positions"], a["m"]) * a["half"] * _FLOAT
    x = _rows(a["m"], a["ldx"], a["heads"] * a["head_dim"], _BF16)
    return {"x": x, "cos": angles, "sin": angles, "positions": a["m"] * _LONG}


def _write_rows(a: Mapping[str, Any]) -> dict[str, int]:
    cache = _count(a["slots"], a["m"]) * a["width"] * _BF16
    return {"cache": cache, "slots": a["m"] * _LONG, "x": _rows(a["m"], a["ldx"], a["width"], _BF16)}


def _write_int8(a: Mapping[str, Any]) -> dict[str, int]:
    blocks = -(-_count(a["slots"], a["m"]) // a["block_tokens"])
    cache = blocks * a["block_tokens"] * a["heads"] * (a["head_dim"] + _BF16)
    x = _rows(a["m"], a["ldx"], a["heads"] * a["head_dim"], _BF16)
    return {"cache": cache, "slots": a["m"] * _LONG, "x": x}


def _count_blocks(a: Mapping[str, Any]) -> int:
    """One more than the largest block that a sequence has; what its table holds beyond is not read."""
    n, width = a["sequences"], a["n_blocks"]
    held = -(-_longs(a["lengths"], n) // a["block_tokens"])
    tables = _longs(a["blocks"], n * a["tables"] * width).reshape(n, a["tables"], width)
    return int(np.where(np.arange(width) < held[:, None, None], tables, 0).max(initial=0)) + 1


def _attend_int8(size: int, a: Mapping[str, Any]) -> dict[str, int]:
    slots = _count_blocks(a) * a["block_tokens"]
    return _attend(size, a) | {"cache": slots * 2 * a["n_kv"] * (a["head_dim"] + _BF16)}


def _attend(size: int, a: Mapping[str, Any]) -> dict[str, int]:
    n, blocks, width = a["sequences"], a["sequences"] * a["tables"] * a["n_blocks"], a["n_kv"] * a["head_dim"]
    rows = _count(a["starts"], n + 1) - 1
    return {
        "q": _rows(rows, a["ldq"], width * a["group"], size),
        "out": _rows(rows, a["ldo"], width * a["group"], size),
        "cache": _count_blocks(a) * a["block_tokens"] * 2 * width * size,
        "starts": (n + 1) * _LONG,
        "lengths": n * _LONG,
        "blocks": blocks * _LONG,
    }


def _summarize(a: Mapping[str, Any]) -> dict[str, int]:
    blocks = -(-_count(a["slots"], a["m"]) // a["block_tokens"])
    width, number = 2 * a["n_kv"], a["head_dim"] + _BF16 if a["coded"] else a["head_dim"] * _BF16
    cache, summaries = blocks * a["block_tokens"] * width * number, blocks * width * a["head_dim"] * _BF16
    return {"cache": cache, "summaries": summaries, "slots": a["m"] * _LONG}


def _choose_pages(a: Mapping[str, Any]) -> dict[str, int]:
    n, blocks, width = a["sequences"], a["sequences"] * a["n_blocks"], a["n_kv"] * a["head_dim"]
    return {
        "q": _rows(_count(a["starts"], n + 1) - 1, a["ldq"], width * a["group"], _BF16),
        "summaries": _count(a["blocks"], blocks) * 2 * width * _BF16,
        **dict.fromkeys(("lengths", "pages", "chosen_lengths"), n * _LONG),
        "starts": (n + 1) * _LONG,
        "blocks": blocks * _LONG,
        "scores": n * -(-a["n_blocks"] // 16) * 16 * a["n_kv"] * a["group"] * _FLOAT,
        "chosen": blocks * a["n_kv"] * _LONG,
    }


def _logits(a: Mapping[str, Any]) -> dict[str, int]:
    columns = {
        "temperature": _FLOAT,
        "mass": _FLOAT,
        "seeds": _LONG,
        "positions": _LONG,
        "keys": _LONG * a.get("width", 1),
    }
    logits = _rows(a["m"], a["ld"], a["n"], _FLOAT)
    return {"logits": logits, **{name: a["m"] * size for name, size in columns.items()}}


# Bytes of what the arguments point to.
SIZES: dict[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "rz_quantize_rows": _quantize_rows,
    "rz_quantized_linear": _quantized_linear,
    "rz_pack_codes": _pack_codes,
    "rz_look_up": _look_up,
    "rz_linear": _linear,
    "rz_pack_weight": _pack_weight,
    "rz_unpack_rows": _unpack_rows,
    "rz_rms_norm": _rms_norm,
    "rz_add": lambda a: dict.fromkeys(("x", "added"), a["m"] * a["n"] * _BF16),
    "rz_rotate": _rotate,
    "rz_write_rows": _write_rows,
    "rz_gate": lambda a: {"x": 2 * a["m"] * a["n"] * _BF16, "y": a["m"] * a["n"] * _BF16},
    "rz_attend": functools.partial(_attend, _BF16),
    "rz_attend_float": functools.partial(_attend, _FLOAT),
    "rz_write_int8": _write_int8,
    "rz_attend_int8": functools.partial(_attend_int8, _BF16),
    "rz_attend_int8_float": functools.partial(_attend_int8, _FLOAT),
    "rz_summarize": _summarize,
    "rz_choose_pages": _choose_pages,
    "rz_draw": _logits,
    "rz_pick": _logits,
    "rz_weigh": _logits,
}
