"""Names of GGUF files: which are one model, and which model a name such as `owner/name:Q4_K_M` chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

SUFFIX = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHERS = ("mmproj", "imatrix")  # beginnings of the names of files that hold no language model


def split_choice(model: str) -> tuple[str, str]:
    """Return a model and the choice after its last colon; "" if there is none."""
    before, _, choice = model.rpartition(":")
    if not before or "/" in choice or Path(model).expanduser().exists():
        return model, ""
    return before, choice


def local_path(model: str) -> Path | None:
    """The folder or GGUF file that a model's name stands for; None for a hub id. Raises ValueError for all else."""
    name, choice = split_choice(model)
    if not name.strip():
        raise ValueError(f"{model!r}: empty; allowed: a folder, a GGUF file, or a hub id like owner/name")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != SUFFIX or choice:
            raise ValueError(f"{model}: a file; allowed: a folder or a file of the form {SUFFIX}")
        return path
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "~", "/")) or path.suffix == SUFFIX:
        raise ValueError(f"{model}: no such folder or GGUF file, and not a hub id like owner/name")
    return None


def model_name(model: str) -> str:
    """Return the name of a folder, repository or file, without a file's ending."""
    name = Path(model).name
    match = _PART.fullmatch(name)
    return match["name"] if match else name.removesuffix(SUFFIX)


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of all files of a model, in order; `name` is one of them. Raises ValueError."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ValueError(f"{name}: a part's number is from 1 to {count}")
    return tuple(f"{match['name']}-{number:05}-of-{match['count']}{SUFFIX}" for number in range(1, count + 1))


def choose(names: Iterable[str], choice: str) -> str | None:
    """Return the name of the first file of the only model, or of the one whose name ends with `choice`.

    `names` may be paths, with "/". None without a choice if no name is that of a model. Raises ValueError if several
    models fit, or none does.
    """
    models = sorted(name for name in names if _begins_model(name))
    if not models and choice:
        raise ValueError(f":{choice} chooses among GGUF files, and there is none")
    if not models:
        return None
    fitting = [name for name in models if _fits(name, choice)]
    if len(fitting) == 1:
        return fitting[0]
    problem = f"no GGUF file fits {choice!r}" if not fitting else f"{len(fitting)} GGUF models fit {choice!r}"
    raise ValueError(f"{problem}; choose with MODEL:NAME, such as :Q4_K_M, among {', '.join(models)}")


def find_model(folder: Path, choice: str) -> Path | None:
    """Return the first file of the model that `choose` finds in a folder and its folders. Raises ValueError."""
    names = (str(file.relative_to(folder)) for depth in ("", "*/") for file in folder.glob(f"{depth}*{SUFFIX}"))
    name = choose(names, choice)
    return None if name is None else folder / name


def _begins_model(path: str) -> bool:
    name = PurePosixPath(path).name
    match = _PART.fullmatch(name)
    first = match is None or int(match["number"]) == 1
    return first and name.endswith(SUFFIX) and not name.startswith(_OTHERS)


def _fits(path: str, choice: str) -> bool:
    """Whether a file is of a quantization, which ends its name: `model-Q4_K_M.gguf`, `model.q4_k_m.gguf`."""
    stem, ending = model_name(path).lower(), choice.lower()
    return not ending or stem == ending or (stem.endswith(ending) and not stem[-len(ending) - 1].isalnum())
