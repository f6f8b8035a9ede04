"""Lists the families of models and the formats that a worker serves, from their registries."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from services.worker.backends import kv_formats
from services.worker.model.families.naming import Family
from services.worker.model.formats.gguf.architectures import ARCHITECTURES
from services.worker.model.formats.registry import FORMATS
from services.worker.model.registry import FAMILIES

NEEDS = "config.json, *.safetensors, and tokenizer.json or what it is made from; or one GGUF file"


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """One family."""

    architecture: str
    model_type: str
    does: tuple[str, ...]  # generate, embed, classify
    about: str


@dataclass(frozen=True, slots=True)
class Models:
    """Everything that can be served."""

    families: tuple[ListedFamily, ...]
    quantizations: tuple[str, ...]  # of weights in safetensors
    gguf_architectures: tuple[str, ...]
    kv_formats: tuple[str, ...]
    needs: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON's types."""
        return asdict(self)


def list_models() -> Models:
    """Return the registries' contents, in their order."""
    return Models(
        tuple(_listed(family) for family in FAMILIES.values()),
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


def models_text(models: Models) -> str:
    """Return the list for people."""
    width = max(len(family.architecture) for family in models.families)
    lines = [
        f"{family.architecture:{width}}  {', '.join(family.does):25}  {family.about}" for family in models.families
    ]
    lines += ["", f"quantized weights: {', '.join(models.quantizations)}"]
    lines += [f"GGUF: {', '.join(models.gguf_architectures)}", f"KV cache: {', '.join(models.kv_formats)}"]
    return "\n".join([*lines, f"each needs: {models.needs}"])


def _listed(family: Family) -> ListedFamily:
    module = sys.modules[family.read_spec.__module__]
    about = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return ListedFamily(family.architecture, family.model_type, abilities(family), about)
