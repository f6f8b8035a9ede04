"""KV blocks on a claim: a rollout leaves them to the pod's successor."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.cluster.conftest import settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Kube, Object

pytestmark = pytest.mark.timeout(600)
CLAIM: Object = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "kv-blocks"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
}
VALUES: dict[str, object] = {
    "workers.defaults.resources.requests.cpu": "100m",
    "workers.defaults.diskCache.type": "pvc",
    "workers.defaults.diskCache.existingClaim": "kv-blocks",
    "workers.defaults.diskCache.gib": 1,
}
OTHERS = {**VALUES, "workers.defaults.settings.maxRunning": 16}
ON_DISK = 'ryzanstein_worker_kv_place_{}{{place="disk"'
BLOCK = 16
LONG = "".join(f"def add_{n}(x):\n    return x + {n}\n\n" for n in range(100))  # 1,480 tokens
FILES = """
from pathlib import Path
print(sum(not file.suffix for file in Path("/var/cache/ryzanstein-kv").glob("rz-kv-*/*/??/*")))
"""


@pytest.fixture
def caching(namespace: Kube) -> Installation:
    """One worker, with its blocks on a claim."""
    namespace.apply(CLAIM)
    installation = Installation(namespace)
    installation.install(*settings(VALUES))
    return installation


def ask(installation: Installation, prompt: str) -> httpx.Response:
    body = {"model": "ryzanstein-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{installation.url}/v1/completions", json=body, timeout=120)


def answered(response: httpx.Response) -> tuple[str, int, int]:
    """The text, the tokens of its prompt, and those of them that were not computed."""
    answer: dict[str, Any] = response.raise_for_status().json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_rollout_leaves_blocks_on_a_claim_to_the_next_pod(
    caching: Installation, figures: dict[str, object], request: pytest.FixtureRequest
) -> None:
    kube, before = caching.kube, caching.pod("worker")
    text, n_tokens, n_cached = answered(ask(caching, LONG))
    assert text
    assert n_cached == 0
    n_blocks = n_tokens // BLOCK

    def n_files() -> int:
        return int(kube.exec(before["metadata"]["name"], "python", "-c", FILES))

    kube.until("the prompt's blocks are files", lambda: n_files() >= n_blocks, timeout_s=60, every_s=1)

    caching.install(*settings(OTHERS))
    after = caching.pod("worker")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    kube.until("the pod has read the folder", lambda: caching.metric(after, ON_DISK.format("bytes")) > 0, every_s=1)
    kube.until("the router knows the pod", lambda: ask(caching, "x").is_success, timeout_s=60, every_s=1)

    again, _, n_loaded = answered(ask(caching, LONG))
    assert again == text
    assert n_loaded > n_tokens // 2, "a load of a busy machine may end early"
    assert caching.metric(after, ON_DISK.format("loaded_blocks_total")) >= n_loaded // BLOCK
    assert caching.metric(after, ON_DISK.format("failures_total") + ',reason="corrupt"') == 0
    figures[request.node.name] = {"prompt": n_tokens, "loaded from the claim": n_loaded}
