"""The training loop: batches in, a decaying learning rate, checkpoints out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint import Position, load_checkpoint, save_checkpoint
from trainer.config import ModelShape, Recipe, Stage
from trainer.dataset import Dataset
from trainer.model import Llama, initialise
from trainer.optim import build_optimisers, learning_rate_scale


@dataclass(frozen=True)
class Progress:
    """What one step reports. `loss` is in nats per token; `rate` in tokens per second."""

    step: int
    fraction: float
    loss: float
    tokens: int
    seconds: float
    rate: float
    context: int


@dataclass(frozen=True)
class Machine:
    """Where and how the arithmetic runs."""

    device: torch.device
    compiled: bool = False
    # bf16 products accumulate in fp32 on the matrix units; master weights and the optimiser stay fp32.
    mixed_precision: bool = True
    # Rows are added up to a batch this many tokens at a time; larger pieces spill out of the caches.
    micro_tokens: int = 8_192


@dataclass(frozen=True)
class Saving:
    """Where and how often, in steps, a run saves."""

    checkpoint: Path
    log: Path
    every: int = 100


class Trainer:
    """One run over one dataset: resumes by itself when a checkpoint exists."""

    def __init__(self, shape: ModelShape, recipe: Recipe, dataset: Dataset, machine: Machine, saving: Saving) -> None:
        self.recipe, self.dataset, self.machine, self.saving = recipe, dataset, machine, saving
        torch.manual_seed(recipe.seed)
        self.model = Llama(shape)
        initialise(self.model, recipe.seed)
        self.model.to(machine.device)
        self.optimisers = build_optimisers(self.model, recipe)
        self.position = Position()
        if saving.checkpoint.exists():
            self.position = load_checkpoint(saving.checkpoint, self.model, self.optimisers)
        cut_log(saving.log, self.position.step)
        self._loss: Callable[[Tensor], Tensor] = self.model.loss
        if machine.compiled:
            self._loss = torch.compile(self.model.loss, dynamic=False)

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0..1: by steps, or by time if the deadline is nearer."""
        by_steps = self.position.step / self.recipe.steps
        if self.recipe.minutes is None:
            return min(1.0, by_steps)
        return min(1.0, max(by_steps, self.position.seconds / 60 / self.recipe.minutes))

    def run(self, on_step: Callable[[Progress], None], on_save: Callable[[], None], stop_at: int | None = None) -> None:
        """Trains to the end of the recipe, or to step `stop_at`; calls back after each step and each save."""
        while self.fraction < 1.0 and (stop_at is None or self.position.step < stop_at):
            progress = self._advance()
            on_step(progress)
            if progress.step % self.saving.every == 0:
                self._save(on_save)
        self._save(on_save)

    def _advance(self) -> Progress:
        began = time.monotonic()
        stage = self.recipe.stage_at(self.fraction)
        loss = self._step(stage)
        seconds = time.monotonic() - began
        n_tokens = max(1, self.recipe.batch_tokens // stage.length) * stage.length
        at = self.position
        self.position = Position(at.step + 1, at.seconds + seconds, at.tokens + n_tokens)
        progress = Progress(
            step=self.position.step,
            fraction=self.fraction,
            loss=loss,
            tokens=self.position.tokens,
            seconds=self.position.seconds,
            rate=n_tokens / seconds,
            context=stage.length,
        )
        self._log(progress)
        return progress

    def _step(self, stage: Stage) -> float:
        """One optimiser step on a batch of `stage`; gives the batch's mean loss."""
        recipe, context = self.recipe, stage.length
        rows = max(1, recipe.batch_tokens // context)
        shares = recipe.shares_in(stage)
        batch = self.dataset.batch(recipe.seed, self.position.step, shares, rows, context)
        pieces = torch.split(batch.to(self.machine.device), max(1, self.machine.micro_tokens // context))
        total = 0.0
        for piece in pieces:  # [micro_rows, context + 1]
            with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.machine.mixed_precision):
                loss = self._loss(piece) * (len(piece) / rows)
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.grad_clip)
        scale = learning_rate_scale(self.fraction, recipe.warmup, recipe.decay)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return total

    def _save(self, on_save: Callable[[], None]) -> None:
        save_checkpoint(self.saving.checkpoint, self.model, self.optimisers, self.position)
        on_save()

    def _log(self, progress: Progress) -> None:
        self.saving.log.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "step": progress.step,
            "loss": round(progress.loss, 5),
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 3),
            "context": progress.context,
        }
        with self.saving.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")


def cut_log(log: Path, step: int) -> None:
    """Drops what was logged after `step`: a run that died between checkpoints does those steps again."""
    if not log.exists():
        return
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")
