"""quantization_config of published checkpoints is read; what is not implemented is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.compute.model.families.config import Config
from services.compute.model.formats.registry import FORMATS, read_layouts
from services.compute.model.layout import Layout
from services.compute.model.spec import ModelError

_DATA = Path(__file__).parent / "published"  # values as published, one checkpoint a line
PUBLISHED: list[dict[str, Any]] = [
    json.loads(line) for file in sorted(_DATA.glob("*.jsonl")) for line in file.read_text().splitlines()
]


def _read(values: dict[str, Any]) -> tuple[Layout, ...]:
    config = Config(values, Path("config.json"))
    layouts = read_layouts(config)
    config.finish()
    return layouts


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["name"] for row in PUBLISHED])
def test_published_configurations_are_read(row: dict[str, Any]) -> None:
    layouts = _read({"quantization_config": row["quantization_config"]})
    actual = [
        {"bits": layout.codes.packing.bits if layout.codes.packing else 8, "block": list(layout.scales.block)}
        for layout in layouts
    ]
    assert actual == (row["means"] if isinstance(row["means"], list) else [row["means"]])


def test_every_method_has_published_configs() -> None:
    configs = [row["quantization_config"] for row in PUBLISHED]
    for method in FORMATS:
        mine = [config for config in configs if config["quant_method"] == method.quant_method]
        assert any(not method.variants or config.get("format") in method.variants for config in mine), method.title


def test_the_key_of_older_checkpoints() -> None:
    values = PUBLISHED[0]["quantization_config"]
    assert _read({"compression_config": values}) == _read({"quantization_config": values})


@pytest.mark.parametrize("nothing", [None, False, {}])
def test_no_configuration(nothing: object) -> None:
    assert _read({"quantization_config": nothing}) == ()


def test_unimplemented_methods_are_rejected_by_name() -> None:
    known = ", ".join(sorted({method.quant_method for method in FORMATS}))
    fp8 = {"quant_method": "fp8"}
    for values, message in (
        ({"quant_method": "hqq", "bits": 4}, f".quant_method: 'hqq' is not implemented; known: {known}"),
        ({"bits": 4}, ".quant_method: None is not implemented"),
        ("fp8", ": expected an object, found 'fp8'"),
        ({**fp8, "fmt": "e5m2"}, ".fmt: 'e5m2' is not implemented; allowed: 'e4m3'"),
        ({**fp8, "twist": 2}, ".twist: 2 is not implemented"),
        ({**fp8, "weight_block_size": 128}, ".weight_block_size: expected two sizes"),
    ):
        with pytest.raises(ModelError) as refused:
            _read({"quantization_config": values})
        assert f"config.json: quantization_config{message}" in str(refused.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ModelError) as refused:
        _read({"twist": 3, "quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "lean": 1}})
    for problem in ("twist: 3", "quantization_config.fmt: 'e5m2'", "quantization_config.lean: 1"):
        assert problem in str(refused.value)
