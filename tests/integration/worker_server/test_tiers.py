"""KV blocks below the device: evicted blocks and those of an earlier process are found, and never served wrongly.

The ranks are those of the scheduler's tests, which notice KV of another prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.lifecycle import StartupError
from services.worker import main
from services.worker.kv_transfer import device, loader, tiers
from services.worker.kv_transfer.host_store import HostStore
from services.worker.native.step_cost import StepTimer
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.fake_group import FakeGroup
from tests.integration.worker_server.gateway import FakeGateway, GatewayAnswer, until
from tests.integration.worker_server.processes import server_process
from tests.integration.worker_server.test_kv_sync import Subscriber
from tests.integration.worker_server.test_pull_failures import a_worker, hint_of, is_right, level, metric
from tests.unit.worker.kv_transfer.test_disk_store import no_room

BLOCK_BYTES = 8 * 16  # a block of the fake ranks
GIB = 1 << 30
PROMPT = [i % 90 + 1 for i in range(600)]  # more tokens than any load has to save to be begun
CACHED = 592
N_BLOCKS = 37
# Steps of 32 rows, so that computing the prompt takes more steps than the one for which a load waits.
SMALL = {"kv_tokens": 2048, "max_model_len": 1000, "max_batched_tokens": 32}


def host(n_blocks: int = 1000) -> dict[str, object]:
    return {**SMALL, "host_cache_gib": n_blocks * BLOCK_BYTES / GIB}


def disk(folder: Path, n_blocks: int = 1000) -> dict[str, object]:
    return {**SMALL, "disk_cache": str(folder), "disk_cache_gib": n_blocks * BLOCK_BYTES / GIB}


def cached(answer: GatewayAnswer) -> int:
    return answer.outputs[0].cached_tokens


async def stored(gateway: FakeGateway, place: int, n_blocks: int) -> None:
    """Wait until a place holds that many blocks."""
    subscriber = Subscriber(gateway, pb.KvSyncRequest())
    await subscriber.holds_below(place, n_blocks)
    subscriber.stop()


def shorten_files(folder: Path) -> None:
    for path in folder.glob("rz-kv-*/*/??/*"):
        path.write_bytes(path.read_bytes()[:-1])


async def evict(gateway: FakeGateway, first: int = 1) -> None:
    """Other prompts take the whole pool."""
    for i in range(3):
        await gateway.complete([first + i] * 900)


async def begins(gateway: FakeGateway, place: pb.KvPlace, prompt: list[int] = PROMPT) -> None:
    """Complete a prompt, and wait until the place has all of its blocks."""
    assert is_right(await gateway.complete(prompt), prompt)
    await stored(gateway, place, N_BLOCKS)


async def continues(gateway: FakeGateway, prompt: list[int] = PROMPT, *, known: int = CACHED) -> None:
    """Complete a prompt again, of which `known` tokens are cached."""
    answer = await gateway.complete(prompt)
    assert is_right(answer, prompt)
    assert cached(answer) == known


@contextmanager
def broken_ranks(worker: RunningWorker) -> Iterator[None]:
    """Reads of blocks end in an error that no code expects."""
    worker.group.read_error = RuntimeError("planted")
    yield
    worker.group.read_error = None


@pytest.mark.parametrize(
    ("place", "reason", "fault"), [("host", "error", "planted"), ("disk", "error", "planted"), ("disk", "io", "large")]
)
async def test_place_that_fails_says_so_and_stores_the_blocks_once_the_cause_is_gone(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reason: str, fault: str
) -> None:
    """An error in the server, or a disk without room."""
    monkeypatch.setattr(tiers, "PAUSE_S", 0.05)
    settings = host() if place == "host" else disk(tmp_path)
    async with a_worker(redis_url, **settings) as (worker, gateway):
        with broken_ranks(worker) if reason == "error" else no_room(1):
            assert is_right(await gateway.complete(PROMPT), PROMPT)
            await gateway.wait_state(lambda state: fault in state.kv_places[0].fault)
            assert await level(worker, "kv_place_failing", place=place) == 1
        assert await metric(worker, "kv_place_failures", place=place, reason=reason) > 0
        await stored(gateway, pb.KV_PLACE_HOST if place == "host" else pb.KV_PLACE_DISK, N_BLOCKS)
        await gateway.wait_state(lambda state: not state.kv_places[0].fault)
        assert await level(worker, "kv_place_failing", place=place) == 0


async def test_sessions_that_come_together_load_all_blocks_of_their_earlier_turns(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve sessions are four times the KV cache. The speed of this machine decides nothing."""
    monkeypatch.setattr(tiers.Tiers, "_is_slow", lambda *_: False)
    monkeypatch.setattr(loader, "LEAST_S", loader.MOST_S)
    monkeypatch.setattr(StepTimer, "share_min_tokens", lambda *_: 1)
    sessions = [[first, *PROMPT] for first in range(70, 82)]
    async with a_worker(redis_url, **host()) as (worker, gateway):
        for known, n_tokens in ((0, 320), (320, 480), (480, 601)):
            answers = [await gateway.submit(session[:n_tokens]) for session in sessions]
            for answer, session in zip(answers, sessions, strict=True):
                await answer.end.wait()
                assert is_right(answer, session[:n_tokens])
                assert cached(answer) == known
            await stored(gateway, pb.KV_PLACE_HOST, len(sessions) * (n_tokens // 16))
        assert await metric(worker, "kv_place_failures", place="host", reason="late") == 0


async def test_memory_of_a_cpu_serves_more_as_kv_cache_than_as_host_tier(redis_url: str) -> None:
    """Three prompts in turn, twice, in memory for all of them; the host tier repeats blocks of the KV cache."""
    prompts, computed = [[first, *PROMPT[1:]] for first in (70, 71, 72)], list[float]()
    for pool, tier in ((128, 0), (64, 64)):
        settings = {**host(tier), "kv_tokens": 16 * pool}
        async with a_worker(redis_url, **settings) as (worker, gateway):
            for prompt in prompts:
                await gateway.complete(prompt)
            before = await metric(worker, "prefill_tokens")
            for prompt in prompts:
                assert is_right(await gateway.complete(prompt), prompt)
            computed.append(await metric(worker, "prefill_tokens") - before)
    whole, divided = computed
    assert whole == len(prompts) * (len(PROMPT) - CACHED)
    assert divided > 50 * whole


@pytest.mark.parametrize("place", ["host", "disk"])
async def test_evicted_prefix_is_loaded_instead_of_computed(redis_url: str, tmp_path: Path, place: str) -> None:
    settings = host() if place == "host" else disk(tmp_path)
    number = pb.KV_PLACE_HOST if place == "host" else pb.KV_PLACE_DISK
    async with a_worker(redis_url, **settings) as (worker, gateway):
        await begins(gateway, number)
        await evict(gateway)
        await continues(gateway)
        assert await metric(worker, "kv_place_hits", place=place) == N_BLOCKS
        assert await metric(worker, "kv_place_loaded_bytes", place=place) == N_BLOCKS * BLOCK_BYTES
        (state,) = (await gateway.state()).kv_places
        assert state.place == number
        assert state.capacity_bytes == 1000 * BLOCK_BYTES
        assert state.load_bytes_per_s > 0


async def test_load_slower_than_computing_is_not_begun_until_its_speed_is_forgotten(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker measures both: the first load takes seconds, and computing the prompt 19 steps of a millisecond."""
    monkeypatch.setattr(loader, "LEAST_S", loader.MOST_S)
    read = HostStore.read

    async def read_late(store: HostStore, digests: Sequence[bytes]) -> list[bytes | None]:
        await asyncio.sleep(0.5)
        return await read(store, digests)

    monkeypatch.setattr(HostStore, "read", read_late)
    async with a_worker(redis_url, **host()) as (worker, gateway):
        await begins(gateway, pb.KV_PLACE_HOST)
        for first, known, n_slow in ((1, CACHED, 0), (4, 0, N_BLOCKS)):
            await evict(gateway, first)
            await continues(gateway, known=known)
            assert await metric(worker, "kv_place_failures", place="host", reason="slow") == n_slow
        assert await metric(worker, "kv_place_loaded_blocks", place="host") == N_BLOCKS
        monkeypatch.setattr(loader, "REMEMBER_S", 0.0)
        await evict(gateway, 7)
        await continues(gateway)


async def test_steps_of_other_requests_go_on_during_a_load(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_S", loader.MOST_S)
    begun, may_end, read = asyncio.Event(), asyncio.Event(), HostStore.read

    async def read_later(store: HostStore, digests: Sequence[bytes]) -> list[bytes | None]:
        begun.set()
        await may_end.wait()
        return await read(store, digests)

    monkeypatch.setattr(HostStore, "read", read_later)
    async with a_worker(redis_url, **host()) as (_, gateway):
        await begins(gateway, pb.KV_PLACE_HOST)
        await evict(gateway)
        loaded = await gateway.submit(PROMPT)
        await begun.wait()
        other = [*PROMPT[::-1][:100]]
        assert is_right(await gateway.complete(other), other)
        assert not loaded.outputs
        may_end.set()
        await loaded.end.wait()
        assert is_right(loaded, PROMPT)
        assert cached(loaded) == CACHED


async def test_load_is_written_a_staging_area_at_a_time(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks write one between two steps: see test_orders.py."""
    monkeypatch.setattr(device, "STAGING_BYTES", 4 * BLOCK_BYTES)
    sizes, write = list[int](), FakeGroup.write_blocks

    async def writing(group: FakeGroup, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        sizes.append(len(blocks))
        await write(group, blocks, contents)

    monkeypatch.setattr(FakeGroup, "write_blocks", writing)
    monkeypatch.setattr(loader, "LEAST_S", loader.MOST_S)
    async with a_worker(redis_url, **host()) as (_, gateway):
        await begins(gateway, pb.KV_PLACE_HOST)
        await evict(gateway)
        await continues(gateway)
    assert sizes == [4] * 9 + [1]


async def test_rollout_on_one_claim_leaves_every_worker_the_blocks_of_its_predecessor(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a StatefulSet: the last pod ends, then its successor of another version and with other settings starts."""
    prompts = [PROMPT, PROMPT[::-1]]
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(AsyncExitStack()) for _ in prompts]
        for pod, prompt in zip(pods, prompts, strict=True):
            _, gateway = await pod.enter_async_context(a_worker(redis_url, **disk(tmp_path)))
            await begins(gateway, pb.KV_PLACE_DISK, prompt)
        monkeypatch.setattr(main, "version", lambda _: "9.9.9")
        for pod, prompt in zip(reversed(pods), reversed(prompts), strict=True):
            await pod.aclose()
            _, gateway = await stack.enter_async_context(a_worker(redis_url, max_running=4, **disk(tmp_path)))
            await stored(gateway, pb.KV_PLACE_DISK, N_BLOCKS)
            await continues(gateway, prompt)


async def test_damaged_file_is_computed_and_counted(redis_url: str, tmp_path: Path) -> None:
    async with a_worker(redis_url, **disk(tmp_path)) as (worker, gateway):
        await begins(gateway, pb.KV_PLACE_DISK)
        shorten_files(tmp_path)
        await evict(gateway)
        await continues(gateway, known=0)
        assert await metric(worker, "kv_place_failures", place="disk", reason="corrupt") == 1


async def test_sleep_clears_the_host_and_keeps_the_disk(redis_url: str, tmp_path: Path) -> None:
    async with a_worker(redis_url, **{**host(), **disk(tmp_path)}) as (_, gateway):
        await begins(gateway, pb.KV_PLACE_HOST)
        await stored(gateway, pb.KV_PLACE_DISK, N_BLOCKS)
        await gateway.stub.Sleep(pb.SleepRequest())
        subscriber = Subscriber(gateway, pb.KvSyncRequest())
        await subscriber.holds_below(pb.KV_PLACE_DISK, N_BLOCKS)
        assert not subscriber.below[pb.KV_PLACE_HOST]
        subscriber.stop()
        await gateway.stub.Wake(pb.WakeRequest())
        await gateway.wait_serving()
        await continues(gateway)


async def test_lost_ranks_find_their_blocks_again(redis_url: str) -> None:
    async with a_worker(redis_url, **host()) as (worker, gateway):
        await begins(gateway, pb.KV_PLACE_HOST)
        worker.group.die()
        await until(lambda: worker.group.starts == 2)
        await gateway.wait_serving()
        await continues(gateway)


async def cost(worker: RunningWorker, gateway: FakeGateway, prompt: list[int], salt: str) -> dict[str, float]:
    """Cached tokens of an answer, prompt tokens that it computed, and blocks that it looked up and loaded."""

    async def totals() -> dict[str, float]:
        names = ("kv_place_hits", "kv_place_misses", "kv_place_loaded_blocks")
        of_places = {f"{name} {at}": await metric(worker, name, place=at) for name in names for at in ("host", "disk")}
        return {"computed": await metric(worker, "prefill_tokens"), **of_places}

    before = await totals()
    answer = await gateway.complete(prompt, cache_salt=salt)
    assert is_right(answer, prompt)
    after = await totals()
    return {"cached": cached(answer), **{name: after[name] - before[name] for name in after}}


@pytest.mark.parametrize("known", [0, 100])
async def test_pull_takes_blocks_that_its_source_has_in_host_memory(redis_url: str, known: int) -> None:
    """The first `known` tokens are in the source's KV cache again."""
    async with a_worker(redis_url, **host()) as (one, source), a_worker(redis_url, **SMALL) as (two, target):
        await begins(source, pb.KV_PLACE_HOST)
        await evict(source)
        if known:
            await source.complete([*PROMPT[:known], *[95] * 500])
        pulled = await target.complete(PROMPT, pull=await hint_of(source, one.address, tokens=CACHED))
        assert is_right(pulled, PROMPT)
        assert cached(pulled) == CACHED
        assert await metric(one, "sent_blocks") == await metric(two, "pulled_blocks") == N_BLOCKS


@pytest.mark.parametrize("place", ["device", "host", "disk"])
async def test_another_tenant_s_prompt_costs_as_much_as_an_unknown_one(
    redis_url: str, tmp_path: Path, place: str
) -> None:
    """So neither an answer nor its time shows that a prompt has come before."""
    n_blocks = {at: 1000 if at == place else 1 for at in ("host", "disk")}
    async with a_worker(redis_url, **{**host(n_blocks["host"]), **disk(tmp_path, n_blocks["disk"])}) as at:
        worker, gateway = at
        await gateway.complete(PROMPT, cache_salt="one")
        if place != "device":
            await stored(gateway, pb.KV_PLACE_HOST if place == "host" else pb.KV_PLACE_DISK, N_BLOCKS)
            await evict(gateway)
        unknown = await cost(worker, gateway, PROMPT[::-1], "three")
        assert unknown["cached"] == 0
        assert unknown["computed"] == len(PROMPT)
        assert await cost(worker, gateway, PROMPT, "two") == unknown
        own = await cost(worker, gateway, PROMPT, "one")
        assert own["cached"] == CACHED
        assert own.get(f"kv_place_loaded_blocks {place}", 0) == (0 if place == "device" else N_BLOCKS)


async def test_another_tenant_does_not_wait_for_a_prompt_that_is_being_computed(redis_url: str) -> None:
    async with a_worker(redis_url, **host()) as (worker, gateway):
        worker.group.step_s = 0.01
        answers = [await gateway.submit(PROMPT, cache_salt=salt) for salt in ("one", "two")]
        for answer in answers:
            await answer.end.wait()
            assert is_right(answer, PROMPT)
            assert cached(answer) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_gib": 1e-9}, "RYZANSTEIN_HOST_CACHE_GIB: 1 bytes hold no KV block"),
        ({"disk_cache_gib": 1e-8, "disk_cache": ""}, "RYZANSTEIN_DISK_CACHE_GIB: 10 bytes hold no KV block"),
        ({"disk_cache": "/proc/none"}, "RYZANSTEIN_DISK_CACHE /proc/none: "),
    ],
)
async def test_sizes_and_folders_that_cannot_work_end_the_start(
    redis_url: str, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    if settings.get("disk_cache") == "":
        settings = {**settings, "disk_cache": str(tmp_path)}
    with pytest.raises(StartupError, match=message):
        async with running_worker(redis_url, **settings) as worker:
            await worker.task


async def test_killed_worker_s_blocks_are_loaded_by_its_successor(redis_url: str, tmp_path: Path) -> None:
    """With real ranks: the text is that of a computation."""
    prompt = [2 + i % 4000 for i in range(700)]
    settings = {"DTYPE": "bfloat16", "DISK_CACHE": str(tmp_path / "kv"), "MAX_BATCHED_TOKENS": "64"}
    sampling = pb.Sampling(max_tokens=24, ignore_eos=True)
    with server_process(tmp_path, redis_url, **settings) as first:
        async with FakeGateway(first.address) as gateway:
            await gateway.wait_serving()
            computed = await gateway.complete(prompt, sampling=sampling)
            await stored(gateway, pb.KV_PLACE_DISK, 43)
            first.process.kill()
            first.process.wait()
    with server_process(tmp_path, redis_url, **settings) as second:
        async with FakeGateway(second.address) as gateway:
            await gateway.wait_serving()
            await stored(gateway, pb.KV_PLACE_DISK, 43)
            loaded = await gateway.complete(prompt, sampling=sampling)
    assert loaded.ids == computed.ids
    assert cached(loaded) == 43 * 16
