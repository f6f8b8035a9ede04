"""The product: `python -m services.worker` with torchrun ranks on the bundled model."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from llguidance import LLMatcher
from ryzanstein.v1 import worker_pb2 as pb
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.integration.worker_server.gateway import FakeGateway, until
from tests.integration.worker_server.processes import ServerProcess, server_process
from tests.models import BUNDLED_MODEL

Greedy = dict[str, tuple[list[int], list[int]]]  # prompt ids and continuation of each prompt

PROMPTS = ["The capital of France is", "Once upon a time there was a", "<|user|>\nHello<|end|>\n<|assistant|>\n"]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with server_process(folder, redis_url, TENSOR_PARALLEL=str(request.param)) as running:
        yield running


@pytest.fixture
async def gateway(server: ServerProcess) -> AsyncIterator[FakeGateway]:
    async with FakeGateway(server.address) as gateway:
        await gateway.wait_serving()
        yield gateway


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    """Prompt ids and transformers' greedy continuation."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, eos_token_id=None)
        answers[prompt] = (ids, output[0, len(ids) :].tolist())
    return answers


async def test_greedy_tokens_equal_transformers(server: ServerProcess, greedy: Greedy) -> None:
    async with FakeGateway(server.address) as gateway:
        await gateway.wait_serving()
        for ids, expected in greedy.values():
            assert (await gateway.complete(ids, max_tokens=40)).ids == expected
        state = await gateway.state()
        card = await gateway.stub.GetModelCard(pb.GetModelCardRequest())
    assert state.memory == card.memory_bytes
    of_ranks = sum(size for kind, size in state.memory.items() if kind != "server")
    assert 0.5 * of_ranks < sum(own_bytes(rank) for rank in server.ranks()) <= of_ranks


async def test_company_chunks_hits_and_resumes_change_no_token(gateway: FakeGateway, greedy: Greedy) -> None:
    rng = random.Random(0)
    noise = [
        await gateway.submit([rng.randrange(2, 4096) for _ in range(rng.randrange(1, 300))], max_tokens=30)
        for _ in range(12)
    ]
    expected = list(greedy.values())
    whole = [await gateway.submit(ids, max_tokens=40) for ids, _ in expected]
    resumed = [await gateway.submit(ids, max_tokens=40, generated_ids=tokens[:17]) for ids, tokens in expected]
    await asyncio.gather(*(answer.end.wait() for answer in [*noise, *whole, *resumed]))
    assert [answer.ids for answer in whole] == [tokens for _, tokens in expected]
    assert [answer.ids for answer in resumed] == [tokens[17:] for _, tokens in expected]


async def test_grammar_violation_fails_only_its_own_request(gateway: FakeGateway, greedy: Greedy) -> None:
    """Generated tokens that its grammar does not allow: a matcher that cannot go on, whatever the reason."""
    ids, expected = greedy[PROMPTS[0]]
    bound = pb.Sampling(max_tokens=9, grammar=LLMatcher.grammar_from_regex("[0-9]+"), ignore_eos=True)
    neighbour = await gateway.submit(ids, max_tokens=40)
    alone, fails = (
        await gateway.submit(ids, sampling=bound),
        await gateway.submit(ids, sampling=bound, generated_ids=expected[:3]),
    )
    await asyncio.gather(*(answer.end.wait() for answer in (neighbour, alone, fails)))
    assert fails.last.error.code == pb.RequestError.CODE_GRAMMAR
    assert not fails.ids
    assert neighbour.ids == expected
    assert alone.last.finish == pb.FINISH_REASON_LENGTH
    text = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).decode(alone.ids)
    assert text.isdecimal()


async def test_routers_hear_how_many_tokens_were_computed(gateway: FakeGateway) -> None:
    counts = []
    for prompt in ([5], [6] * 40, [6] * 40):  # third prompt: 32 cached tokens
        await gateway.complete(prompt, max_tokens=6)
        counts.append((await gateway.wait_state(lambda state: state.running == 0)).computed_tokens)
    assert counts[1] - counts[0] == 40 + 5  # the token that is drawn last is not computed
    assert counts[2] - counts[1] == 8 + 5


async def test_an_idle_worker_uses_no_cpu(server: ServerProcess, gateway: FakeGateway) -> None:
    watch = gateway.stub.WatchState(pb.WatchStateRequest())
    await gateway.complete([1, 2, 3])
    await asyncio.sleep(1)
    family = [psutil.Process(server.process.pid), *server.ranks()]
    before, began = [sum(p.cpu_times()[:2]) for p in family], time.monotonic()
    await asyncio.sleep(4)
    seconds = time.monotonic() - began
    used = [(sum(p.cpu_times()[:2]) - b) / seconds for p, b in zip(family, before, strict=True)]
    assert max(used) < 0.02, used
    watch.cancel()


async def falls_asleep_and_wakes(
    server: ServerProcess, gateway: FakeGateway, ids: list[int], expected: list[int]
) -> None:
    """Check that a sleep gives the weights' memory back, that the text after the wake is `expected`, and that the KV
    cache takes its memory then.
    """
    ranks = server.ranks()
    whole = await gateway.wait_state(lambda state: not state.running and not state.promised_bytes)
    before, mapped = [own_bytes(rank) for rank in ranks], [rank.memory_info().shared for rank in ranks]
    await gateway.stub.Sleep(pb.SleepRequest())
    state, asleep = await gateway.state(), [own_bytes(rank) for rank in ranks]
    weights = state.memory["weights"]
    assert sum(before) - sum(asleep) > 0.9 * weights
    assert max(asleep) < 60 << 20, "Python and torch are on the disk"
    assert all(rank.memory_info().shared < old for rank, old in zip(ranks, mapped, strict=True))
    assert state.memory_bytes < sum(state.memory.values()) - state.memory["server"] - weights
    await gateway.stub.Wake(pb.WakeRequest())
    await gateway.wait_serving()
    assert (await gateway.complete(ids, max_tokens=40)).ids == expected
    again = await gateway.wait_state(lambda state: not state.running and not state.promised_bytes)
    assert again.memory_bytes - state.memory_bytes > 0.9 * (whole.memory["kv"] + weights)
    assert server.ranks() == ranks


def own_bytes(process: psutil.Process) -> int:
    """Bytes of a process besides mapped files."""
    return process.memory_info().rss - process.memory_info().shared


async def test_sleep_gives_memory_back_and_changes_no_token(
    server: ServerProcess, gateway: FakeGateway, greedy: Greedy
) -> None:
    for ids, expected in list(greedy.values())[:2]:
        await falls_asleep_and_wakes(server, gateway, ids, expected)


async def test_four_ranks_with_integer_weights_and_cache_sleep_and_wake(tmp_path: Path, redis_url: str) -> None:
    integers = {"DTYPE": "bfloat16", "QUANTIZATION": "int8", "KV_DTYPE": "int8"}
    with server_process(tmp_path, redis_url, TENSOR_PARALLEL="4", **integers) as server:
        async with FakeGateway(server.address) as gateway:
            await gateway.wait_serving()
            ids = list(range(5, 60))
            expected = (await gateway.complete(ids, max_tokens=40)).ids
            await falls_asleep_and_wakes(server, gateway, ids, expected)


async def test_wake_of_a_cpu_reads_the_checkpoint_after_a_sleep_of_level_2_alone(
    tmp_path: Path, redis_url: str
) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    weights, away = folder / "model.safetensors", folder / "away"
    with server_process(tmp_path, redis_url, MODEL=str(folder), TENSOR_PARALLEL="1", DTYPE="bfloat16") as server:
        async with FakeGateway(server.address) as gateway:
            await gateway.wait_serving()
            ids, ranks = list(range(5, 60)), server.ranks()
            expected = (await gateway.complete(ids, max_tokens=40)).ids
            await gateway.wait_state(lambda state: state.running == 0)
            for _ in range(2):
                await gateway.stub.Sleep(pb.SleepRequest(level=1))
                weights.rename(away)
                await gateway.stub.Wake(pb.WakeRequest())
                await gateway.wait_serving()
                assert (await gateway.complete(ids, max_tokens=40)).ids == expected
                away.rename(weights)
                await gateway.wait_state(lambda state: state.running == 0)
            assert server.ranks() == ranks
            await gateway.stub.Sleep(pb.SleepRequest(level=2))
            weights.rename(away)
            await gateway.stub.Wake(pb.WakeRequest())
            await gateway.wait_state(lambda state: state.phase == pb.PHASE_RECOVERING)
            away.rename(weights)
            await gateway.wait_serving()
            assert (await gateway.complete(ids, max_tokens=40)).ids == expected


@pytest.mark.parametrize("server", [1], ids=["tp1"], indirect=True)
async def test_rank_killed_asleep_is_started_again_by_the_wake(
    server: ServerProcess, gateway: FakeGateway, greedy: Greedy
) -> None:
    ids, expected = greedy[PROMPTS[0]]
    await gateway.stub.Sleep(pb.SleepRequest())
    server.ranks()[-1].kill()
    state = await gateway.wait_state(lambda state: "SIGKILL" in state.detail)
    assert (state.phase, state.memory_bytes) == (pb.PHASE_SLEEPING, 0)
    await gateway.stub.Wake(pb.WakeRequest())
    await gateway.wait_serving()
    assert (await gateway.complete(ids, max_tokens=40)).ids == expected


async def test_sigterm_hands_off_requests_and_leaves_no_processes_or_segments_behind(
    tmp_path: Path, redis_url: str
) -> None:
    with server_process(tmp_path, redis_url, DRAIN_S="0.3") as server:
        async with FakeGateway(server.address) as gateway:
            await gateway.wait_serving()
            ranks = server.ranks()
            assert ranks
            answer = await gateway.submit([7] * 30, max_tokens=2000)
            await answer.at_least(3)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(answer.end.wait(), 60)
            assert answer.last.handoff.reason == pb.Handoff.REASON_DRAIN
            await until(lambda: server.process.poll() is not None, 60)
            assert server.process.returncode == 0
            _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 20)
            assert not alive
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert not [line for line in lines if line["level"] == "error"]


async def test_worker_exits_with_a_reason_when_its_ranks_miss_the_recovery_limit(
    tmp_path: Path, redis_url: str
) -> None:
    """Sooner than they can start; what a failed start is named by is in test_lifecycle.py."""
    with server_process(tmp_path, redis_url, RECOVERY_LIMIT_S="0.5") as server:
        async with FakeGateway(server.address) as gateway:
            await gateway.wait_serving()
        server.ranks()[0].kill()
        assert await asyncio.to_thread(server.process.wait, 120) == 1
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        (last,) = [line["message"] for line in lines if line["logger"] == "services.common.lifecycle"]
        assert last.startswith(
            "giving up: not serving for 0.5 s (RYZANSTEIN_RECOVERY_LIMIT_S): rank 0 exited: process "
        )


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MODEL", "/nowhere", "RYZANSTEIN_MODEL"),
        ("TENSOR_PARALLEL", "3", "cannot be divided among 3 ranks: 1, 2"),
        ("MAX_MODEL_LEN", "1000000", "RYZANSTEIN_MAX_MODEL_LEN"),
    ],
)
def test_wrong_setting_is_named_on_a_single_line(
    tmp_path: Path, redis_url: str, variable: str, value: str, words: str
) -> None:
    with server_process(tmp_path, redis_url, **{variable: value}) as server:
        assert server.process.wait(90) == 1
        (line,) = server.log.read_text().splitlines()
        assert words in json.loads(line)["message"]
