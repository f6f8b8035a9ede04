"""From a file to a model that is served: `ryzanstein finetune`, a gateway, and a fine-tuner that the test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import Result as Ended
from openai.types.fine_tuning import FineTuningJob
from typer.testing import CliRunner

from services.cli.main import app
from services.common.fine_tuning.records import Example, JobCheckpoint, Presence, Result
from services.common.fine_tuning.store import TuningClaim, TuningStore, new_event
from tests.integration.gateway.fleet import MAX_LEN, MODEL
from tests.integration.gateway.gateways import GatewayStack, eventually
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.gateway.test_batches import gateway
from tests.integration.gateway.test_fine_tuning import LINE, finetuner, until

STEPS = 4
SAVED = (1, 2, 3, 3, STEPS)  # the third step twice, by a training that has started again


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr("services.gateway.fine_tuning.runner._LOOK_S", 0.05)
    monkeypatch.setattr("services.gateway.fine_tuning.runner._LEASE_S", 0.09)  # renewed while a job waits
    with running_redis(tmp_path) as running:
        yield running


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join([json.dumps(LINE)] * 200))
    return path


async def command(stack: GatewayStack, *arguments: str) -> Ended:
    """Run `ryzanstein finetune` against the gateway."""
    line = ["finetune", *arguments, "--model", MODEL, "--url", f"{stack.url}/"]
    return await asyncio.to_thread(CliRunner().invoke, app, line)


async def claimed(store: TuningStore) -> TuningClaim:
    async with asyncio.timeout(60):
        while not (claim := await store.claim("tuner", 10.0, ["train"])):  # noqa: ASYNC110  # the gateway checks its file
            await asyncio.sleep(0.02)
    return claim


async def train(store: TuningStore, result: Result) -> None:
    """Report steps of a training, then its result."""
    claim = await claimed(store)
    losses = [{"step": step, "train_loss": 4.0 / step, "tokens_per_s": 8.0, "left_s": 1.0} for step in (1, STEPS)]
    events = [new_event(f"Step {loss['step']}/{STEPS}", data=loss) for loss in losses]
    events += [new_event("validated", data={"step": step, "valid_loss": 9.0 / step}) for step in (1, STEPS)]
    saved = [JobCheckpoint(id=f"c{step}", created_at=1, step=step, folder=f"/c{step}", metrics={}) for step in SAVED]
    await store.report(claim, 10.0, events, saved, fields={"steps": STEPS, "step": STEPS})
    await store.report(claim, 0, fields={"stage": "publish", "result": result.model_dump_json()})


def trained(*examples: Example) -> Result:
    return Result(folder="/adapter", train_loss=1.0, valid_loss=2.25, examples=list(examples))


async def follow(server: RedisServer, stack: GatewayStack, lines: Path, result: Result, *options: str) -> Ended:
    """Run the command with a fine-tuner that trains to `result`."""
    store = finetuner(server)
    await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
    watching = asyncio.create_task(command(stack, str(lines), "--validation", str(lines), "--watch", *options))
    await train(store, result)
    return await watching


async def newest(stack: GatewayStack) -> FineTuningJob:
    return (await stack.client.fine_tuning.jobs.list(limit=1)).data[0]


async def test_the_command_shows_losses_and_prints_the_name_of_the_model(server: RedisServer, lines: Path) -> None:
    async with gateway(server) as stack:
        validated = Example(tokens=[5, 100, 200, 300], trained=[(0, 2), (3, 4)])  # position 0 follows nothing
        options = ("--suffix", "pirate", "--epochs", "3", "--lora-rank", "4")
        ended = await follow(server, stack, lines, trained(validated), *options)
        job = await newest(stack)
        name = f"ft:{MODEL}:pirate:{job.id.removeprefix('ftjob-')}"
        assert (ended.exit_code, ended.stdout) == (0, f"{name}\n"), ended.output
        shown = ended.stderr.splitlines()  # output for a terminal with 80 columns
        assert shown[0] == f"{job.id} succeeded"
        assert shown[1].split(" ", 1)[1] == f"{STEPS}/{STEPS} steps 8 trained tokens/s 1 s left"
        assert shown[2].startswith("   4.000 ┤•")
        assert shown[11].startswith("   1.000 ┤")
        assert shown[12:] == [f"    loss └{'─' * 56} step {STEPS}", "validation loss 9.000 at step 1, 2.250 now"]
        assert job.method is not None
        assert job.method.supervised is not None
        hyper: Any = job.method.supervised.hyperparameters
        assert (hyper.n_epochs, hyper.batch_size, hyper.lora_rank, hyper.quantization) == (3, "auto", 4, "none")
        served = [model.id async for model in stack.client.models.list()]
        assert served == [MODEL, name, *(f"{name}:ckpt-step-{step}" for step in (2, 3, STEPS))], "the base first"
        listed = [one async for one in stack.client.fine_tuning.jobs.checkpoints.list(job.id)]
        assert [one.fine_tuned_model_checkpoint for one in listed] == served[:1:-1]
        for checkpoint in listed:
            request: Any = {"model": checkpoint.fine_tuned_model_checkpoint, "prompt": "a", "max_tokens": 1}
            assert (await stack.client.completions.create(**request)).model == request["model"]
        assert (await stack.client.models.delete(name)).deleted
        with pytest.raises(openai.NotFoundError):
            await stack.client.completions.create(**{**request, "model": name})
        assert [model.id async for model in stack.client.models.list()] == [MODEL, *served[2:]]
        metrics: Any = job.model_extra
        assert metrics["result_metrics"] == pytest.approx(
            {"train_loss": 1.0, "valid_loss": 2.25, "served_loss": (0.1 + 0.3) / 2}
        )
        table = (await stack.client.files.content(job.result_files[0])).text
        assert table == "step,train_loss,valid_loss\n1,4.0,9.0\n4,1.0,2.25\n"


async def test_a_validation_that_workers_refuse_leaves_its_loss_out(server: RedisServer, lines: Path) -> None:
    async with gateway(server) as stack:
        too_long = Example(tokens=[7] * (MAX_LEN + 1), trained=[(1, 2)])
        ended = await follow(server, stack, lines, trained(too_long))
        assert ended.exit_code == 0, ended.output
        job = await newest(stack)
        assert "served_loss" not in (job.model_extra or {})["result_metrics"]
        events = [event.message async for event in stack.client.fine_tuning.jobs.list_events(job.id)]
        assert any("was not computed: " in message and str(MAX_LEN) in message for message in events)


async def test_an_adapter_that_workers_refuse_ends_the_job_and_the_command(server: RedisServer, lines: Path) -> None:
    async with gateway(server) as stack:
        stack.workers[0].no_adapter = "rank 16, and slots have 8"
        ended = await follow(server, stack, lines, trained())
        job = await newest(stack)
        reason = "The adapter cannot be served: `lora_path`: worker w0: rank 16, and slots have 8"
        assert (ended.exit_code, ended.stdout) == (1, "")
        assert ended.stderr.endswith(f"ryzanstein: {job.id} failed: {reason}\n")
        assert job.error is not None
        assert job.error.code == "not_servable"


async def test_a_result_waits_for_workers_until_its_job_is_cancelled(
    server: RedisServer, lines: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "services.gateway.fine_tuning.runner")
    async with gateway(server) as stack:
        stack.router.hidden.add("w0")
        store = finetuner(server)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        ended = await command(stack, str(lines))
        job = await newest(stack)
        assert (ended.exit_code, ended.stdout) == (0, f"{job.id}\n")
        await eventually(lambda: not stack.gateway.catalog.available())
        await train(store, trained())
        await eventually(lambda: "not served yet" in caplog.text)
        gate = stack.workers[0].adapter_gate = asyncio.Event()
        stack.router.hidden.clear()
        await eventually(lambda: stack.workers[0].inspections)
        await stack.client.fine_tuning.jobs.cancel(job.id)
        gate.set()
        await eventually(lambda: "cancelled, or taken over" in caplog.text)
        assert (await until(stack, job.id, "cancelled")).fine_tuned_model is None


async def test_error_is_printed_on_a_single_line(server: RedisServer, lines: Path, tmp_path: Path) -> None:
    async with gateway(server) as stack:
        message = (await command(stack, str(lines))).stderr
        assert message.startswith("ryzanstein: No fine-tuner runs in this installation")
        assert (await command(stack, str(tmp_path / "none"))).stderr.endswith("none: No such file or directory\n")
        url = stack.url
    gone = await asyncio.to_thread(CliRunner().invoke, app, ["finetune", str(lines), "--model", MODEL, "--url", url])
    assert f"{url} does not answer" in gone.stderr
