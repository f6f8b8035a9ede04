"""Defaults of sampling parameters: the model's recommendations, and the settings over them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from services.cli.stack.default_model import GENERATION_CONFIG, TINY_MODEL
from services.common.lifecycle import StartupError
from services.worker.native.opening import open_native
from services.worker.settings import WorkerSettings


async def defaults(monkeypatch: pytest.MonkeyPatch, override: str) -> Any:
    monkeypatch.setenv("RYZANSTEIN_OVERRIDE_GENERATION_CONFIG", override)
    settings = WorkerSettings(model=str(TINY_MODEL), worker_id="w", kv_tokens=256)
    engine = await open_native(settings, TINY_MODEL, Mock(), Mock(), make_ranks=Mock())
    return engine.model.sampling_defaults


async def test_settings_outweigh_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await defaults(monkeypatch, "{}") == {"temperature": 0.7, "top_p": 0.95}
    assert await defaults(monkeypatch, GENERATION_CONFIG) == {"temperature": 0, "top_p": 0.95}
    assert await defaults(monkeypatch, '{"top_k": 20, "top_p": 1}') == {"temperature": 0.7, "top_p": 1, "top_k": 20}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('{"temperature": 101}', "`temperature` must be from 0 to 100, not 101.0"),
        ('{"heat": 1}', "`heat` is none of temperature, top_p, top_k, min_p, repetition_penalty"),
    ],
)
async def test_a_wrong_default_is_named(monkeypatch: pytest.MonkeyPatch, override: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"RYZANSTEIN_OVERRIDE_GENERATION_CONFIG: {message}"):
        await defaults(monkeypatch, override)
