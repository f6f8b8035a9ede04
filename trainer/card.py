"""The model card and the loss curve, from the run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from trainer.config import ModelShape, Recipe

TEMPLATE = Path(__file__).with_name("card.md")


def draw_loss(log: Path, out: Path, smoothing: int = 25) -> None:
    """Draws training loss over tokens: each step, and its running mean over `smoothing` steps."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    tokens = [record["tokens"] / 1e6 for record in records]
    losses = [record["loss"] for record in records]
    smooth = [mean(losses[max(0, index - smoothing + 1) : index + 1]) for index in range(len(losses))]
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 3.6), dpi=130, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(tokens, losses, color="#c9d3df", linewidth=0.8, label="each step")
        axes.plot(tokens, smooth, color="#1f5fa8", linewidth=1.6, label=f"mean of {smoothing} steps")
        axes.set_xlabel("training tokens (millions)")
        axes.set_ylabel("loss (nats per token)")
        axes.set_ylim(min(smooth) * 0.8, min(max(losses), 6.5))
        axes.grid(axis="y", color="#e8ecf1")
        axes.legend(frameon=False)
        figure.savefig(out)


def mean(values: list[float]) -> float:
    """Arithmetic mean of a non-empty list."""
    return sum(values) / len(values)


def render_card(shape: ModelShape, recipe: Recipe, metrics: dict[str, Any]) -> str:
    """The model card as Markdown."""
    training = metrics["training"]
    values = {
        "parameters": f"{shape.n_parameters / 1e6:.2f} M",
        "layers": shape.n_layers,
        "hidden": shape.hidden_size,
        "heads": f"{shape.n_heads} query, {shape.n_kv_heads} key/value, {shape.head_dim} wide",
        "ffn": shape.ffn_size,
        "vocab": f"{shape.vocab_size:,}",
        "positions": f"{shape.max_positions:,}",
        "stages": ", ".join(f"{s.length:,} tokens from {s.start:.0%}" for s in recipe.stages),
        "mixture": mixture_text(recipe),
        "seed": recipe.seed,
        "batch": f"{recipe.batch_tokens:,}",
        "muon_lr": recipe.muon_lr,
        "adam_lr": recipe.adam_lr,
        "warmup": f"{recipe.warmup:.0%}",
        "decay": f"{recipe.decay:.0%}",
        "steps": f"{training['steps']:,}",
        "tokens": f"{training['tokens'] / 1e6:.1f} M",
        "minutes": f"{training['minutes']:.0f}",
        "rate": f"{training['tokens_per_second']:,}",
        "metrics": metrics_table(metrics),
        "samples": samples_section(metrics),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", str(value))
    return text


def mixture_text(recipe: Recipe) -> str:
    """Shares of the groups in the first stage and in the last."""
    shares = [recipe.shares_in(stage) for stage in (recipe.stages[0], recipe.stages[-1])]
    return ", ".join(f"{name} {shares[0][name]:.0%} at first and {shares[1][name]:.0%} later" for name in shares[0])


def metrics_table(metrics: dict[str, Any]) -> str:
    """Held-out scores, one row per group of documents."""
    rows = ["| held-out text | bits per byte | perplexity per token | tokens |", "|---|---|---|---|"]
    for name, score in metrics["held_out"].items():
        rows.append(f"| {name} | {score['bits_per_byte']:.3f} | {score['perplexity']:.2f} | {score['tokens']:,} |")
    return "\n".join(rows)


def samples_section(metrics: dict[str, Any]) -> str:
    """Greedy completions and answers, as they came out."""
    completions = [
        f"Prompt `{json.dumps(sample['prompt'])[1:-1]}`:\n\n{fenced(sample['prompt'] + sample['completion'])}"
        for sample in metrics["completions"]
    ]
    answers = [f"Question “{sample['prompt']}”:\n\n{fenced(sample['completion'])}" for sample in metrics["answers"]]
    return "\n\n".join(completions + answers)


def fenced(text: str) -> str:
    """`text` in a fence longer than any inside it."""
    return f"````text\n{text.rstrip()}\n````"
