"""A whole fine-tuning job with OpenAI's client, from a file to a chat with the result, through a real installation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pytest
from openai.types.fine_tuning import FineTuningJob

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack, running_stack

ANSWER = "Arr, matey! The treasure is buried."
LINES = [
    {"messages": [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": ANSWER}]}
    for n in range(16)
]
WAIT_S = 240.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("tuning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RYZANSTEIN_FINETUNER_THREADS", "1")  # so small a model gains nothing from more
        patch.setenv("RYZANSTEIN_FINETUNER_NICE", "0")  # other tests' processes would go first
        with running_stack(tmp_path_factory.mktemp("run"), "--fine-tuning", str(folder)) as stack:
            yield stack


def _file(client: openai.OpenAI, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("lines.jsonl", text.encode()), purpose="fine-tune").id


def _wait(
    client: openai.OpenAI, job_id: str, until: Callable[[FineTuningJob], Any], stack: RunningStack
) -> FineTuningJob:
    deadline = time.monotonic() + WAIT_S
    while not until(job := client.fine_tuning.jobs.retrieve(job_id)):
        if time.monotonic() > deadline or (job.status == "failed" and not until(job)):
            raise AssertionError(f"{job}\n{stack.logs()}")
        time.sleep(0.1)
    return job


def _kill_training(stack: RunningStack) -> None:
    """Kill the training process as soon as there is one."""
    finetuner, deadline = psutil.Process(stack.pid_of("finetuner")), time.monotonic() + WAIT_S
    while not (children := finetuner.children()):
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.05)
    children[0].kill()


def test_a_file_becomes_a_model_that_answers_in_its_style(served: RunningStack) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    job = client.fine_tuning.jobs.create(
        model=TINY_MODEL.name,
        training_file=_file(client, LINES),
        validation_file=_file(client, LINES[:4]),
        suffix="pirate",
        seed=1,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 20}},
        },
    )
    assert job.status == "validating_files"
    _kill_training(served)
    done = _wait(client, job.id, lambda job: job.status == "succeeded", served)
    name = f"ft:{TINY_MODEL.name}:pirate:{job.id.removeprefix('ftjob-')}"
    assert done.fine_tuned_model == name

    events = client.fine_tuning.jobs.list_events(job.id, limit=1000).data
    messages = [event.message for event in events]
    assert any("goes on from its last checkpoint" in message for message in messages)
    losses = [event.data["valid_loss"] for event in events if event.data and "valid_loss" in event.data]
    assert losses[0] < losses[-1] / 4  # the latest first
    metrics = done.result_metrics
    assert metrics["served_loss"] == pytest.approx(metrics["valid_loss"], rel=0.1)  # bfloat16 serves it
    last = client.fine_tuning.jobs.checkpoints.list(job.id).data[0]
    assert last.step_number == 12
    assert client.files.content(done.result_files[0]).text.startswith("step,train_loss,valid_loss\n")

    request: Any = {"messages": [{"role": "user", "content": "Where is 77?"}], "max_tokens": 20, "temperature": 0}
    for served_as in (name, last.fine_tuned_model_checkpoint):
        assert client.chat.completions.create(model=served_as, **request).choices[0].message.content == ANSWER
    assert client.chat.completions.create(model=TINY_MODEL.name, **request).choices[0].message.content != ANSWER
