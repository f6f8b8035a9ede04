"""A fine-tuner that trains in Kubernetes Jobs: a real Redis, and an API server that does what clusters rarely do."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import httpx
import pytest

from services.common.extras import pip_install
from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.finetuner.main import serve
from tests.integration.finetuner.api_server import OWNER, OWNER_UID
from tests.integration.finetuner.site import ORDER, PATIENCE_S, Site
from tests.kube_api import NAMESPACE, NO_ANSWER
from tests.kubeconfig import use_kubeconfig


def step(number: int) -> dict[str, Any]:
    word = {"kind": "step", "step": number, "of": 4, "train_loss": 0.5, "tokens": 8 * number}
    return {**word, "tokens_per_s": 1.0, "left_s": 3.0}


async def test_a_job_is_trained_although_the_api_server_is_away_for_a_while(site: Site) -> None:
    looked = [("GET jobs/training-1", status, '{"message": "not now"}') for status in (401, 503)]
    away = [*looked, *[(f"GET deployments/{OWNER}", NO_ANSWER, "")] * 4, ("POST jobs", 503, "null")]
    site.api.refuse = [*away, ("POST jobs", 409, "{}"), ("DELETE jobs/training-1", 500, "<html>")]
    await site.queue()
    async with site.fine_tuner():
        await site.until_made(1)
        metadata = site.api.job()["metadata"]
        assert metadata["name"] == "training-1"
        assert metadata["annotations"] == {"ryzanstein.dev/fine-tuning-job": "-:ftjob-1"}
        assert metadata["ownerReferences"][0]["uid"] == OWNER_UID
        held = {"reason": "ImagePullBackOff", "message": "no such image"}
        site.api.set_pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}])
        await site.until_said("No node takes the training's pod: 0/2 nodes")
        scheduled = {"type": "PodScheduled", "status": "True"}
        site.api.set_pod("Pending", conditions=[scheduled], **container({"waiting": held}))
        await site.until_said("The training's pod does not start: ImagePullBackOff: no such image")
        site.api.set_pod("Pending", **container({"waiting": {"reason": "ContainerCreating"}}))
        await site.until_looked()
        site.api.set_pod("Running")
        site.say({"kind": "begins", "steps": 4, "message": "Training 8 parameters"}, step(1))
        site.say({"kind": "validated", "step": 2, "of": 4, "valid_loss": 0.25})
        site.say({"kind": "saved", "step": 2, "folder": "/c", "metrics": {"train_loss": 0.5}})
        await site.until_said("validation loss")
        result = {"folder": "/adapter", "train_loss": 0.5, "valid_loss": None, "examples": []}
        site.say({"kind": "done", **result})
        site.api.end_job("Complete")
        job = await site.until_job(lambda job: job.stage == "publish")
    assert job.result is not None
    assert job.result.folder == "/adapter"
    assert (job.numbers["steps"], job.numbers["step"], job.numbers["trained_tokens"]) == (4, 1, 8)
    assert [one.step for one in await site.store.checkpoints("", ORDER.id)] == [2]
    assert (await site.messages())[2:] == [
        "Training 8 parameters",
        "Step 1/4: training loss=0.5000",
        "Step 2/4: validation loss=0.2500",
    ]
    assert not site.api.jobs
    assert not site.api.refuse
    assert (site.folder / "jobs" / ORDER.id / "training.jsonl").read_text() == "{}\n"


async def test_fine_tuner_ends_while_waiting_for_the_api_server(site: Site) -> None:
    site.api.refuse = [(f"GET deployments/{OWNER}", 503, "{}")] * 10_000
    async with site.fine_tuner():
        await site.until(lambda: len(site.api.refuse) < 9_998)
    assert site.api.refuse


def container(state: dict[str, Any]) -> dict[str, Any]:
    """The status of a pod whose container is in a state."""
    return {"containerStatuses": [{"state": state}]}


STOPPED = {"exitCode": 43, "reason": "Error"}
KILLED = {"exitCode": 137, "reason": "OOMKilled", "message": "Loading\nKilled\n\n"}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([container({"terminated": KILLED})], "(status 137): OOMKilled: Killed"),
        (
            [container({"terminated": STOPPED}), container({"terminated": KILLED}), container({})],
            "(status 137): OOMKilled: Killed",
        ),
        ([{"reason": "Evicted", "message": "disk"}], "(status -1): Evicted: disk"),
        ([], "(status -1): DeadlineExceeded: too long"),
    ],
    ids=["out of memory", "the last pod that ended counts", "evicted before it began", "no pod is left"],
)
async def test_failed_job_reports_how_its_last_pod_ended(site: Site, pods: list[dict[str, Any]], expected: str) -> None:
    await site.queue()
    async with site.fine_tuner(finetuner_attempts=2):
        for attempt in (1, 2):
            await site.until_made(attempt)
            for number, pod in enumerate(pods):
                site.api.set_pod("Failed", name=f"pod-{number}", **pod)
            site.api.end_job("Failed", reason="DeadlineExceeded", message="too long")
            if attempt == 1:
                await site.until_said("goes on from its last checkpoint")
        job = await site.until_job(lambda job: job.status == "failed")
    assert job.error is not None
    assert job.error.code == "training_failed"
    assert job.error.message == f"Training ended 2 times without progress {expected}"
    assert not site.api.jobs


async def test_job_error_holds_the_refusal_of_the_api_server(site: Site) -> None:
    site.api.refuse = [("POST jobs", 403, '{"message": "jobs.batch is forbidden"}')]
    await site.queue()
    async with site.fine_tuner():
        job = await site.until_job(lambda job: job.status == "failed")
    assert job.error is not None
    assert (job.error.code, site.api.made) == ("training_not_started", 0)
    refused = "Training was not started: the API server refuses with 403 Forbidden: jobs.batch is forbidden"
    assert job.error.message == refused


async def test_a_refused_training_ends_its_job(site: Site) -> None:
    await site.queue()
    async with site.fine_tuner():
        await site.until_made(1)
        site.say({"kind": "refused", "code": "invalid_training_file", "message": "line 3", "param": "training_file"})
        site.api.end_job("Failed", reason="PodFailurePolicy", message="status 42")
        job = await site.until_job(lambda job: job.status == "failed")
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("invalid_training_file", "line 3")
    assert site.api.made == 1


async def test_a_job_that_is_taken_away_is_made_again_once_its_pods_have_ended(site: Site) -> None:
    """That is no attempt of the job."""
    await site.queue()
    async with site.fine_tuner(finetuner_attempts=1):
        for number in (1, 2):
            await site.until_made(number)
            site.api.being_deleted()
            await site.until_looked()
            site.api.delete("training-1")
        await site.until_made(3)
        assert (await site.job()).status == "running"
    assert "goes on from its last checkpoint" in (await site.messages())[-1]
    site.api.being_deleted()
    async with site.fine_tuner():
        await site.until_looked()
        await site.store.turn("", ORDER.id, "paused", ["running"])
        await site.until_given_back()
        await site.store.turn("", ORDER.id, "queued", ["paused"])
        await site.until_looked()
        assert site.api.made == 3
        site.api.delete("training-1")
        await site.until_made(4)


async def test_the_next_fine_tuner_goes_on_where_the_first_has_ended(site: Site) -> None:
    second = json.dumps(step(2))
    await site.queue()
    async with site.fine_tuner():
        await site.until_made(1)
        site.api.set_pod("Running")
        site.say(step(1))
        site.write(second[:9])
        await site.until_said("Step 1/4")
    assert site.api.made == len(site.api.jobs) == 1, "it outlives its fine-tuner"
    site.write(f'{second[9:]}\n{{"kind": "st')
    async with site.fine_tuner():
        await site.until_said("Step 2/4")
        site.say(step(3))
        await site.until_said("Step 3/4")
        await site.store.turn("", ORDER.id, "paused", ["running"])
        await site.until(lambda: not site.api.jobs)
        await site.store.turn("", ORDER.id, "queued", ["paused"])
        await site.until_made(2)
        site.say(step(4))
        await site.until_said("Step 4/4")
        await site.store.turn("", ORDER.id, "cancelled", ["running"])
        await site.until(lambda: not site.api.jobs)
    assert [expected for expected in await site.messages() if "Step" in expected] == [
        f"Step {number}/4: training loss=0.5000" for number in (1, 2, 3, 4)
    ]


async def test_a_fine_tuner_waits_while_redis_is_away(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "services.finetuner.main")
    await site.queue()
    moved = site.redis.socket.with_name("moved.sock")
    site.redis.socket.rename(moved)
    async with site.fine_tuner():
        await site.until(lambda: "Redis is away" in caplog.text)
        moved.rename(site.redis.socket)
        await site.until_made(1)


async def test_fine_tuner_is_ready_once_gateways_can_know_its_models(site: Site) -> None:
    port = free_port()
    moved = site.redis.socket.with_name("moved.sock")
    site.redis.socket.rename(moved)

    async def readiness() -> int:
        try:
            return (await http.get(f"http://127.0.0.1:{port}/readyz")).status_code
        except httpx.TransportError:
            return 0

    async with site.fine_tuner(metrics_port=port), httpx.AsyncClient(trust_env=False, timeout=60) as http:
        async with asyncio.timeout(PATIENCE_S):
            while not (first := await readiness()):  # noqa: ASYNC110  # its port opens in a thread
                await asyncio.sleep(0.01)
        assert first == httpx.codes.SERVICE_UNAVAILABLE
        moved.rename(site.redis.socket)
        async with asyncio.timeout(PATIENCE_S):
            while await readiness() != httpx.codes.OK:  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.01)
        assert [one.models for one in await site.store.present()] == [["tiny"]]


@pytest.mark.parametrize(
    ("content", "models", "error"),
    [
        (b"{}", {"other": "/base"}, ("base_unavailable", "model", "`tiny`: this fine-tuner does not have it")),
        (b"", {"tiny": "/base"}, ("invalid_training_file", "training_file", "training.jsonl was deleted before")),
    ],
    ids=["the base", "the file"],
)
async def test_failed_training_names_its_missing_input(
    site: Site, content: bytes, models: dict[str, str], error: tuple[str, str, str]
) -> None:
    await site.queue(content)
    async with site.fine_tuner(finetuner_models=models):
        job = await site.until_job(lambda job: job.status == "failed")
    assert job.error is not None
    assert (job.error.code, job.error.param) == error[:2]
    assert error[2] in job.error.message
    assert site.api.made == 0


async def test_job_fails_after_three_attempts_when_its_folder_cannot_be_made(site: Site) -> None:
    (site.folder / "jobs").write_text("a file")
    await site.queue()
    async with site.fine_tuner():
        job = await site.until_job(lambda job: job.status == "failed")
    assert job.error is not None
    assert job.error.code == "internal_error"
    assert "NotADirectoryError" in job.error.message
    assert "(3 times)" in job.error.message


async def test_a_job_that_was_cancelled_while_no_fine_tuner_was_there_goes_with_a_later_sweep(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.finetuner.main._SWEEP_S", 0.02)
    await site.queue()
    async with site.fine_tuner():
        await site.until_made(1)
    await site.store.turn("", ORDER.id, "cancelled", ["running"])
    site.api.refuse = [("GET jobs", 403, "{}")]
    async with site.fine_tuner():
        await site.until(lambda: not site.api.jobs)
    assert not site.api.refuse


async def test_a_fine_tuner_that_cannot_train_does_not_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(expected: str, **overrides: Any) -> None:
        with pytest.raises(StartupError, match=expected):
            await serve(site.settings(**overrides), asyncio.Event())

    site.api.refuse = [(f"GET deployments/{OWNER}", 404, "{}")]
    await fails(f"there is no Deployment {NAMESPACE}/{OWNER}")
    template = site.folder / "job.json"
    template.write_text(json.dumps({"metadata": {"namespace": NAMESPACE}}))
    await fails("RYZANSTEIN_FINETUNER_JOB_TEMPLATE is .*/job.json: KeyError.'ownerReferences'")
    use_kubeconfig(monkeypatch, site.folder / "none")
    await fails("no Kubernetes cluster")
    monkeypatch.setitem(sys.modules, "peft", None)
    await fails(re.escape(f"peft missing: {pip_install('finetune')}"), finetuner_job_template="")
