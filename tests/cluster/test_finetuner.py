"""A fine-tuning job as a Kubernetes Job, killed in its middle: it finishes, and its result is served."""

from __future__ import annotations

import json
import signal
from typing import Any

import openai
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.rig import Rig
from tests.programs import CHART

IMAGE = CHART.parents[1] / "build/images/finetuner-cpu.tar"
WAIT_S = 600  # a busy machine takes long
pytestmark = pytest.mark.timeout(2 * WAIT_S)
MODEL = "ryzanstein-tiny"
ANSWER = "Arr, matey! The treasure is buried."
LINES = [
    {"messages": [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": ANSWER}]}
    for n in range(16)
]
VALUES: dict[str, object] = {
    "workers.defaults.resources.requests.cpu": "50m",
    "finetuner.enabled": "true",
    "finetuner.storage.accessModes[0]": "ReadWriteOnce",  # local volumes: they hold all their pods on one node
    "finetuner.storage.size": "1Gi",
    "finetuner.job.resources.requests.cpu": "50m",
    "finetuner.job.resources.requests.memory": "512Mi",
}


@pytest.fixture(scope="module")
def tuning(namespaces: Namespaces) -> Installation:
    """In a namespace that enforces the restricted standard."""
    if not IMAGE.is_file():  # it is none of those that are built by default
        pytest.skip(f"{IMAGE} is not there: make images-archive IMAGES=finetuner-cpu")
    installation = Installation(namespaces("tuning", labels={"pod-security.kubernetes.io/enforce": "restricted"}))
    installation.install(*settings(VALUES))
    return installation


def test_job_finishes_and_is_served_when_its_pod_is_killed(
    tuning: Installation, rig: Rig, figures: dict[str, object]
) -> None:
    client = openai.OpenAI(base_url=f"{tuning.url}/v1", api_key="unused")
    file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="fine-tune")
    before = {pod["metadata"]["uid"] for pod in tuning.pods("worker")}
    hyperparameters: Any = {"n_epochs": 50, "batch_size": 4, "learning_rate_multiplier": 5}
    job = client.fine_tuning.jobs.create(
        model=MODEL, training_file=file.id, validation_file=file.id, suffix="pirate", seed=1,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )  # fmt: skip

    def checkpoints() -> int:
        now = client.fine_tuning.jobs.retrieve(job.id)
        assert now.status in ("validating_files", "queued", "running"), now
        return len(client.fine_tuning.jobs.checkpoints.list(job.id).data)

    tuning.kube.until("it has written a checkpoint", lambda: checkpoints() > 0, timeout_s=WAIT_S)
    (pod,) = tuning.pods("training")
    rig.signal(pod, "services.finetuner.training", signal.SIGKILL)

    def succeeded() -> bool:
        now = client.fine_tuning.jobs.retrieve(job.id)
        assert now.status in ("running", "succeeded"), now
        return now.status == "succeeded"

    tuning.kube.until("the job has succeeded", succeeded, timeout_s=WAIT_S)
    done = client.fine_tuning.jobs.retrieve(job.id)
    events = client.fine_tuning.jobs.list_events(job.id, limit=1000).data
    begins = [event.message for event in events if event.message.startswith("Training ")]
    assert len(begins) == 2, begins
    assert "It goes on after step" in begins[0], "the latest first"
    reports = [event.data for event in events if isinstance(event.data, dict)]
    steps = [data["step"] for data in reports if data.keys() >= {"step", "train_loss"}]
    assert set(steps) == set(range(1, 201)), "no step is missing"
    figures["a fine-tuning job with a killed pod, s"] = (done.finished_at or 0) - done.created_at

    assert done.fine_tuned_model is not None
    answer = client.chat.completions.create(
        model=done.fine_tuned_model,
        messages=[{"role": "user", "content": "Where is 77?"}],
        max_tokens=20,
        temperature=0,
    )
    assert answer.choices[0].message.content == ANSWER
    assert {pod["metadata"]["uid"] for pod in tuning.pods("worker")} == before
    assert not any(tuning.kube.restarts().values())
    tuning.kube.until(
        "its Kubernetes Job is gone", lambda: not tuning.kube.items("jobs", "app.kubernetes.io/component=training")
    )
