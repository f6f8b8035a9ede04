"""Writes a checkpoint as a folder of safetensors with the other files that transformers and gateways read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from services.compute.model.files import INDEX
from services.compute.model.formats.gguf.hub_files import HubFiles
from services.compute.model.spec import ModelError, ModelSpec
from services.tools.converter.assembly import LogicalReader, StoredTensor, assemble, is_norm, plan
from services.tools.converter.description import write_description, write_json
from services.tools.converter.source import Source
from services.tools.tensor_file import write_tensors

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # in config.json
Report = Callable[[int, int], None]


def write_folder(source: Source, hub: HubFiles, out: Path, kind: str, shard_bytes: int, report: Report) -> None:
    """Write `source` into the empty folder `out` in files of about `shard_bytes`. Raises ModelError."""
    family, spec = source.hub_family, source.hub_spec
    read = LogicalReader(source.checkpoint, source.shapes, source.stored_spec.norm_offset)
    tensors = plan(family.refs(spec), source.shapes)
    shards = _divide(tensors, DTYPES[kind].itemsize, shard_bytes)
    places: dict[str, str] = {}
    total = done = 0
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        held: dict[str, Tensor] = {}
        for stored in shard:
            held[stored.name] = _converted(stored, _with_offset(read, spec), kind)
            done += 1
            report(done, len(tensors))
        write_tensors(held, out / name)
        total += sum(tensor.nbytes for tensor in held.values())
        places |= dict.fromkeys(held, name)
    if len(shards) > 1:
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    write_description({**source.config, "dtype": _NAMES[kind]}, family, hub, out)


def _with_offset(read: LogicalReader, spec: ModelSpec) -> Callable[[str], Tensor]:
    """Return norms as the family stores them."""

    def one(key: str) -> Tensor:
        tensor = read(key)
        return tensor - spec.norm_offset if is_norm(key) else tensor

    return one


def _converted(stored: StoredTensor, read: Callable[[str], Tensor], kind: str) -> Tensor:
    """Return a tensor in the type `kind`; a vector that would lose digits stays in F32. Raises ModelError."""
    whole = assemble(stored, read)
    converted = whole.to(DTYPES[kind])
    if whole.dim() == 1:
        return converted if torch.equal(converted.float(), whole) else whole
    if not converted.isfinite().all():
        raise ModelError(f"{stored.name}: holds {whole.abs().max():g}, too large for {kind}; allowed: F32, BF16")
    return converted


def _divide(tensors: list[StoredTensor], itemsize: int, shard_bytes: int) -> list[list[StoredTensor]]:
    """Return the tensors of each file; a file has at least one."""
    shards: list[list[StoredTensor]] = [[]]
    left = shard_bytes
    for stored in tensors:
        size = torch.Size(stored.shape).numel() * itemsize
        if shards[-1] and size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(stored)
        left -= size
    return shards
