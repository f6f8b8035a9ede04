"""A GGUF file's header is read as `gguf` writes it; one that lies or is cut off is refused without taking memory."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.gguf_fuzz import mutations, read_mutated, sample_file
from services.compute.model.formats.gguf.container import read_container
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.formats.gguf.parts import read_gguf
from services.compute.model.formats.gguf.types import TYPES, UNREAD
from services.compute.model.spec import ModelError


def test_types_equal_ggml() -> None:
    for number, kind in TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.block, kind.n_bytes) == (known.name, *gguf.GGML_QUANT_SIZES[known])
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    assert known <= TYPES.keys() | UNREAD.keys()


def test_header_equals_the_reading_of_the_gguf_package(tmp_path: Path) -> None:
    file = sample_file(tmp_path / "sample.gguf")
    actual, reference = read_container(file), gguf.GGUFReader(file)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            assert actual.metadata[key] == (tuple(value) if isinstance(value, list) else value)
    assert len(actual.metadata) == len(reference.fields) - 3
    data = file.read_bytes()
    for tensor in reference.tensors:
        info = actual.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert data[info.offset : info.offset + info.n_bytes] == tensor.data.tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_mutated_headers_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "mutated.gguf"
    outcomes = set()
    for mutated in mutations(sample_file(file).read_bytes(), seed, 150):
        file.write_bytes(mutated)
        outcomes.add(read_mutated(file))
    assert "read" in outcomes, "no mutation was harmless: the files are broken before the header is read"
    assert len(outcomes) > 20


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def _described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return struct.pack("<Q", len(name)) + name.encode() + dimensions + struct.pack("<IQ", kind, offset)


def _file(
    *, n_tensors: int | None = None, n_keys: int | None = None, version: int = 3, keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (), data: int = 64,
) -> bytes:  # fmt: skip
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32 + data)


_F32 = 0
_LIES = {
    "not a GGUF file": b"PK\3\4" + bytes(60),
    "version 1": _file(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "cut off in its header": b"GGUF" + struct.pack("<I", 3),
    "tensors, but": _file(n_tensors=2**63),
    "keys, but": _file(n_keys=2**40),
    "texts of list, but": _file(keys=(_entry("list", 9, struct.pack("<IQ", 8, 2**32)),)),
    "values of list, but": _file(keys=(_entry("list", 9, struct.pack("<IQ", 0, 2**32)),)),
    "a list of values of type 9": _file(keys=(_entry("list", 9, struct.pack("<IQ", 9, 1)),)),
    "type 77 of a value": _file(keys=(_entry("key", 77, bytes(8)),)),
    "key 0: a text of": _file(keys=(struct.pack("<Q", 2**50),), n_keys=1),
    "text: not UTF-8": _file(keys=(_entry("text", 8, struct.pack("<Q", 2) + b"\xff\xfe"),)),
    "key: twice": _file(keys=(_entry("key", 0, b"\1"), _entry("key", 0, b"\2"))),
    "general.alignment: expected a power of 2": _file(keys=(_entry("general.alignment", 4, struct.pack("<I", 48)),)),
    "general.alignment: expected a power of 2 from 8": _file(
        keys=(_entry("general.alignment", 4, struct.pack("<I", 4)),)
    ),
    "general.alignment: expected an integer": _file(keys=(_entry("general.alignment", 6, struct.pack("<f", 32)),)),
    "w: twice": _file(tensors=(_described("w", (8,), _F32, 0), _described("w", (8,), _F32, 32))),
    "w: expected 1 to 4 dimensions, found 5": _file(tensors=(_described("w", (1,) * 5, _F32, 0),)),
    "w: has no elements": _file(tensors=(_described("w", (8, 0), _F32, 0),)),
    "w: rows of 33": _file(tensors=(_described("w", (33,), 8, 0),)),
    "w: its offset 4": _file(tensors=(_described("w", (8,), _F32, 4),)),
    "w: needs bytes": _file(tensors=(_described("w", (17,), _F32, 0),)),
    "w: needs bytes ": _file(tensors=(_described("w", (2**62, 2**62), _F32, 0),)),
    "w: needs bytes  ": _file(tensors=(_described("w", (8,), _F32, 2**64 - 32),)),
    "other: begins at byte": _file(tensors=(_described("w", (16,), _F32, 0), _described("other", (8,), _F32, 32))),
    "type IQ2_XXS are not read": _file(tensors=(_described("w", (256,), 16, 0),)),
    "type number 99 are not read": _file(tensors=(_described("w", (256,), 99, 0),)),
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("problem", _LIES)
def test_a_lie_is_refused_by_name(problem: str, tmp_path: Path) -> None:
    file = tmp_path / "lie.gguf"
    file.write_bytes(_LIES[problem])
    assert problem.strip() in read_mutated(file)


def test_metadata_getters_name_the_key() -> None:
    metadata = GgufMetadata(
        Path("x.gguf"), {"a": "text", "n": 3, "f": float("nan"), "l": ("a", "b"), "i": (1, 2), "b": True}
    )
    assert (metadata.text("a"), metadata.integer("n"), metadata.number("n")) == ("text", 3, 3.0)
    assert (metadata.texts("l"), metadata.integers("absent"), metadata.flag("b")) == (("a", "b"), (), True)
    for read, key, expected in (
        (metadata.integer, "a", "an integer"),
        (metadata.integer, "b", "an integer"),
        (metadata.number, "f", "a number"),
        (metadata.text, "n", "a text"),
        (metadata.flag, "n", "true or false"),
        (metadata.texts, "a", "a list"),
        (metadata.integers, "l", "integers"),
        (metadata.texts, "i", "texts, found 1"),
        (metadata.text, "l", "a text, found a list of 2"),
        (metadata.numbers, "l", "numbers"),
        (metadata.text, "absent", "missing: expected a text"),
    ):
        with pytest.raises(ModelError, match=f"x.gguf: {key}: .*{expected}"):
            read(key)


def _part(
    folder: Path, number: int, count: int, *, stated: int | None = None, tensor: str | None = None, n_tensors: int = 0
) -> Path:
    file = folder / f"model-Q8_0-{number:05}-of-{count:05}.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_uint16("split.no", number - 1 if stated is None else stated)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", n_tensors or count)
    writer.add_tensor(tensor or f"t{number}", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_divided_model_is_joined(tmp_path: Path) -> None:
    files = [_part(tmp_path, number, 3) for number in (1, 2, 3)]
    for file in files:
        actual = read_gguf(file)
        assert {name: info.file for name, info in actual.tensors.items()} == dict(
            zip(("t1", "t2", "t3"), files, strict=True)
        )
    _part(tmp_path, 1, 3, n_tensors=7)
    with pytest.raises(ModelError, match=r"split.tensors.count: 7, but all parts together hold 3"):
        read_gguf(files[0])
    with pytest.raises(ModelError, match=r"00004-of-00003.gguf: a part's number is from 1 to 3"):
        read_gguf(files[0].with_name("model-Q8_0-00004-of-00003.gguf"))
    _part(tmp_path, 2, 3, tensor="t1")
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf: t1: is also in .*00001-of-00003.gguf"):
        read_gguf(files[0])
    _part(tmp_path, 2, 3, stated=2)
    with pytest.raises(ModelError, match=r"part 3 of 3, found as part 2 of 3"):
        read_gguf(files[0])
    files[1].unlink()
    with pytest.raises(ModelError, match=r"model-Q8_0-00002-of-00003.gguf is missing next to it \(1 of 3"):
        read_gguf(files[0])
