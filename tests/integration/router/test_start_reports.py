"""How far starts without a worker are: from an API server over TLS, and from a Redis with a router's rights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.download_report import reporting
from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.common.settings import ServiceSettings
from services.common.tasks import end_tasks
from services.router.api_server import ApiServer
from services.router.start_reports import StartReports, read_download, stage_of_pods
from services.router.starts import StartReport, Starts
from tests.integration.router.config_maps import ConfigMaps, Object
from tests.integration.router.processes import KillableRedis, until

SET = "rz-workers-a"
SCHEDULED = {"type": "PodScheduled", "status": "True"}
RUNS: Object = {"state": {"running": {"startedAt": "2026-11-29T00:00:00Z"}}}
ENDED: Object = {"state": {"terminated": {"exitCode": 0}}}


def waits(reason: str) -> Object:
    return {"state": {"waiting": {"reason": reason}}}


def pod(
    name: str = f"{SET}-0", *, first: tuple[Object, ...] = (), main: tuple[Object, ...] = (), **fields: object
) -> Object:
    """A pod on a node, with init containers and containers in these states."""
    status = {"conditions": [SCHEDULED], "initContainerStatuses": first, "containerStatuses": main}
    return {"metadata": {"name": name}, "status": status, **fields}


@pytest.mark.parametrize(
    ("pods", "stage"),
    [
        ([], None),
        ([pod(status={})], "pending"),
        ([pod(status={"conditions": [SCHEDULED | {"status": "False"}]})], "pending"),
        ([pod()], "scheduled"),
        ([pod(first=(waits("PodInitializing"),), main=(waits("PodInitializing"),))], "scheduled"),
        ([pod(main=(waits("ImagePullBackOff"),))], "image"),
        ([pod(first=(waits("ErrImagePull"),), main=(waits("PodInitializing"),))], "image"),
        ([pod(first=(RUNS,), main=(waits("PodInitializing"),))], "fetching"),
        ([pod(first=(ENDED, RUNS), main=(waits("PodInitializing"),))], "fetching"),
        ([pod(first=(ENDED,), main=(RUNS,))], "loading"),
        ([pod(), pod(f"{SET}-1", first=(RUNS,))], "fetching"),
        ([pod("rz-workers-b-0"), pod(f"{SET}-x-0"), pod(f"{SET}-new")], None),
        ([pod(metadata={"name": f"{SET}-0", "deletionTimestamp": "2026-11-29T00:00:00Z"})], None),
        ([{"metadata": {"name": f"{SET}-0"}}], "pending"),
    ],
)
def test_stage_is_that_of_the_pod_that_is_furthest(pods: list[Object], stage: str | None) -> None:
    assert stage_of_pods(pods, [SET]) == (StartReport(stage, stage) if stage else None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"done": 2, "of": 1}', '{"done": -1, "of": 1}', '{"done": "1", "of": 2}']
)
def test_unreadable_download_is_no_report(text: str) -> None:
    assert read_download(text) is None


@asynccontextmanager
async def looking(server: KillableRedis, api: ConfigMaps, folder: Path, *models: str) -> AsyncIterator[Starts]:
    starts, access = Starts(), RedisAccess(server.url_of("router"))
    client = open_redis(access, 5.0)
    reports = StartReports(client, RedisKeys("default"), access, starts, lambda: models)
    task = asyncio.create_task(reports.run(ApiServer(folder), lambda model: [SET] if model == "scaled" else []))
    try:
        yield starts
    finally:
        await end_tasks([task])
        await client.aclose()


async def shows(starts: Starts, model: str, text: str | None) -> None:
    async def shown() -> bool:
        report = starts.reported.get(model)
        return (report.text if report else None) == text

    await until(shown)


async def test_stages_of_pods_are_shown_while_requests_wait_and_a_refusal_is_logged_once(
    redis_server: KillableRedis, config_maps: ConfigMaps, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(config_maps.environment["SERVICE_ACCOUNT_FOLDER"])
    config_maps.pods = [pod()]
    async with looking(redis_server, config_maps, folder, "scaled", "other") as starts:
        await shows(starts, "scaled", "scheduled")
        assert "other" not in starts.reported
        config_maps.pods = [pod(first=(RUNS,))]
        await shows(starts, "scaled", "fetching")
        with caplog.at_level(logging.WARNING):
            config_maps.refuse(403)
            await shows(starts, "scaled", None)
            await asyncio.sleep(0)
        config_maps.refuse(0)
        await shows(starts, "scaled", "fetching")
    assert len([line for line in caplog.messages if "pods cannot be listed" in line]) == 1


class StartingDownload:
    total = 5 << 30

    def __init__(self) -> None:
        self.done = 0


async def test_download_that_a_worker_reports_is_shown_until_its_end(
    redis_server: KillableRedis, config_maps: ConfigMaps
) -> None:
    folder = Path(config_maps.environment["SERVICE_ACCOUNT_FOLDER"])
    settings, download = ServiceSettings(redis_url=redis_server.url_of("worker")), StartingDownload()
    async with looking(redis_server, config_maps, folder, "m") as starts:
        async with reporting(settings, "m") as begins:
            begins(download)
            await shows(starts, "m", "fetching 0.0 of 5.0 GiB")
            download.done = 3 << 30
            await shows(starts, "m", "fetching 3.0 of 5.0 GiB")
        await shows(starts, "m", None)


async def test_download_goes_on_without_redis(redis_server: KillableRedis, caplog: pytest.LogCaptureFixture) -> None:
    redis_server.kill()
    settings = ServiceSettings(redis_url=redis_server.url_of("worker"))
    async with reporting(settings, "m") as begins:
        begins(StartingDownload())

        async def logged() -> bool:
            return any("the download is not reported" in line for line in caplog.messages)

        await until(logged)
    redis_server.start()
