"""Lists the families of models and the formats that a worker serves, from their registries.

`tested.json` says which checkpoints the tests compare with transformers, and what these ask of a worker;
`tests/unit/compute/model/tested.py` makes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.compute.backends import kv_formats
from services.compute.model.families.naming import Family
from services.compute.model.formats.gguf.architectures import ARCHITECTURES
from services.compute.model.formats.registry import FORMATS
from services.compute.model.registry import FAMILIES

TESTED = Path(__file__).with_name("tested.json")
NEEDS = "config.json, *.safetensors, and tokenizer.json or what it is made from; or one GGUF file"


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """One family."""

    architecture: str
    model_type: str
    does: tuple[str, ...]  # generate, embed, classify
    about: str
    features: tuple[str, ...]  # features that some of its models need
    divided: tuple[str, ...]  # parts that ranks split: the number of each is a multiple of that of ranks
    formats: tuple[str, ...]  # formats of its files
    random: tuple[str, ...]  # checkpoints of the tests with random numbers and the published names
    published: tuple[str, ...]  # models whose config.json the tests read
    served: tuple[str, ...]  # models that tests serve with their weights


@dataclass(frozen=True, slots=True)
class ListedModels:
    """Everything that can be served."""

    families: tuple[ListedFamily, ...]
    quantizations: tuple[str, ...]  # quantizations of weights in safetensors
    gguf_architectures: tuple[str, ...]
    kv_formats: tuple[str, ...]
    needs: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON's types."""
        return asdict(self)


def list_models() -> ListedModels:
    """Return the registries' contents, in their order."""
    tested = json.loads(TESTED.read_text())
    return ListedModels(
        tuple(_listed(family, tested.get(family.model_type, {})) for family in FAMILIES.values()),
        tuple(known.title for known in FORMATS),
        tuple(ARCHITECTURES),
        tuple(kv_formats.SIZES),
        NEEDS,
    )


def abilities(family: Family) -> tuple[str, ...]:
    """Return what models of a family do."""
    decodes = family.architecture != family.base_architecture
    labels = ("classify",) if family.classifying_architecture else ()
    return ("generate", "embed", *labels) if decodes else ("embed", *labels)


def models_text(models: ListedModels) -> str:
    """Return the list for people."""
    lines = []
    for family in models.families:
        lines.append(f"{family.architecture} ({family.model_type}): {family.about}")
        parts = [", ".join(family.does), ", ".join(family.formats), f"ranks divide {', '.join(family.divided)}"]
        lines.append("    " + "; ".join([*parts, *family.features]))
    lines += ["", "The number of ranks divides each of what is named, or is a multiple of the number of KV heads."]
    lines += [f"quantized weights: {', '.join(models.quantizations)}"]
    lines += [f"GGUF: {', '.join(models.gguf_architectures)}", f"KV cache: {', '.join(models.kv_formats)}"]
    return "\n".join([*lines, f"each needs: {models.needs}"])


def _listed(family: Family, tested: Mapping[str, Any]) -> ListedFamily:
    module = sys.modules[family.read_spec.__module__]
    about = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
    in_gguf = any(known.hub == family.architecture for known in ARCHITECTURES.values())
    evidence = {key: tuple(tested.get(key, ())) for key in ("features", "divided", "random", "published", "served")}
    formats = ("safetensors", "GGUF") if in_gguf else ("safetensors",)
    return ListedFamily(family.architecture, family.model_type, abilities(family), about, formats=formats, **evidence)
