"""Command line of the trainer: `python -m trainer train` and `... evaluate`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainer.card import draw_loss, metrics_table, render_card
from trainer.config import ModelShape, Recipe, RunPaths
from trainer.evaluate import (
    CONTEXT,
    PROMPTS,
    QUESTIONS,
    STRIDE,
    ask,
    complete,
    load_model,
    read_held_out,
    score_documents,
    summarise_log,
)
from trainer.export import export_model
from trainer.prepare import prepare
from trainer.train import Machine, Saving, Trainer
from trainer.train import Progress as StepProgress

app = typer.Typer(no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder of the model.")]


@app.callback()
def trainer() -> None:
    """Makes the bundled model from scratch, and measures it."""


@app.command()
def train(
    out: Out = Path("models/ryzanstein-tiny"),
    steps: Annotated[int, typer.Option(min=1, help="Steps at most.")] = Recipe.steps,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training at most.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of split, weights and batches.")] = Recipe.seed,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--eager", help="Fuse operators; needs gcc.")] = False,
) -> None:
    """Trains the model, or goes on from its checkpoint, and exports it at every checkpoint."""
    if threads is not None:
        torch.set_num_threads(threads)
    paths, shape = RunPaths(out), ModelShape()
    recipe = replace(Recipe(), steps=steps, minutes=minutes, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    prepared = prepare(out, paths.training, shape.vocab_size, shape.max_positions, seed)
    machine = Machine(choose_device(device), compiled=compiled)
    run = Trainer(shape, recipe, prepared.dataset, machine, Saving(paths.checkpoint, paths.log))

    def export() -> None:
        export_model(dict(run.model.named_parameters()), shape, prepared.tokenizer, out)

    with progress_bar() as bar:
        task = bar.add_task("training", total=1.0, loss="-", rate="-", context="-")

        def show(step: StepProgress) -> None:
            bar.update(
                task,
                completed=step.fraction,
                loss=f"{step.loss:.3f}",
                rate=f"{step.rate:.0f}",
                context=str(step.context),
            )

        run.run(show, export)


@app.command()
def evaluate(
    out: Out = Path("models/ryzanstein-tiny"),
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all.")] = None,
) -> None:
    """Measures the exported model on held-out text; writes metrics.json, and the card and loss curve of a run."""
    if threads is not None:
        torch.set_num_threads(threads)
    paths = RunPaths(out)
    model, tokenizer = load_model(out)
    scores = score_documents(model, tokenizer, read_held_out(out / "heldout.jsonl"))
    metrics: dict[str, Any] = {
        "parameters": model.shape.n_parameters,
        "context": {"window": CONTEXT, "stride": STRIDE},
        "held_out": {name: score.to_json() for name, score in scores.items()},
        "completions": [asdict(complete(model, tokenizer, prompt)) for prompt in PROMPTS],
        "answers": [asdict(ask(model, tokenizer, question)) for question in QUESTIONS],
    }
    if paths.log.exists():
        metrics["training"] = summarise_log(paths.log)
        draw_loss(paths.log, out / "loss.png")
        card = render_card(model.shape, Recipe(), metrics)
        (out / "README.md").write_text(card, encoding="utf-8")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    typer.echo(metrics_table(metrics))


def progress_bar() -> Progress:
    """A bar with loss, tokens per second and the current context."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tok/s  context {task.fields[context]}"),
        TimeElapsedColumn(),
    )


def choose_device(name: str) -> torch.device:
    """The device `name` stands for; `auto` takes a GPU when there is one.

    Raises `typer.BadParameter` for other names, and for `cuda` on a machine without it.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"device must be auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device is cuda, but this machine has no usable CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


if __name__ == "__main__":
    app()
