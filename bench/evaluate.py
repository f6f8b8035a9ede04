"""Measures the loss of quality of a number format, through the served API.

    python -m bench.evaluate --model models/ryzanstein-tiny --dtype bfloat16 --against float32

It starts a stack per format, and scores the same held-out documents by the prompt logprobs of `/v1/completions`. So it
measures the numbers that a client gets, with the numerics of sharding, paging and sampling included.

    python -m bench.evaluate --model MODEL --format bf16,int8,int4-rtn,int4-gptq,int4-awq --kv-dtype int8 --work DIR

compares several formats with float32 in process, through the ranks of a worker. Checkpoints and scores stay in DIR, so
that a row costs its time once; `--fresh` scores again.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.evaluation.formats import DENSE, FORMATS, REFERENCE, Row, find_rows
from bench.evaluation.metrics import Comparison, Estimate, compare
from bench.evaluation.offline import Prompt, cut_prompts, score_offline
from bench.evaluation.report import render, replace_between
from bench.evaluation.served import TOP, ScoredDocument, score_all
from bench.evaluation.text import Document, read_documents
from services.worker.settings import WorkerSettings
from tests.stack import running_stack

BUNDLED = Path("models/ryzanstein-tiny")
_KV_TOKENS = 8_192  # KV cache of an engine that scores formats


class Dtype(StrEnum):
    """Values of `ryzanstein up --dtype`."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Setup:
    """One way to serve a checkpoint."""

    model: Path
    dtype: Dtype
    tensor_parallel: int


def start_token(model: Path) -> int:
    """The token id at the start of a document; raises BadParameter if config.json has none."""
    token_id = json.loads((model / "config.json").read_text())["bos_token_id"]
    if not isinstance(token_id, int):
        raise typer.BadParameter(
            f"{model}/config.json: bos_token_id is {token_id!r}, must be one token id", param_hint="--model"
        )
    return token_id


def score(setup: Setup, documents: Sequence[Document], concurrency: int) -> list[ScoredDocument]:
    """Start a stack, score all documents, stop it."""
    with tempfile.TemporaryDirectory(prefix="rz-") as folder:
        ranks = str(setup.tensor_parallel)
        args = ["--dtype", setup.dtype, "--tensor-parallel", ranks]
        with running_stack(Path(folder), *args, model=str(setup.model)) as stack:
            start = start_token(setup.model)
            return asyncio.run(score_all(stack.url, stack.model(), start, documents, concurrency))


def by_group(
    reference: Sequence[ScoredDocument], candidate: Sequence[ScoredDocument], seed: int
) -> dict[str, Comparison]:
    """Comparisons over all documents (`all`) and per group of documents."""
    groups = ["all", *sorted({scored.document.group for scored in reference})]
    measured = {}
    for group in groups:
        chosen = [i for i, scored in enumerate(reference) if group in ("all", scored.document.group)]
        measured[group] = compare([reference[i] for i in chosen], [candidate[i] for i in chosen], seed)
    return measured


def show(results: dict[str, Comparison], candidate: Setup, reference: Setup, console: Console) -> None:
    """Print a table with one column per group."""
    title = f"{candidate.model.name}, {candidate.dtype} against {reference.dtype}: value [95 % interval]"
    table = Table(title=title, caption=f"KL: over the {TOP} likeliest tokens and the rest as one bucket")
    table.add_column("")
    for group, result in results.items():
        table.add_column(f"{group}\n{result.documents} texts, {result.tokens:,} tokens", justify="right")
    rows = {
        f"perplexity, {reference.dtype}": ("reference_perplexity", "{:.3f}"),
        f"perplexity, {candidate.dtype}": ("perplexity", "{:.3f}"),
        "ratio of perplexities": ("perplexity_ratio", "{:.5f}"),
        f"bits per byte, {reference.dtype}": ("reference_bits_per_byte", "{:.4f}"),
        f"bits per byte, {candidate.dtype}": ("bits_per_byte", "{:.4f}"),
        "top-1 agreement": ("top1_agreement", "{:.2%}"),
        "mean KL, nats": ("kl_nats", "{:.2e}"),
    }
    for label, (name, pattern) in rows.items():
        table.add_row(label, *(_cell(getattr(result, name), pattern) for result in results.values()))
    console.print(table)


def _cell(estimate: Estimate, pattern: str) -> str:
    value = pattern.format(estimate.value)
    if estimate.interval is None:
        return f"{value}\n(one text: no interval)"
    low, high = (pattern.format(bound) for bound in estimate.interval)
    return f"{value}\n\\[{low}, {high}]"


def main(
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")] = BUNDLED,
    dtype: Annotated[Dtype, typer.Option(help="The format that is judged.")] = Dtype.BFLOAT16,
    against: Annotated[Dtype, typer.Option(help="The format of the reference.")] = Dtype.FLOAT32,
    reference_model: Annotated[Path | None, typer.Option(help="Default: --model; else for a converted one.")] = None,
    text: Annotated[Path, typer.Option(help="JSON lines of path, group, text.")] = BUNDLED / "heldout.jsonl",
    limit: Annotated[int, typer.Option(min=0, help="Only the first documents; 0: all.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Documents in flight.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON; of formats, into this page.")] = None,
    formats: Annotated[str, typer.Option("--format", help=f"Some of {', '.join(FORMATS)}; commas between.")] = "",
    kv_dtype: Annotated[str, typer.Option(help="KV formats to judge with weights in bf16; commas between.")] = "",
    stored: Annotated[Path | None, typer.Option(help="The checkpoint of the format `stored`, such as a GGUF.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Of formats: tokens of each document.")] = 256,
    work: Annotated[Path, typer.Option(help="Of formats: where checkpoints and scores stay.")] = Path("build/eval"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Of formats: do not use scores in --work.")] = False,
) -> None:
    """Judge --dtype by --against on held-out text, or several formats by float32."""
    documents = read_documents(text, limit)
    if formats or kv_dtype:
        scoring = Scoring(model, documents, window, work, seed, fresh)
        names = [[name for name in listed.split(",") if name] for listed in (formats, kv_dtype)]
        try:
            table = scoring.table(*names, stored)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        print(table)
        if out:
            replace_between(out, f"formats of {model.name}", table)
        return
    candidate = Setup(model, dtype, tensor_parallel)
    reference = Setup(reference_model or model, against, tensor_parallel)
    expected = score(reference, documents, concurrency)
    results = by_group(expected, score(candidate, documents, concurrency), seed)
    show(results, candidate, reference, Console(width=160))
    if out:
        out.write_text(json.dumps(_as_json(results, candidate, reference), indent=1))


@dataclass(frozen=True)
class Scoring:
    """Scores formats of one checkpoint in process."""

    model: Path
    documents: Sequence[Document]
    window: int
    work: Path
    seed: int
    fresh: bool

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The beginnings of the documents."""
        return cut_prompts(self.model, self.documents, start_token(self.model), self.window)

    def table(self, names: Sequence[str], kv_formats: Sequence[str], stored: Path | None) -> str:
        """Return the formats, each against float32, as a table. Raises ValueError."""
        self.work.mkdir(parents=True, exist_ok=True)
        held_out = {document.path for document in self.documents}
        rows = find_rows(names, kv_formats, self.model, stored, self.work, held_out)
        reference = self._score(Row(REFERENCE, self.model, DENSE[REFERENCE]))
        measured = [(row, compare(reference, self._score(row), self.seed)) for row in rows]
        return render(measured, self.model.name, self.window)

    def _score(self, row: Row) -> list[ScoredDocument]:
        """Return a row's scores: those in the folder, unless `fresh`."""
        listed = f"{row}, {self.window}, {[document.path for document in self.documents]}"
        file = self.work / f"{self.model.name}-{sha256(listed.encode()).hexdigest()[:16]}.scores"
        if file.exists() and not self.fresh:
            cached: list[ScoredDocument] = pickle.loads(file.read_bytes())
            return cached
        lengths = {"max_model_len": self.window + 16, "kv_tokens": _KV_TOKENS}
        formats = {"dtype": row.dtype, "kv_dtype": row.kv_format, "quantization": row.quantization}
        settings = WorkerSettings(model=str(row.model), **formats, **lengths)
        began = time.monotonic()
        scores = asyncio.run(score_offline(settings, self.prompts))
        print(f"{row.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        file.write_bytes(pickle.dumps(scores))
        return scores


def _as_json(results: dict[str, Comparison], candidate: Setup, reference: Setup) -> dict[str, object]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": candidate.model.name,
        "reference_model": reference.model.name,
        "dtype": candidate.dtype,
        "against": reference.dtype,
        "tensor_parallel": candidate.tensor_parallel,
        "groups": {group: asdict(result) for group, result in results.items()},
    }


if __name__ == "__main__":
    typer.run(main)
