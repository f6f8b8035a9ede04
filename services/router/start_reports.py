"""How far starts are before a worker has its lease: downloads that workers report, and pods that Kubernetes shows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
from services.router.api_server import ApiServer, KubernetesError
from services.router.starts import FETCHING, IMAGE, LOADING, PENDING, SCHEDULED, STAGES, StartReport, Starts

LOOK_S = 1.0
POD_TIMEOUT_S = 2.0
_WORKERS = "app.kubernetes.io/component=worker"
_GIB = 1 << 30
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")

log = logging.getLogger(__name__)

Pods = Sequence[Mapping[str, Any]]


class StartReports:
    """Tells `starts` once a second how far models are that requests wait for and that have no worker."""

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        access: RedisAccess,
        starts: Starts,
        wanted: Callable[[], Collection[str]],
    ) -> None:
        """`wanted`: the names of these models."""
        self._client, self._keys, self._starts, self._wanted = client, keys, starts, wanted
        self._outage = RedisOutage(log, access, "downloads of models are not known")
        self._trouble = ""

    async def run(self, api: ApiServer, stateful_sets: Callable[[str], Collection[str]]) -> None:
        """Look until cancelled. `stateful_sets`: those of a model whose pods may be listed."""
        while True:
            if models := set(self._wanted()):
                sets = {model: stateful_sets(model) for model in models}
                pods = await self._list_pods(api) if any(sets.values()) else ()
                downloads = await self._read_downloads(models)
                self._starts.reported = {
                    model: report
                    for model in models
                    if (report := downloads.get(model) or stage_of_pods(pods, sets[model]))
                }
            await asyncio.sleep(LOOK_S)

    async def _read_downloads(self, models: Collection[str]) -> dict[str, StartReport]:
        try:
            stored = {model: await self._client.get(self._keys.download(model)) for model in models}
        except (RedisError, OSError) as error:
            self._outage.failed(error)
            return {}
        self._outage.ended()
        return {model: report for model, text in stored.items() if text and (report := read_download(text))}

    async def _list_pods(self, api: ApiServer) -> Pods:
        options = {"labelSelector": _WORKERS, "resourceVersion": "0"}  # as the API server's cache has them
        path = f"/api/v1/namespaces/{{namespace}}/pods?{urlencode(options)}"
        try:
            items = (await asyncio.to_thread(api.call, "GET", path, timeout_s=POD_TIMEOUT_S)).get("items", ())
        except KubernetesError as error:
            if str(error) != self._trouble:  # once, not at each try
                self._trouble = str(error)
                log.warning("pods cannot be listed, stages of their starts are not known: %s", error)
            return ()
        self._trouble = ""
        return tuple(items)


def read_download(text: bytes | str) -> StartReport | None:
    """The report of a stored download; None if it cannot be read."""
    try:
        match json.loads(text):
            case {"done": int(done), "of": int(total)} if 0 <= done <= total:
                return StartReport(FETCHING, f"{FETCHING} {done / _GIB:.1f} of {total / _GIB:.1f} GiB")
    except ValueError as error:
        log.warning("a download's report ignored: %s", error)
    return None


def stage_of_pods(pods: Pods, stateful_sets: Collection[str]) -> StartReport | None:
    """The stage of the pod of these StatefulSets that will serve first; None without a pod."""
    stages = [_stage(pod.get("status", {})) for pod in pods if _is_of(pod, stateful_sets)]
    return StartReport(stage, stage) if (stage := max(stages, key=STAGES.index, default=None)) else None


def _is_of(pod: Mapping[str, Any], stateful_sets: Collection[str]) -> bool:
    metadata = pod.get("metadata", {})
    owner, _, ordinal = str(metadata.get("name", "")).rpartition("-")
    return owner in stateful_sets and ordinal.isdecimal() and "deletionTimestamp" not in metadata


def _stage(status: Mapping[str, Any]) -> str:
    conditions = {each.get("type"): each.get("status") for each in _list(status, "conditions")}
    if conditions.get("PodScheduled") != "True":
        return PENDING
    first, main = _list(status, "initContainerStatuses"), _list(status, "containerStatuses")
    if any("running" in each.get("state", {}) for each in main):
        return LOADING
    if any("running" in each.get("state", {}) for each in first):
        return FETCHING
    reasons = [each.get("state", {}).get("waiting", {}).get("reason") for each in (*first, *main)]
    return IMAGE if any(reason in _NO_IMAGE for reason in reasons) else SCHEDULED


def _list(status: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    return status.get(key) or ()
