"""Instruction sets of this machine's CPU, read without torch."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# oneDNN's bfloat16 needs one of these sets; without it torch takes seven times as long as in float32 (16 rows, Zen 3).
_BFLOAT16 = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"})  # the last: 64-bit ARM
_AVX2 = {"avx2", "fma", "f16c", "bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8", "avx512vbmi"}


def has_bfloat16() -> bool:
    """Whether torch computes in bfloat16 at the speed of float32 or better."""
    return any(flags <= _flags() for flags in _BFLOAT16)


def has_amx() -> bool:
    """Whether the CPU has the tile registers of AMX."""
    return _flags() >= _AMX


def has_avx512_bf16() -> bool:
    """Whether the CPU multiplies pairs of bfloat16 (AVX-512), for our kernels without AMX."""
    return _flags() >= _AVX512_BF16


def has_avx512() -> bool:
    """Whether the CPU has vectors of 16 floats (AVX-512), for our kernels without products of pairs."""
    return _flags() >= _AVX512


def has_avx2() -> bool:
    """Whether the CPU has the vector instructions AVX2, for our kernels without better ones."""
    return _flags() >= _AVX2


def has_neon() -> bool:
    """Whether the CPU has the vector instructions of 64-bit ARM."""
    return "asimd" in _flags()


def has_neon_bf16() -> bool:
    """Whether the ARM CPU also multiplies pairs of bfloat16."""
    return _flags() >= {"asimd", "bf16"}


def has_vectors() -> bool:
    """Whether the CPU has the vector instructions of one of our kernels."""
    return has_avx2() or has_neon()


def _flags() -> set[str]:
    """The CPU's flags from Linux; empty on other systems."""
    if not _CPUINFO.exists():
        return set()
    for line in _CPUINFO.read_text().splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return set()
