"""The replicas of a StatefulSet, through the subresource `scale`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.router.api_server import MERGE_PATCH, ApiServer, KubernetesError

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The replicas that a StatefulSet shall have, at a version."""

    replicas: int
    version: str


async def read_scale(api: ApiServer, stateful_set: str) -> Scale:
    """The scale as it is. Raises KubernetesError."""
    scale = await asyncio.to_thread(api.call, "GET", _path(stateful_set), timeout_s=TIMEOUT_S)
    match scale:
        case {"spec": {"replicas": int(replicas)}, "metadata": {"resourceVersion": str(version)}}:
            return Scale(replicas, version)
        case {"spec": {}, "metadata": {"resourceVersion": str(version)}}:
            return Scale(0, version)  # Kubernetes leaves zeros out
    raise KubernetesError(f"the scale of {stateful_set} cannot be read: {str(scale)[:500]}")


async def write_replicas(api: ApiServer, stateful_set: str, old: Scale, replicas: int) -> None:
    """Change the replicas. Raises KubernetesError, with CONFLICT if the StatefulSet has changed since `old`."""
    patch = {"metadata": {"resourceVersion": old.version}, "spec": {"replicas": replicas}}
    await asyncio.to_thread(
        api.call, "PATCH", _path(stateful_set), patch, timeout_s=TIMEOUT_S, content_type=MERGE_PATCH
    )


def _path(stateful_set: str) -> str:
    return f"/apis/apps/v1/namespaces/{{namespace}}/statefulsets/{stateful_set}/scale"
