"""Measures the loss of quality of a number format, through the served API.

    python -m bench.evaluate --model models/ryzanstein-tiny --dtype bfloat16 --against float32

It starts a stack per format, and scores the same held-out documents by the prompt logprobs of `/v1/completions`. So it
measures the numbers that a client gets, with the numerics of sharding, paging and sampling included.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.evaluation.metrics import Comparison, Estimate, compare
from bench.evaluation.served import TOP, ScoredDocument, score_all
from bench.evaluation.text import Document, read_documents
from tests.stack import running_stack

BUNDLED = Path("models/ryzanstein-tiny")


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
    found = json.loads((model / "config.json").read_text())["bos_token_id"]
    if not isinstance(found, int):
        raise typer.BadParameter(
            f"{model}/config.json: bos_token_id is {found!r}, must be one token id", param_hint="--model"
        )
    return found


def score(setup: Setup, documents: Sequence[Document], concurrency: int) -> list[ScoredDocument]:
    """Start a stack, score all documents, stop it."""
    with tempfile.TemporaryDirectory(prefix="rz-") as folder:
        ranks = str(setup.tensor_parallel)
        args = ["--model", str(setup.model), "--dtype", setup.dtype, "--tensor-parallel", ranks]
        with running_stack(Path(folder), *args) as stack:
            start = start_token(setup.model)
            return asyncio.run(score_all(stack.url, stack.model(), start, documents, concurrency))


def by_group(
    reference: Sequence[ScoredDocument], candidate: Sequence[ScoredDocument], seed: int
) -> dict[str, Comparison]:
    """Comparisons over all documents (`all`) and per group of documents."""
    groups = ["all", *sorted({scored.document.group for scored in reference})]
    found = {}
    for group in groups:
        chosen = [i for i, scored in enumerate(reference) if group in ("all", scored.document.group)]
        found[group] = compare([reference[i] for i in chosen], [candidate[i] for i in chosen], seed)
    return found


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
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Judge --dtype by --against on held-out text."""
    documents = read_documents(text, limit)
    candidate = Setup(model, dtype, tensor_parallel)
    reference = Setup(reference_model or model, against, tensor_parallel)
    expected = score(reference, documents, concurrency)
    results = by_group(expected, score(candidate, documents, concurrency), seed)
    show(results, candidate, reference, Console(width=160))
    if out:
        out.write_text(json.dumps(_as_json(results, candidate, reference), indent=1))


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
