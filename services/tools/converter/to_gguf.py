"""Writes a checkpoint as a GGUF file with its tokenizer, template and generation settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray

from services.compute.model.formats.gguf.metadata import Value
from services.compute.model.formats.gguf.naming import as_stored, stored_in_gguf
from services.compute.model.loading.sampling import SamplingDefaults
from services.compute.model.spec import ModelError
from services.tools.converter.architecture_keys import (
    architecture_keys,
    architecture_name,
    check_written,
    factor_tensors,
    find_target,
)
from services.tools.converter.assembly import LogicalReader, StoredTensor, assemble, plan
from services.tools.converter.source import Source
from services.tools.converter.to_safetensors import Report

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # values of general.file_type
_FOUR_BITS = ("Q4_0", "Q4_1")
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def write_gguf(
    source: Source, vocabulary: Mapping[str, Value], sampling: SamplingDefaults, out: Path, kind: str, report: Report
) -> None:
    """Write `source` to the file `out`, its matrices in the type `kind`. Raises ModelError."""
    name, architecture = find_target(source)
    keys = architecture_keys(source, architecture)
    spec = as_stored(source.hub_spec)
    refs = stored_in_gguf(source.hub_family, architecture).refs(spec)
    tensors = plan(refs, source.shapes)
    kinds = {stored.name: _type_of(stored, kind) for stored in tensors}
    writer = gguf.GGUFWriter(None, architecture_name(name))
    writer.add_type("model")
    writer.add_name(source.path.name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add(writer, {f"{architecture_name(name)}.{key}": value for key, value in keys.items()})
    _add(writer, vocabulary)
    _add(writer, _sampling_keys(sampling))
    factors = [(stored, values.float().numpy()) for stored, values in factor_tensors(spec)]
    for stored_name, values in factors:
        writer.add_tensor_info(stored_name, values.shape, values.dtype, values.nbytes)
    for stored in tensors:
        _declare(writer, stored, kinds[stored.name])
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, values in factors:
        writer.write_tensor_data(values)
    read = LogicalReader(source.checkpoint, source.shapes, source.stored_spec.norm_offset)
    for done, (stored, values) in enumerate(_values(tensors, read), 1):
        writer.write_tensor_data(_quantized(stored.name, values, kinds[stored.name]))
        report(done, len(tensors))
    writer.close()
    check_written(out, spec)


def _values(tensors: list[StoredTensor], read: LogicalReader) -> Iterator[tuple[StoredTensor, NDArray[np.float32]]]:
    for stored in tensors:
        yield stored, assemble(stored, read).numpy()


def _type_of(stored: StoredTensor, kind: str) -> GgmlType:
    """Return the type of a tensor: numbers that many others depend on keep more bits than most matrices."""
    small = len(stored.shape) == 1 or stored.key.endswith(("router", "positions"))
    if small or kind == "F32":
        return GgmlType.F32
    if kind in _FOUR_BITS and stored.key in ("embed", "head"):
        kind = "Q8_0"
    ggml_type = GgmlType[kind]
    return ggml_type if stored.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0] == 0 else GgmlType.F16


def _declare(writer: gguf.GGUFWriter, stored: StoredTensor, kind: GgmlType) -> None:
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // block * n_bytes)
    size = int(np.prod(shape, dtype=np.int64))
    if kind in (GgmlType.F32, GgmlType.F16):
        dtype = np.dtype(np.float32 if kind == GgmlType.F32 else np.float16)
        writer.add_tensor_info(stored.name, stored.shape, dtype, size)
    else:
        writer.add_tensor_info(stored.name, shape, np.dtype(np.uint8), size, raw_dtype=kind)


def _quantized(name: str, values: NDArray[np.float32], kind: GgmlType) -> NDArray[np.generic]:
    """Return the numbers as they are stored. Raises ModelError for numbers too large for the type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a cast that overflows is reported below
        stored: NDArray[np.generic] = gguf.quantize(np.ascontiguousarray(values), kind)
        finite = np.isfinite(gguf.dequantize(stored, kind)).all()
    if not finite:
        raise ModelError(f"{name}: holds {np.abs(values).max():g}, too large for {kind.name}; allowed: F32, BF16")
    return stored


def _sampling_keys(sampling: SamplingDefaults) -> dict[str, Value]:
    values = {key: getattr(sampling, name) for name, key in _SAMPLING.items()}
    return {f"general.sampling.{key}": value for key, value in values.items() if value is not None}


def _add(writer: gguf.GGUFWriter, values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int() if key == "general.sampling.top_k":
                writer.add_int32(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
