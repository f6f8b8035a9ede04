"""Training on the tiny model: what is trained, and that a resumed job is the job that was not interrupted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.cli.stack.default_model import TINY_MODEL
from services.common.fine_tuning.records import Order
from services.compute.model.adapters.served import read_adapter
from services.compute.model.registry import describe
from services.finetuner.training.checkpoints import Checkpoints
from services.finetuner.training.examples import Tokenizer
from services.finetuner.training.messages import RefusedError, Voice
from services.finetuner.training.model import load_model
from services.finetuner.training.plan import TrainingPlan, groups
from services.finetuner.training.run import Training, TrainingLimits
from tests.unit.compute.model.zoo import VARIANTS, write_checkpoint

ORDER = Order(
    id="ftjob-1", tenant="", model="tiny", training_file="a", validation_file=None, suffix=None, seed=7, n_epochs=2,
    batch_size=4, learning_rate_multiplier=10.0, lora_rank=4, quantization="none", metadata=None, credential="",
    created_at=0,
)  # fmt: skip
LIMITS = TrainingLimits(torch.device("cpu"), 3600.0, 2048)


class Heard(Voice):
    """Keeps what a training says, and stops it after a step."""

    def __init__(self, stop: threading.Event, after: int = 0) -> None:
        self.stop, self.after = stop, after
        self.words: list[tuple[str, dict[str, Any]]] = []

    def say(self, kind: str, **fields: Any) -> None:
        self.words.append((kind, fields))
        if kind == "step" and fields["step"] == self.after:
            self.stop.set()

    @property
    def losses(self) -> list[float]:
        return [fields["train_loss"] for kind, fields in self.words if kind == "step"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(TINY_MODEL), 2048)


def _train(folder: Path, tokenizer: Tokenizer, *, after: int = 0) -> Heard:
    examples = [
        example
        for number in range(10)
        for example in tokenizer.examples(
            {"messages": [{"role": "user", "content": "a" * number}, {"role": "assistant", "content": f"b {number}"}]}
        )
    ]
    stop = threading.Event()
    heard, last = Heard(stop, after), Checkpoints(folder).last()
    model = load_model(TINY_MODEL, ORDER, LIMITS.device, last and last.folder)
    Training(ORDER, folder, model, examples, examples[:2], LIMITS, heard).run(stop)
    return heard


def test_a_resumed_job_has_the_losses_of_an_uninterrupted_job(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = _train(tmp_path / "a" / "jobs" / "1", tokenizer)
    begun = _train(tmp_path / "b" / "jobs" / "1", tokenizer, after=2)
    assert [kind for kind, _ in begun.words][-2:] == ["step", "saved"]
    resumed = _train(tmp_path / "b" / "jobs" / "1", tokenizer)
    assert len(whole.losses) == TrainingPlan.of(ORDER, 10).steps == 6
    assert begun.losses + resumed.losses == whole.losses
    assert whole.losses[-1] < whole.losses[0]
    written = [(tmp_path / one / "adapters" / "ftjob-1" / "adapter_model.safetensors").read_bytes() for one in "ab"]
    assert written[0] == written[1]


@pytest.mark.parametrize("variant", ["lfm2", "mamba2", "qwen3_5"])
def test_adapter_of_a_model_with_states_fits_its_base(variant: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "adapter"
    write_checkpoint(VARIANTS[variant](), base)
    load_model(base, ORDER, LIMITS.device, None).save_pretrained(str(out))
    changed = {target.key.rpartition(".")[2] for target in read_adapter(out, describe(base), 4).targets}
    assert changed & {"conv_x", "ssm_x", "delta_q"}


def test_only_the_assistants_turns_are_trained(tokenizer: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four", "weight": 0},
        {"role": "user", "content": "five"},
        {"role": "assistant", "content": "six"},
    ]
    (example,) = tokenizer.examples({"messages": turns})
    plain = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert plain.decode([example.tokens[at] for at in example.targets]) == "two<|end|>six<|end|>"
    with pytest.raises(RefusedError, match="renders no tools"):
        list(tokenizer.examples({"messages": turns, "tools": [{"type": "function"}]}))


def test_lines_that_are_too_long_are_named(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y " * n}]} for n in (1, 50)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RefusedError, match=r"training file: line 2: \d+ tokens; at most 32"):
        Tokenizer(AutoTokenizer.from_pretrained(TINY_MODEL), 32).read(path)


def test_every_epoch_takes_every_example_once_and_groups_fit() -> None:
    plan = TrainingPlan.of(ORDER.model_copy(update={"n_epochs": "auto", "batch_size": "auto"}), 50)
    assert (plan.n_epochs, plan.batch_size, plan.steps_per_epoch) == (3, 3, 17)
    epochs = [[one for step in range(17) for one in plan.batch(17 * epoch + step)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1]
    assert 0 < plan.rate(0) < plan.rate(5)
    assert plan.rate(plan.steps - 1) < plan.learning_rate / 100
    lengths = [5, 100, 7, 60]
    actual = groups(lengths, 128)
    assert sorted(index for group in actual for index in group) == [0, 1, 2, 3]
    assert all(len(group) == 1 or len(group) * max(lengths[one] for one in group) <= 128 for group in actual)
