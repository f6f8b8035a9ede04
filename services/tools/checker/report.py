"""Checks a checkpoint as a worker does before it reads weights, and continues where the worker would end."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.common.lifecycle import StartupError
from services.compute.backends.sizing import host_room
from services.compute.model.build import open_checkpoint
from services.compute.model.families.config import Config
from services.compute.model.footprint import footprint
from services.compute.model.loading.folder import ModelFolder, open_folder
from services.compute.model.registry import FAMILIES
from services.compute.model.spec import ModelError, ModelSpec
from services.compute.ranks.memory import in_mib
from services.tools.checker.small_files import find_files
from services.worker.native.startup import group_config, require_room
from services.worker.settings import WorkerSettings

_SMALLER = ("int8", "int4")  # formats to round weights to, so that they fit


@dataclass(frozen=True, slots=True)
class RankReport:
    """A model on one number of ranks. Bytes are those of one rank."""

    ranks: int
    weights_bytes: int = 0
    kv_bytes_per_1000_tokens: int = 0  # 0: there is no KV cache
    state_bytes: int = 0  # a request's state, in addition to its KV; 0: the model keeps no states
    total_bytes: int = 0  # all ranks and the server, with a worker's default KV cache
    problem: str = ""  # why it cannot be served so; empty: it can


@dataclass(frozen=True, slots=True)
class Report:
    """Facts about a model that are known before its weights are read."""

    model: str
    architecture: str = ""
    does: str = ""  # generates, embeds, classifies
    dtype: str = ""  # dtype of the computation
    max_model_len: int = 0
    problems: tuple[str, ...] = ()  # why it cannot be served at all, in a worker's words
    ranks: tuple[RankReport, ...] = ()
    nearest: tuple[str, ...] = field(default=())  # settings that would work

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON's types."""
        served = not self.problems and all(not rank_report.problem for rank_report in self.ranks)
        return {"servable": served, **asdict(self)}


def check(model: str, ranks: Sequence[int], device: str) -> Report:
    """Check a folder, a GGUF file or a hub id, of which only the small files are fetched. Reads no weights."""
    try:
        path, whole = find_files(model)
    except ModelError as error:
        return Report(model, problems=(str(error),))
    files = open_folder(path, whole=whole)
    if files.problems:
        return Report(model, problems=files.problems, nearest=_other_architectures(path))
    settings = WorkerSettings.model_validate({"model": model, "device": device})
    try:
        config = group_config(settings, files)
        if whole:
            with open_checkpoint(files.description, getattr(torch, config.dtype)):
                pass  # names, shapes and counts of all tensors agree with the configuration
    except (StartupError, ModelError) as error:
        return Report(model, files.architecture, problems=(str(error),))
    rank_reports = tuple(_on_ranks(settings, files, count) for count in ranks)
    return Report(
        model,
        files.architecture,
        _does(files.spec),
        config.dtype,
        config.max_model_len,
        ranks=rank_reports,
        nearest=tuple(_nearest(settings, files, one) for one in rank_reports if one.problem),
    )


def _does(spec: ModelSpec) -> str:
    if spec.classifier is not None:
        return f"classifies with {len(spec.classifier.labels)} labels"
    return "generates and embeds" if spec.generates else "embeds"


def _on_ranks(settings: WorkerSettings, files: ModelFolder, count: int) -> RankReport:
    try:
        config = group_config(settings.model_copy(update={"tensor_parallel": count}), files)
    except StartupError as error:
        return RankReport(count, problem=str(error))
    memory, problem = footprint(files.spec, config), ""
    try:
        require_room(settings, files.spec, config, host_room())
    except StartupError as error:
        problem = str(error)
    total = memory.of_worker(config.kv_tokens or 0).total
    state = memory.fixed.states // config.state_rows if config.state_rows else 0
    return RankReport(count, memory.fixed.weights + memory.fixed.images, 1000 * memory.kv_token, state, total, problem)


def _nearest(settings: WorkerSettings, files: ModelFolder, rank_report: RankReport) -> str:
    """Return the nearest thing that works instead of `rank_report`; "" for nothing."""
    fitting = [count for count in files.spec.rank_counts() if count <= rank_report.ranks]
    if rank_report.ranks not in fitting:
        return f"--tensor-parallel {fitting[-1]}"
    for kind in _SMALLER:
        smaller = settings.model_copy(update={"tensor_parallel": rank_report.ranks, "quantization": kind})
        try:
            require_room(smaller, files.spec, group_config(smaller, files), host_room())
        except StartupError:
            continue
        return f"--quantization {kind}"
    return "a machine with more memory"


def _other_architectures(path: Path) -> tuple[str, ...]:
    """Return the architectures whose names are most like that of an unknown one."""
    try:
        named = Config.load(path).raw("architectures")
    except ModelError:
        return ()
    name = str(named[0]) if isinstance(named, list) and named else ""
    return () if name in FAMILIES else tuple(difflib.get_close_matches(name, FAMILIES, n=1))


def report_text(report: Report) -> str:
    """Return a report for people."""
    if report.problems:
        lines = [f"{report.model}: cannot be served", *(f"- {problem}" for problem in report.problems)]
        return "\n".join([*lines, *(f"nearest: {nearest}" for nearest in report.nearest)])
    lines = [f"{report.model}: {report.architecture}, {report.does}"]
    lines.append(f"computed in {report.dtype}; the longest sequence has {report.max_model_len:,} tokens")
    for rank_report in report.ranks:
        ranks = "1 rank" if rank_report.ranks == 1 else f"{rank_report.ranks} ranks"
        if rank_report.problem:
            lines.append(f"{ranks}: cannot be served: {rank_report.problem}")
            continue
        kv = rank_report.kv_bytes_per_1000_tokens
        cache = f"{kv / (1 << 20):,.2f} MiB for 1,000 tokens of KV" if kv else "no KV cache"
        if state := rank_report.state_bytes:
            cache += f", {state / (1 << 20):,.2f} MiB for a request's state"
        each = "" if rank_report.ranks == 1 else " on each"
        lines.append(
            f"{ranks}: can be served: {in_mib(rank_report.weights_bytes)} MiB of weights and {cache}{each}; "
            f"{in_mib(rank_report.total_bytes)} MiB in all"
        )
    return "\n".join([*lines, *(f"nearest: {nearest}" for nearest in report.nearest)])
