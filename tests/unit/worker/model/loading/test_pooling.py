"""A checkpoint's own pooling is obeyed, and any other one refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.model.loading.pooling import Pooling, PoolingKind, read_pooling
from services.worker.model.spec import ModelError
from services.worker.rank.pooling import PooledSlots

HIDDEN = torch.arange(12.0).view(4, 3) + 1


def _write(folder: Path, modules: list[str] | None, pooling: dict[str, Any] | None) -> Path:
    if modules is not None:
        listed = [
            {"idx": i, "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 3, **pooling}))
    return folder


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, Pooling("mean", True)),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, Pooling("mean", False)),
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True},
            Pooling("last", True),
        ),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, Pooling("cls", False)),
        (None, {"pooling_mode": "lasttoken"}, Pooling("last", True)),
    ],
)
def test_what_is_stored_is_obeyed(
    modules: list[str] | None, pooling: dict[str, Any] | None, expected: Pooling, tmp_path: Path
) -> None:
    assert read_pooling(_write(tmp_path, modules, pooling)) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (None, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not implemented"),
        (None, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"cls_token \+ pooling_mode_mean"),
        (None, {"pooling_mode_mean_tokens": False}, "pooling none is not implemented"),
        (None, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt: False is not"),
        (["Transformer", "Pooling", "Dense"], None, "module 'Dense' is not implemented"),
    ],
)
def test_anything_else_is_refused(
    modules: list[str] | None, pooling: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_pooling(_write(tmp_path, modules, pooling))


@pytest.mark.parametrize(("kind", "expected"), [("mean", HIDDEN.mean(dim=0)), ("cls", HIDDEN[0]), ("last", HIDDEN[-1])])
def test_pools_of_chunks(kind: PoolingKind, expected: torch.Tensor) -> None:
    for normalise in (False, True):
        pools = PooledSlots(Pooling(kind, normalise))
        pools.admit(5)
        pools.add(5, 0, HIDDEN[:1])
        pools.add(5, 1, HIDDEN[1:])
        wanted = expected / expected.norm() if normalise else expected
        assert pools.result(5) == pytest.approx(wanted.tolist())
