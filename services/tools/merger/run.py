"""Writes the checkpoint of a base with an adapter merged into it; what appears under the asked name is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from services.compute.model.adapters.peft import PeftFolder
from services.compute.model.files import INDEX, read_header, read_json, weight_files
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from services.tools.merger.changes import Change, changed, changes
from services.tools.merger.experts import find_stacks
from services.tools.merger.names import OWN_HEAD, BaseNames
from services.tools.tensor_file import write_tensors

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Changes by the stored names of the base's tensors, and a head that must become a tensor of its own."""

    changes: Mapping[str, Change]
    head: tuple[str, str, Change | None] | None = None  # stored name of the embedding, name of the head, its change


@torch.inference_mode()
def merge(base: Path, adapter: Path, out: Path, report: Report) -> None:
    """Merge; calls `report` with the files written and their number. Raises ModelError."""
    if out.exists():
        raise ModelError(f"{out}: exists already")
    if base.is_file():
        raise ModelError(f"{base}: a GGUF file; `ryzanstein convert` makes a folder of it")
    model, peft = describe(base), PeftFolder.open(adapter)
    if model.spec.quantization:
        raise ModelError(f"{base}: quantized; merge into the checkpoint that it was made from, then quantize")
    files = weight_files(base).files
    headers = {name: entry for file in files for name, entry in read_header(file).items()}
    names = BaseNames(model, headers)
    stacks = find_stacks(model, {names.named(name): entry for name, entry in headers.items()})
    plan = _plan(changes(peft, stacks, names), names, peft)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy(base, partial, {file.name for file in files})
        with safe_open(peft.file, framework="pt") as tensors:
            read = lru_cache(maxsize=4)(tensors.get_tensor)  # tensors of a layer's experts, which share factors
            for done, file in enumerate(files, 1):
                stored = load_file(file)
                if plan.head is not None and plan.head[0] in stored:
                    _untie(partial, plan.head[1], file.name)
                    embedding, head, change = plan.head
                    own = stored[embedding].clone()
                    stored[head] = own if change is None else changed(own, change, read, peft, head)
                for name in sorted(plan.changes.keys() & stored.keys()):
                    stored[name] = changed(stored[name], plan.changes[name], read, peft, name)
                write_tensors(stored, partial / file.name)
                report(done, len(files))
        partial.rename(out)
    except OSError as error:
        raise ModelError(f"{error.filename or out}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ModelError(f"{base} or {adapter}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(changes: Mapping[str, Change], names: BaseNames, peft: PeftFolder) -> _Plan:
    places = {name: names.place(name) for name in changes}
    embedding, head = names.head()
    change = changes.get(OWN_HEAD) if head else None
    missing = [name for name, place in places.items() if not place and not (head and name == OWN_HEAD)]
    if missing:
        raise ModelError(f"{peft.file}: the base has no tensor {missing[0]} ({len(missing)} in all)")
    by_stored = {place: changes[name] for name, place in places.items() if place}
    follows = bool(peft.config.get("ensure_weight_tying"))  # without a change of its own, the head has the embedding's
    own = head and (change is not None or (embedding in by_stored and not follows))
    return _Plan(by_stored, (embedding, head, change) if own else None)


def _copy(base: Path, to: Path, but: set[str]) -> None:
    """Copy a folder's files except `but`."""
    to.mkdir(parents=True)
    for file in base.iterdir():
        if file.is_file() and file.name not in but:
            shutil.copyfile(file, to / file.name)


def _untie(folder: Path, head: str, file: str) -> None:
    """Say that the head is a tensor of its own, in `file`."""
    config = read_json(folder / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = read_json(folder / INDEX)
    if index and file in index["weight_map"].values():
        index["weight_map"][head] = file
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
