"""The settings of a pod with several models: each worker's own, and clear refusals."""

from __future__ import annotations

import json

import pytest

from services.common.lifecycle import StartupError, read_settings
from services.worker.pool.settings import PoolSettings
from services.worker.settings import WorkerSettings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORKER_ID": "pod-0", "MAX_AWAKE": "1", "KV_TOKENS": "4096", "ADAPTER_SLOTS": "3"}.items():
        monkeypatch.setenv(f"RYZANSTEIN_{name}", value)
    return monkeypatch


def test_settings_of_a_model_replace_those_of_the_pod(environment: pytest.MonkeyPatch) -> None:
    adapters = {"adapters": {"sql": "/a/sql"}, "adapter_pins": ["sql"], "adapter_sources": ["/a", "/b"]}
    models = [{"model": "/m/a", "quantization": "int8"}, {"model": "/m/b", "kv_tokens": 512, **adapters}]
    environment.setenv("RYZANSTEIN_MODELS", json.dumps(models))
    settings = read_settings(PoolSettings)
    read = []
    for env in settings.environments():
        with environment.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            read.append(read_settings(WorkerSettings))
    assert tuple(read) == settings.workers(), "the environment says the same"
    assert [worker.worker_id for worker in read] == ["pod-0.0", "pod-0.1"]
    assert [(worker.worker_port, worker.metrics_port) for worker in read] == [(50054, 9101), (50055, 9102)]
    assert {(worker.memory_host, worker.max_awake) for worker in read} == {("pod-0", 1)}
    assert [(worker.kv_tokens, worker.quantization) for worker in read] == [(4096, "int8"), (512, "auto")]
    assert (read[1].adapters, read[1].adapter_pins, read[1].adapter_sources) == (
        {"sql": "/a/sql"},
        ("sql",),
        ("/a", "/b"),
    )


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([], "RYZANSTEIN_MODELS.*at least 1 item"),
        ([{"model": "/a"}] * 33, "RYZANSTEIN_MODELS.*at most 32 items"),
        ([{"served_model_name": "a"}], r"RYZANSTEIN_MODELS.*\[0\]\.model: is not set"),
        ([{"model": "/a"}, {"model": "/b", "worker_port": 1}], r"\[1\]\.worker_port: not a setting of one model"),
        ([{"model": "/a"}, {"model": "/b", "kv_tokens": -1}], r"RYZANSTEIN_MODELS\[1\]\.kv_tokens: .*0"),
        ([{"model": "/x/a"}, {"model": "/y/a"}], "RYZANSTEIN_MODELS: several models are called a"),
        (
            [{"model": "/a", "pinned": True}, {"model": "/b"}],
            "RYZANSTEIN_MODELS: with RYZANSTEIN_MAX_AWAKE 1, 1",
        ),
    ],
)
def test_wrong_models_are_refused_by_name(
    environment: pytest.MonkeyPatch, models: list[object], complaint: str
) -> None:
    environment.setenv("RYZANSTEIN_MODELS", json.dumps(models))
    with pytest.raises(StartupError, match=complaint):
        read_settings(PoolSettings)
