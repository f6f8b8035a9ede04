"""Components as users of Redis: each does its own work."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from redis import Redis as Client
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.common.adapters import RegisteredAdapter
from services.common.fine_tuning.records import JobCheckpoint, Order, Presence
from services.common.fine_tuning.store import TuningStore, new_event
from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseTable, LeaseWatcher
from services.common.redis_client import RedisAccess, open_redis
from services.common.tasks import end_tasks
from services.router.sessions import Binding, Sessions
from services.worker.api.adapter_pins import follow_pins
from services.worker.engine.request import AdapterRef
from tests.integration.gateway.redis_server import running_redis
from tests.integration.router.processes import until
from tests.redis_users import COMPONENTS, PASSWORD, REFUSED, SERVER, refused, rules

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = RedisKeys("llm")
T = TypeVar("T")
ORDER = Order(
    id="ftjob-1", tenant="t", model="tiny", training_file="f", validation_file=None, suffix=None, seed=7, n_epochs=2,
    batch_size=4, learning_rate_multiplier="auto", lora_rank=4, quantization="none", metadata=None, credential="",
    created_at=0,
)  # fmt: skip
ADMIN = "admin"
LEASE = Lease("w", "incarnation", "host:1", "tiny", "serving")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Redis]]:
    """A client of each component, and of `admin`, who may do everything."""
    socket = tmp_path_factory.mktemp("redis") / "r.sock"
    command = [str(SERVER), "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220  # starting takes no time
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(open_redis(RedisAccess(f"unix://{socket}"), 5))

        async def up() -> bool:
            with suppress(RedisError, OSError):
                return bool(await admin.ping())
            return False

        await until(up)
        clients = {ADMIN: admin}
        for component in COMPONENTS:
            await admin.execute_command("ACL", "SETUSER", component, "on", ">pw", *rules(component, KEYS.namespace))
            access = access_of(component, socket)
            clients[component] = await stack.enter_async_context(open_redis(access, 5))
        yield clients
    process.kill()
    process.wait()


def access_of(component: str, socket: Path) -> RedisAccess:
    return RedisAccess(f"unix://{socket}", component, "pw")


async def test_an_older_server_restricts_gateways_as_well(tmp_path: Path) -> None:
    """The oldest that is supported has no rights to read alone, which the other components need."""
    with running_redis(tmp_path) as server, Client.from_url(server.url) as gateway:
        mine = rules("gateway", KEYS.namespace)
        server.client.execute_command("ACL", "SETUSER", "gateway", "reset", "on", f">{PASSWORD}", *mine)
        for command in refused("gateway", KEYS):
            with pytest.raises(RedisError, match=f"{REFUSED}|unknown command|unknown subcommand"):
                gateway.execute_command(*command)


async def test_each_does_its_own_work(users: dict[str, Redis]) -> None:
    await users[ADMIN].execute_command("ACL", "LOG", "RESET")
    access = RedisAccess("redis://unused")
    table = LeaseTable(users["worker"], KEYS)
    watching = {name: LeaseWatcher(users[name], KEYS, access).watch() for name in ("router", "coordinator")}
    for leases in watching.values():
        assert await anext(leases) == {}
    await table.write(LEASE)
    for leases in watching.values():
        async for seen in leases:
            if seen:
                break
        assert seen == {"w": LEASE}
        await leases.aclose()
    await table.remove("w")
    adapter = RegisteredAdapter("a", "tiny", "digest", "/a", pinned=True)
    await users["gateway"].hset(KEYS.adapters, adapter.name, adapter.to_json())
    pinned = asyncio.Queue[Sequence[AdapterRef]]()
    following = asyncio.create_task(follow_pins(users["worker"], KEYS, access, "tiny", pinned.put_nowait))
    assert await pinned.get() == (AdapterRef("digest", "/a", "a"),)
    await end_tasks([following])
    sessions = Sessions(users["router"], KEYS, access, 5, lambda _: None)
    bound = Binding("w", "incarnation")
    assert (await sessions.bind("t", "s", None, bound)).binding == bound
    held = await sessions.read("t", "s", touch=True)
    assert held is not None
    assert held.binding == bound
    await fine_tune(TuningStore(users["gateway"], KEYS, _once, 60), TuningStore(users["finetuner"], KEYS, _once, 60))
    assert await users[ADMIN].execute_command("ACL", "LOG") == []


async def fine_tune(gateway: TuningStore, finetuner: TuningStore) -> None:
    """A job's whole life, by those who work on it."""
    await finetuner.appear("f", Presence(models=["tiny"], quantizations=["none"]))
    assert await gateway.create(ORDER)
    checking = await gateway.claim("g", 10, ["check"])
    assert checking is not None
    await gateway.report(checking, 0, fields={"status": "queued", "stage": "train"})
    training = await finetuner.claim("f", 10, ["train"])
    assert training is not None
    assert await finetuner.file(ORDER.tenant, ORDER.training_file) == b""
    saved = JobCheckpoint(id="c", created_at=0, step=1, folder="c", metrics={})
    await finetuner.report(training, 10, [new_event("begun")], [saved], {"step": 1})
    await finetuner.end(training, "failed", [], {})
    assert await finetuner.load(training.member) == await gateway.get(ORDER.tenant, ORDER.id)
    assert await finetuner.served_folders() == {"/a"}
    await finetuner.leave("f")


async def _once(operation: Callable[[], Awaitable[T]]) -> T:
    return await operation()
