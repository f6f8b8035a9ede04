"""Finds and joins the files of a GGUF model, which may be divided (`NAME-00001-of-00003.gguf`). Free of torch."""

from __future__ import annotations

import re
from pathlib import Path

from services.worker.model.formats.gguf.container import GgufFile, TensorInfo, read_container
from services.worker.model.spec import ModelError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHERS = ("mmproj", "imatrix")  # beginnings of the names of files that hold no language model


def parts_of(file: Path) -> tuple[Path, ...]:
    """Return all files of the model that `file` belongs to, in order. Raises ModelError if one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return (file,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ModelError(f"{file}: a part's number is from 1 to {count}")
    stored = {other.name for other in file.parent.iterdir()}
    names = [f"{match['name']}-{number:05}-of-{match['count']}{SUFFIX}" for number in range(1, count + 1)]
    if missing := [name for name in names if name not in stored]:
        raise ModelError(f"{file}: {missing[0]} is missing beside it ({len(missing)} of {count} parts in all)")
    return tuple(file.parent / name for name in names)


def read_gguf(file: Path) -> GgufFile:
    """Read the headers of all files of the model that `file` belongs to. Raises ModelError."""
    files = parts_of(file)
    parts = [read_container(part) for part in files]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        said = part.metadata.integer("split.no", 0), part.metadata.integer("split.count", 0) or 1
        if said != (number, len(parts)):
            problem = f"says that it is part {said[0] + 1} of {said[1]}, found as part {number + 1} of {len(parts)}"
            raise part.metadata.error("split.no", problem)
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{files[number]}: {twice[0]}: is in {tensors[twice[0]].file.name}, too")
        tensors.update(part.tensors)
    metadata = parts[0].metadata
    if len(parts) > 1 and (wanted := metadata.integer("split.tensors.count")) != len(tensors):
        raise metadata.error("split.tensors.count", f"{wanted}, but all parts together hold {len(tensors)}")
    return GgufFile(metadata, tensors)


def find_gguf(folder: Path, variant: str = "") -> Path | None:
    """Return the first file of the only model in `folder`, or of the one whose name ends with `variant`.

    None if there is no GGUF file. Raises ModelError if several models fit, or none of several.
    """
    models = sorted(file for file in folder.glob(f"*{SUFFIX}") if _is_first(file.name))
    if not models:
        return None
    fitting = [file for file in models if _fits(file.name, variant)]
    if len(fitting) == 1:
        return fitting[0]
    found = "no GGUF file fits" if not fitting else f"{len(fitting)} GGUF models fit"
    names = ", ".join(file.name for file in models)
    raise ModelError(f"{folder}: {found} {variant!r}; choose with MODEL:NAME, such as :Q4_K_M, among {names}")


def _is_first(name: str) -> bool:
    match = _PART.fullmatch(name)
    return not name.startswith(_OTHERS) and (match is None or int(match["number"]) == 1)


def _fits(name: str, variant: str) -> bool:
    """Whether a file is of a quantization, which ends its name: `model-Q4_K_M.gguf`, `model.q4_k_m.gguf`."""
    match = _PART.fullmatch(name)
    stem = (match["name"] if match else name.removesuffix(SUFFIX)).lower()
    asked = variant.lower()
    return stem.endswith(asked) and (len(stem) == len(asked) or not asked or not stem[-len(asked) - 1].isalnum())
