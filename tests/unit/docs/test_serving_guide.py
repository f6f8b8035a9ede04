"""The serving guide's table of options is what `ryzanstein up` takes, with its defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from services.cli.main import app
from services.compute.model.registry import FAMILIES

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text()
ROW = re.compile(r"^\| (?P<options>`--.+?) \| (?P<default>[^|]+) \| [^|]+ \|$", re.MULTILINE)
# Facts of the guide in words.
WORDS: dict[str, object] = {
    "SmolLM2": None,
    "chosen by the worker": 0,
    "the model's": 0,
    "off": 0,
    "embedded": "",
    "none": "",
    "this one": "",
    "no arguments": None,
    "no adapters": None,
    "no pins": None,
    "all equal": None,
    "no settings": None,
    "its own": None,
    "cost": "cost",
    "auto": "auto",
}


def test_every_architecture_is_listed() -> None:
    assert "[these families](reference/families.md)" in GUIDE
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "families.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(FAMILIES)


def documented() -> dict[str, object]:
    """Default by option; a row may hold several."""
    actual: dict[str, object] = {}
    for row in ROW.finditer(GUIDE):
        names = re.findall(r"`(--[a-z-]+)", row["options"])
        defaults = [default.strip() for default in row["default"].split(",")]
        actual |= {name: WORDS.get(d, d) for name, d in zip(names, defaults, strict=True)}
    return actual


def taken() -> dict[str, object]:
    options: list[Any] = typer.main.get_group(app).commands["up"].params
    named = [option for option in options if option.opts[0].startswith("--")]
    return {option.opts[0]: getattr(option.default, "value", option.default) for option in named}


def test_every_option_is_documented_with_its_default() -> None:
    stated = {name: str(default) for name, default in documented().items()}
    shown = {name: f"{default:g}" if isinstance(default, float) else str(default) for name, default in taken().items()}
    assert stated == shown
