"""Writes the checkpoint of a base with an adapter merged into it; what appears under the asked name is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.compute.model.adapters.peft import PeftFolder
from services.compute.model.files import INDEX, read_header, read_json, weight_files
from services.compute.model.registry import Description, describe
from services.compute.model.spec import ModelError
from services.tools.merger.changes import Change, changed, changes
from services.tools.merger.experts import find_stacks

_EMBED, _HEAD = "embed", "head"
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
    plan = _plan(model, changes(peft, find_stacks(model, headers)), headers.keys(), peft)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy(base, partial, {file.name for file in files})
        with safe_open(peft.file, framework="pt") as tensors:
            read = lru_cache(maxsize=4)(tensors.get_tensor)  # of a layer's experts, which share factors
            for done, file in enumerate(files, 1):
                stored = load_file(file)
                if plan.head is not None and plan.head[0] in stored:
                    _untie(partial, plan.head[1], file.name)
                    embedding, head, change = plan.head
                    own = stored[embedding].clone()
                    stored[head] = own if change is None else changed(own, change, read, peft, head)
                for name in sorted(plan.changes.keys() & stored.keys()):
                    stored[name] = changed(stored[name], plan.changes[name], read, peft, name)
                save_file(stored, partial / file.name, metadata={"format": "pt"})
                report(done, len(files))
        partial.rename(out)
    except OSError as error:
        raise ModelError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(model: Description, found: Mapping[str, Change], stored: Collection[str], peft: PeftFolder) -> _Plan:
    refs, prefix = model.family.refs(model.spec), model.family.optional_prefix
    by_stored, missing = dict[str, Change](), dict[str, Change]()
    for name, change in found.items():
        place = next((one for one in (name, name.removeprefix(prefix)) if one in stored), None)
        if place is None:
            missing[name] = change
        else:
            by_stored[place] = change
    embedding = next((one for one in _names(refs[_EMBED].name, prefix) if one in stored), "")
    tied = refs[_HEAD] == refs[_EMBED] and "lm_head.weight" not in stored
    head = missing.pop("lm_head.weight", None) if tied else None
    if missing:
        raise ModelError(f"{peft.file}: the base has no tensor {next(iter(missing))} ({len(missing)} in all)")
    own = tied and (head is not None or embedding in by_stored)
    return _Plan(by_stored, (embedding, "lm_head.weight", head) if own else None)


def _names(name: str, prefix: str) -> tuple[str, str]:
    return name, name.removeprefix(prefix)


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
    if index:
        index["weight_map"][head] = file
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
