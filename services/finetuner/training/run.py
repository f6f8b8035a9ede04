"""The training loop: it says what it does, writes checkpoints, and resumes from the last one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn import functional

from services.common.fine_tuning.records import Example, Order, Result
from services.finetuner.training.checkpoints import Checkpoints, save_adapter
from services.finetuner.training.examples import TokenizedExample
from services.finetuner.training.messages import Voice
from services.finetuner.training.plan import TrainingPlan, groups

_MOST_SERVED = 8192  # validation tokens whose loss the serving workers also compute
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """Limits of a training process."""

    device: torch.device
    checkpoint_s: float  # age of the last checkpoint after which another one is written
    max_tokens: int  # at once, padding included


class Training:
    """Trains one adapter."""

    def __init__(
        self, order: Order, folder: Path, model: PeftModel, train: Sequence[TokenizedExample],
        valid: Sequence[TokenizedExample], limits: TrainingLimits, voice: Voice,
    ) -> None:  # fmt: skip
        self._order, self._folder, self._model, self._voice = order, folder, model, voice
        self._train, self._valid, self._limits = train, valid, limits
        self._plan = TrainingPlan.of(order, len(train))
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=self._plan.learning_rate, weight_decay=0.0)
        self._checkpoints = Checkpoints(folder)
        self._tokens, self._loss, self._valid_loss = 0, 0.0, float("nan")
        self._saved_at = time.monotonic()

    def run(self, stop: threading.Event) -> bool:
        """Train to the end, or until `stop`: then a checkpoint is written. Returns whether it came to the end."""
        plan, first = self._plan, self._resume()
        self._begin(first)
        began, before = time.monotonic(), self._tokens
        for step in range(first, plan.steps):
            self._loss = self._step(step)
            pace = (time.monotonic() - began) / (step + 1 - first)
            speed = (self._tokens - before) / (time.monotonic() - began)
            self._voice.say(
                "step", step=step + 1, of=plan.steps, train_loss=self._loss, tokens=self._tokens,
                tokens_per_s=round(speed, 1), left_s=round(pace * (plan.steps - step - 1), 1),
            )  # fmt: skip
            if plan.ends_epoch(step):
                self._validate(step + 1)
            due = time.monotonic() - self._saved_at > self._limits.checkpoint_s
            if plan.ends_epoch(step) or due or stop.is_set():
                self._save(step + 1)
            if stop.is_set() and step + 1 < plan.steps:
                return False
        self._finish()
        return True

    def _resume(self) -> int:
        """Read the last checkpoint's state; returns the first step to compute."""
        last = self._checkpoints.last()
        if last is None:
            return 0
        state = last.state()
        self._optimizer.load_state_dict(state["optimizer"])
        self._tokens, self._loss, self._valid_loss = state["tokens"], state["loss"], state["valid_loss"]
        return last.step

    def _begin(self, first: int) -> None:
        plan, trained = self._plan, sum(weight.numel() for weight in self._weights)
        goes_on = f" It goes on after step {first}." if first else ""
        message = (
            f"Training {trained} parameters on {plan.n_examples} examples for {plan.n_epochs} epochs of "
            f"{plan.steps_per_epoch} steps: batches of {plan.batch_size}, learning rate "
            f"{plan.learning_rate:g}.{goes_on}"
        )
        self._voice.say("begins", steps=plan.steps, message=message)
        if first == 0:
            self._validate(0)

    def _step(self, step: int) -> float:
        """Compute one step; returns the mean loss of its trained tokens."""
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._plan.rate(step)
        batch = [self._train[index] for index in self._plan.batch(step)]
        count, total = sum(len(example.targets) for example in batch), 0.0
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        for group in groups([len(example.tokens) for example in batch], self._limits.max_tokens):
            loss = self._loss_of([batch[index] for index in group]) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._weights, _CLIP)
        self._optimizer.step()
        self._tokens += count
        return total

    def _loss_of(self, examples: Sequence[TokenizedExample]) -> torch.Tensor:
        """The summed loss of the trained tokens, in float32. Logits are computed where a trained token follows only."""
        longest = max(len(example.tokens) for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, example in enumerate(examples):
            tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask[row, : len(example.tokens)] = 1
        targets = [(row, at) for row, example in enumerate(examples) for at in example.targets]
        wanted = sorted({at - 1 for _, at in targets})
        column = {position: index for index, position in enumerate(wanted)}
        device = self._limits.device
        # One example needs no mask: every token sees all before it, and attention is faster without.
        seen = mask.to(device) if len(examples) > 1 else None
        positions = torch.tensor(wanted, device=device)
        logits = self._model(tokens.to(device), attention_mask=seen, logits_to_keep=positions, use_cache=False).logits
        rows = torch.tensor([row for row, _ in targets], device=device)
        places = torch.tensor([column[at - 1] for _, at in targets], device=device)
        expected = torch.stack([tokens[row, at] for row, at in targets]).to(device)
        return functional.cross_entropy(logits[rows, places].float(), expected, reduction="sum")

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        if not self._valid:
            return
        self._model.eval()
        total, lengths = 0.0, [len(example.tokens) for example in self._valid]
        for group in groups(lengths, self._limits.max_tokens):
            total += float(self._loss_of([self._valid[index] for index in group]))
        self._valid_loss = total / sum(len(example.targets) for example in self._valid)
        self._voice.say("validated", step=step, of=self._plan.steps, valid_loss=self._valid_loss)

    def _save(self, step: int) -> None:
        state = {
            "optimizer": self._optimizer.state_dict(), "tokens": self._tokens, "loss": self._loss,
            "valid_loss": self._valid_loss,
        }  # fmt: skip
        folder = self._checkpoints.save(self._model, step, state)
        self._saved_at = time.monotonic()
        self._voice.say("saved", step=step, folder=str(folder), metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        valid = {"valid_loss": self._valid_loss} if self._valid else {}
        return {"train_loss": self._loss, **valid}

    def _finish(self) -> None:
        """Put the adapter next to those of other jobs, whole or not at all."""
        adapter = self._folder.parent.parent / "adapters" / self._order.id
        unfinished = adapter.with_name(f".{adapter.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        save_adapter(self._model, unfinished)
        shutil.rmtree(adapter, ignore_errors=True)
        unfinished.rename(adapter)
        result = Result(
            folder=str(adapter),
            train_loss=self._loss,
            valid_loss=self._valid_loss if self._valid else None,
            examples=self._served(),
        )
        self._voice.say("done", **result.model_dump())

    def _served(self) -> list[Example]:
        """The first validation examples."""
        served, room = [], _MOST_SERVED
        for one in self._valid:
            room -= len(one.tokens)
            if room < 0:
                break
            served.append(Example(tokens=list(one.tokens), trained=list(one.trained)))
        return served
