"""Reads mutated GGUF files: each is read or refused by ModelError, within its own bytes and a bounded memory.

python -m bench.gguf_fuzz --files 10000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from services.compute.model.formats.gguf.container import read_container
from services.compute.model.spec import ModelError

_MEMORY_FACTOR, _MEMORY_FLOOR = 64, 1 << 20  # Python objects may take more than the bytes that hold them
# Numbers in the place of counts, lengths, offsets and sizes.
_LIES = (0, 1, 2, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


def sample_file(file: Path) -> Path:
    """Write a small valid file with every kind of value and several types of tensors; return `file`."""
    writer, random_numbers = gguf.GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_custom_alignment(64)
    writer.add_add_bos_token(True)
    writer.add_uint64("test.large", 2**63)
    writer.add_float64("test.double", 0.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{number}" for number in range(40)])
    writer.add_token_scores([0.5] * 40)
    writer.add_token_types([1] * 40)
    kinds = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1)
    for number, kind in enumerate(kinds):
        values = random_numbers.standard_normal((4, 64), dtype=np.float32)
        writer.add_tensor(f"blk.{number}.attn_q.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mutations(valid: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield `count` files with one to four errors each, mostly in the header."""
    chance = random.Random(seed)
    header = valid.rindex(b"attn_q.weight") + 64
    for _ in range(count):
        mutant = bytearray(valid)
        for _ in range(chance.choice((1, 1, 2, 4))):
            _mutate(mutant, chance, min(header, len(mutant)))
        yield bytes(mutant)


def _mutate(data: bytearray, chance: random.Random, header: int) -> None:
    """Break `data` once."""
    if not header:
        return
    place = chance.randrange(header)
    kind = chance.choice(("bit", "byte", "u64", "u64", "u32", "cut", "remove", "insert", "repeat"))
    if kind == "bit":
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[place] = chance.randrange(256)
    elif kind == "u64":
        data[place : place + 8] = struct.pack("<Q", chance.choice(_LIES))
    elif kind == "u32":
        data[place : place + 4] = struct.pack("<I", chance.choice(_LIES) & 0xFFFFFFFF)
    elif kind == "cut":
        del data[chance.randrange(len(data)) :]
    elif kind == "remove":
        del data[place : place + chance.randrange(1, 16)]
    elif kind == "insert":
        data[place:place] = chance.randbytes(chance.randrange(1, 16))
    else:
        data[place:place] = data[place : place + chance.randrange(1, 64)]


def read_mutated(file: Path) -> str:
    """Read a file; return "read" or the refusal. Raises AssertionError for an accepted lie or too much memory."""
    size = file.stat().st_size
    tracemalloc.start()
    try:
        container = read_container(file)
    except ModelError as error:
        if not str(error).startswith(f"{file}: "):
            raise AssertionError(f"a refusal without the file's name: {error}") from error
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < _MEMORY_FACTOR * size + _MEMORY_FLOOR, f"{peak} bytes of memory for a file of {size}"
    end = 0
    for tensor in sorted(container.tensors.values(), key=lambda one: one.offset):
        assert end <= tensor.offset, f"{tensor.name} overlaps"
        end = tensor.offset + tensor.n_bytes
        assert end <= size, f"{tensor.name} ends at {end} of {size}"
        assert np.prod(tensor.shape, dtype=object) // tensor.type.block * tensor.type.n_bytes == tensor.n_bytes
    return "read"


def main() -> None:
    """Read the files and print how many were refused, and why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started, outcomes = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mutated.gguf"
        valid = sample_file(file).read_bytes()
        for mutated in mutations(valid, options.seed, options.files):
            file.write_bytes(mutated)
            outcome = read_mutated(file).removeprefix(f"{file}: ")
            outcomes["".join(letter for letter in outcome if not letter.isdigit())[:60]] += 1
    for outcome, count in outcomes.most_common(20):
        print(f"{count:7,}  {outcome}")
    print(f"{options.files:,} files in {time.perf_counter() - started:.1f} s: {outcomes['read']:,} read, no crash")


if __name__ == "__main__":
    main()
