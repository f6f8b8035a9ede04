"""Trainings as Kubernetes Jobs, with the real Job controller. No node runs the pods: the test says how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.tasks import end_tasks
from services.finetuner.cluster.runner import KubernetesRun, KubernetesRunner
from services.finetuner.runner import TrainingMessage, TrainingTask
from services.finetuner.settings import FinetunerSettings
from services.finetuner.training.messages import STOPPED
from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane.releases import install, kubeconfig_of
from tests.cluster.kube import Kube, Object
from tests.kubeconfig import use_kubeconfig

pytestmark = pytest.mark.timeout(240)
MEMBER = "tenant:ftjob-000000000001"
NAME = "ryzanstein-training-000000000001"
TRAININGS = "app.kubernetes.io/component=training"


@pytest.fixture(scope="module")
def kube(namespaces: Namespaces) -> Kube:
    kube = namespaces("trainings")
    install(kube, "finetuner.enabled=true", "finetuner.job.backoffLimit=0", "finetuner.job.graceSeconds=1")
    return kube


@pytest.fixture
def tuner(kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinetunerSettings:
    """A fine-tuner with the rights and the template of the one in the release."""
    use_kubeconfig(monkeypatch, kubeconfig_of(kube, "ryzanstein-finetuner", tmp_path))
    template = tmp_path / "job.json"
    template.write_text(kube.get("configmap", "ryzanstein-finetuner")["data"]["job.json"])
    return FinetunerSettings(finetuner_models={}, finetuner_folder=str(tmp_path), finetuner_job_template=str(template))


class Followed:
    """A run whose messages are collected."""

    def __init__(self, run: KubernetesRun, kube: Kube, folder: Path) -> None:
        self.run, self.kube, self.folder = run, kube, folder
        self.messages: list[TrainingMessage] = []
        self.ended = False

    async def listen(self) -> None:
        async for message in self.run.messages():
            self.messages.append(message)
        self.ended = True

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        await asyncio.to_thread(self.kube.until, what, lambda: bool(condition()), 60.0)

    async def job(self) -> Object:
        """The Kubernetes Job, once the fine-tuner follows it."""
        await self.until("the run knows its Job", lambda: not self.run.offset.startswith(":"))
        return await asyncio.to_thread(self.kube.get, "job", NAME)

    async def say(self, *steps: int) -> None:
        """As the training would."""
        path = self.folder / "words" / f"{(await self.job())['metadata']['uid']}.jsonl"
        with path.open("a") as file:
            file.write("".join(f"\n{json.dumps({'kind': 'step', 'step': step})}\n" for step in steps) + '{"half')
        await self.until(f"step {steps[-1]} is heard", lambda: self.steps[-1:] == [steps[-1]])

    @property
    def steps(self) -> list[int]:
        return [message["step"] for message in self.messages if message["kind"] == "step"]

    async def pod(self, *, but: str = "") -> str:
        """The name of the Job's pod, another one than `but`."""
        actual: list[str] = []

        def look() -> bool:
            pods = self.kube.items("pods", TRAININGS)
            actual[:] = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Pending"]
            return bool(actual) and actual != [but]

        await self.until("the Job has a pod", look)
        return actual[0]

    async def end_pod(self, name: str, status: int, message: str = "") -> None:
        """Let a pod's container end."""
        end = {"exitCode": status, "reason": "Error", "message": message}
        container = {
            "name": "training", "image": "i", "imageID": "i", "ready": False, "restartCount": 0,
            "state": {"terminated": end},
        }  # fmt: skip
        change = json.dumps({"status": {"phase": "Failed", "containerStatuses": [container]}})
        await asyncio.to_thread(self.kube.kubectl, "patch", "pod", name, "--subresource=status", "-p", change)


@asynccontextmanager
async def following(settings: FinetunerSettings, kube: Kube, offset: str = "") -> AsyncIterator[Followed]:
    """Start a training, or go on with it; the Job stays when the block is left."""
    folder = Path(settings.finetuner_folder) / "jobs" / "ftjob-000000000001"
    task = TrainingTask(MEMBER, "ftjob-000000000001", folder, "/base", offset)
    runner = await KubernetesRunner.open(settings)
    async with runner.start(task) as run:
        followed = Followed(run, kube, folder)
        listening = asyncio.create_task(followed.listen())
        try:
            yield followed
        finally:
            await end_tasks([listening])


async def test_a_training_goes_on_with_the_next_fine_tuner_and_in_the_next_pod(
    kube: Kube, tuner: FinetunerSettings
) -> None:
    async with following(tuner, kube) as first:
        job = await first.job()
        (owner,) = job["metadata"]["ownerReferences"]
        assert owner["uid"] == kube.get("deployment", "ryzanstein-finetuner")["metadata"]["uid"]
        pod = await first.pod()
        await first.until("a pod that no node takes is reported", lambda: first.messages)
        assert "No node takes the training's pod" in first.messages[0]["message"]
        await first.say(1, 2)
    async with following(tuner, kube, first.run.offset) as second:
        assert (await second.job())["metadata"]["uid"] == job["metadata"]["uid"]
        await second.say(3)
        assert second.steps == [3]
        await second.end_pod(pod, STOPPED)  # as a pod does that is evicted: not counted, although backoffLimit is 0
        next_pod = await second.pod(but=pod)
        kube.kubectl("delete", "job", NAME, "--wait=false")
        await second.until("the end is seen", lambda: second.ended)
        assert not (await second.run.outcome()).counts, "it was taken away and did not fail"
    async with following(tuner, kube, second.run.offset) as third:
        assert (await third.job())["metadata"]["uid"] != job["metadata"]["uid"]
        await third.end_pod(await third.pod(but=next_pod), 1, "Traceback\nMemoryError: all of it")
        await third.until("the end is seen", lambda: third.ended)
        outcome = await third.run.outcome()
        assert (outcome.status, outcome.reason, outcome.counts) == (1, "Error: MemoryError: all of it", True)
        assert not kube.items("jobs", TRAININGS), "it made room for the next one"


async def test_unwanted_training_is_removed(kube: Kube, tuner: FinetunerSettings) -> None:
    async def wanted(member: str) -> bool:
        claims.append(member)
        return False

    claims: list[str] = []
    async with following(tuner, kube) as stopped:
        await stopped.job()
        stopped.run.stop()
        await stopped.until("the end is seen", lambda: stopped.ended)
        assert not kube.items("jobs", TRAININGS)
    async with following(tuner, kube) as cancelled:
        await cancelled.job()
    await (await KubernetesRunner.open(tuner)).sweep(wanted)
    assert claims == [MEMBER]
    await cancelled.until("the Job is gone", lambda: not kube.items("jobs", TRAININGS))
    async with following(tuner, kube) as left:
        await left.job()
    kube.kubectl("delete", "deployment", "ryzanstein-finetuner")
    await left.until("the Job went with its owner", lambda: not kube.items("jobs", TRAININGS))
