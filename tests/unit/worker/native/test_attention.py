"""The settings of attention, from the worker's settings to the card, the ranks and their predicted memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.attention import AttentionMode
from services.common.lifecycle import StartupError
from services.compute.model.footprint import footprint
from services.worker.engine.state import EngineModel
from services.worker.native.opening import open_native
from services.worker.native.startup import group_config, read_model
from services.worker.settings import WorkerSettings
from tests.unit.compute.model.zoo import write_with_tokenizer


async def opened(folder: Path = TINY_MODEL, **settings: object) -> EngineModel:
    chosen = WorkerSettings(model=str(folder), device="cpu", **settings)  # type: ignore[arg-type]
    return (await open_native(chosen, folder, Mock(), Mock(), make_ranks=Mock())).model


@pytest.mark.parametrize(
    ("settings", "mode", "modes"),
    [
        ({}, AttentionMode(), ("window",)),
        ({"attention": "window(16, 512)"}, AttentionMode(16, 512), ("window",)),
        ({"page_summaries": True}, AttentionMode(), ("window", "top_k")),
        ({"attention": "top_k(64)"}, AttentionMode(pages=64), ("window", "top_k")),
    ],
)
async def test_settings_reach_the_card(
    settings: dict[str, object], mode: AttentionMode, modes: tuple[str, ...]
) -> None:
    model = await opened(**settings)
    assert (model.attention, model.attention_modes) == (mode, modes)


@pytest.mark.parametrize(("kv_dtype", "share"), [("auto", 16), ("int8", 8.25)])
def test_summaries_are_part_of_the_predicted_memory(kv_dtype: str, share: float) -> None:
    files = read_model(TINY_MODEL)
    plain, summarised = (
        footprint(files.spec, group_config(settings, files)).kv_token
        for settings in (
            WorkerSettings(model=str(TINY_MODEL), device="cpu", dtype="bfloat16", kv_dtype=kv_dtype),  # type: ignore[arg-type]
            WorkerSettings(
                model=str(TINY_MODEL),
                device="cpu",
                dtype="bfloat16",
                kv_dtype=kv_dtype,  # type: ignore[arg-type]
                attention="top_k(64)",
            ),
        )
    )
    assert summarised - plain == pytest.approx(plain / share, rel=0.05)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fields", [{"attention": "top_k(64)"}, {"page_summaries": True}])
def test_top_k_keeps_summaries_on_every_device(device: str, fields: dict[str, Any]) -> None:
    plain = WorkerSettings(model=str(TINY_MODEL), device=device)  # type: ignore[arg-type]
    files = read_model(TINY_MODEL)
    assert not group_config(plain, files).page_summaries
    assert group_config(plain.model_copy(update=fields), files).page_summaries


@pytest.mark.parametrize("variant", ["bloom", "mamba2"])
async def test_a_model_with_linear_biases_or_without_keys_has_no_other_attention(variant: str, tmp_path: Path) -> None:
    write_with_tokenizer(variant, tmp_path)
    with pytest.raises(StartupError, match=r"RYZANSTEIN_ATTENTION window\(0, 64\): this model attends dense"):
        await opened(tmp_path, attention="window(0, 64)")


@pytest.mark.parametrize("variant", ["lfm2", "zamba2", "kimi_linear"])
async def test_attention_layers_between_layers_with_states_have_every_mode(variant: str, tmp_path: Path) -> None:
    write_with_tokenizer(variant, tmp_path)
    model = await opened(tmp_path, attention="top_k(64)")
    assert (model.attention, model.attention_modes) == (AttentionMode(pages=64), ("window", "top_k"))
