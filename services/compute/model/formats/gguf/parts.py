"""Finds and joins the files of a GGUF model, which may be divided (`NAME-00001-of-00003.gguf`). Free of torch."""

from __future__ import annotations

from pathlib import Path

from services.common.gguf_files import parts_of
from services.compute.model.formats.gguf.container import GgufFile, TensorInfo, read_container
from services.compute.model.spec import ModelError


def files_of(file: Path) -> tuple[Path, ...]:
    """Return all files of the model that `file` belongs to, in order. Raises ModelError if one is missing."""
    try:
        names = parts_of(file.name)
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    files = tuple(file.parent / name for name in names)
    if missing := [other.name for other in files if not other.is_file()]:
        raise ModelError(f"{file}: {missing[0]} is missing next to it ({len(missing)} of {len(files)} files in all)")
    return files


def read_gguf(file: Path) -> GgufFile:
    """Read the headers of all files of the model that `file` belongs to. Raises ModelError."""
    files = files_of(file)
    parts = [read_container(part) for part in files]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        split = part.metadata.integer("split.no", 0), part.metadata.integer("split.count", 0) or 1
        if split != (number, len(parts)):
            problem = f"says that it is part {split[0] + 1} of {split[1]}, found as part {number + 1} of {len(parts)}"
            raise part.metadata.error("split.no", problem)
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{files[number]}: {twice[0]}: is also in {tensors[twice[0]].file.name}")
        tensors.update(part.tensors)
    metadata = parts[0].metadata
    if len(parts) > 1 and (wanted := metadata.integer("split.tensors.count")) != len(tensors):
        raise metadata.error("split.tensors.count", f"{wanted}, but all parts together hold {len(tensors)}")
    return GgufFile(metadata, tensors)
