"""Write what is tested of each family, for `ryzanstein models` and the page of families (`make reference`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

from services.compute.model.families.config import Config
from services.compute.model.registry import FAMILIES, interpret
from services.tools.checker.families import TESTED
from services.tools.checker.features import features
from tests.unit.compute.model.test_encoders import CONFIGS as ENCODERS
from tests.unit.compute.model.test_published import PUBLISHED
from tests.unit.compute.model.zoo import RENAMED, VARIANTS

# Models that tests serve with their weights, by model type.
_SERVED = {
    "llama": ("ryzanstein-tiny", "SmolLM2-135M-Instruct"),  # tests/e2e, tests/unit/cli/test_default_model.py
    "bert": ("all-MiniLM-L6-v2",),  # tests/e2e/test_embedding_model.py
}


def tested() -> dict[str, dict[str, list[str]]]:
    """Return the features, what ranks divide, and the tests' checkpoints of each family, by its model type."""
    actual: dict[str, dict[str, dict[str, None]]] = {}
    for kind, name, values in _configs():
        family, spec = interpret(Config(values, Path("config.json")))
        named = {"features": features(spec), "divided": [what for what, _ in spec.divided], kind: [name]}
        of_family = actual.setdefault(family.model_type, {})
        for key, texts in (named | {"served": _SERVED.get(family.model_type, ())}).items():
            of_family.setdefault(key, {}).update(dict.fromkeys(texts))
    types = (family.model_type for family in FAMILIES.values())
    return {name: {key: list(texts) for key, texts in sorted(actual[name].items()) if texts} for name in types}


def _configs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield random or published, the checkpoint's name, and its config.json."""
    for variant, make in VARIANTS.items():
        config = make()
        values = json.loads(config.to_json_string())
        if variant in RENAMED:
            tensors = dict(transformers.AutoModelForCausalLM.from_config(config).state_dict())
            values = RENAMED[variant](values, tensors)[0]
        yield "random", variant, values
    for name, make in ENCODERS.items():
        yield "random", f"{name}Model", json.loads(make().to_json_string()) | {"architectures": [f"{name}Model"]}
    for row in PUBLISHED:
        yield "published", row["name"], row["config"]


def as_text() -> str:
    """Return the file's text: a line for each family."""
    lines = (f"{json.dumps(name)}: {json.dumps(of_family)}" for name, of_family in tested().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TESTED.write_text(as_text())
