"""Finds the family of a checkpoint by the architecture in its config.json; files of `families/` define them.

Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from services.compute.model import families
from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family, classifier_refs
from services.compute.model.families.recurrent import RECURRENT
from services.compute.model.formats.gguf.config import find_architecture, read_config
from services.compute.model.formats.gguf.container import GgufFile
from services.compute.model.formats.gguf.naming import as_stored, stored_in_gguf, with_sizes
from services.compute.model.formats.gguf.parts import read_gguf
from services.compute.model.formats.registry import read_layouts
from services.compute.model.spec import Classifier, ModelSpec


def _found() -> dict[str, Family]:
    """The families that the files define, by architecture, in the files' order."""
    modules = [import_module(f"{families.__name__}.{file.name}") for file in iter_modules(families.__path__)]
    values = (value for module in modules for value in vars(module).values())
    return {family.architecture: family for family in values if isinstance(family, Family)}


FAMILIES = _found()
_BODIES = {family.base_architecture: family for family in FAMILIES.values()}
_CLASSIFIERS = {
    family.classifying_architecture: family for family in FAMILIES.values() if family.classifying_architecture
}
_TYPES = {family.model_type: family for family in FAMILIES.values()}
_ALIASES = {alias: family for family in FAMILIES.values() for alias in family.aliases}


def find_family(config: Config) -> Family:
    """Return the family of the architecture, or of the model type if no architecture is named. Raises ModelError."""
    architectures = config.raw("architectures") or []
    if not architectures and (by_type := _TYPES.get(str(config.raw("model_type")))):
        return by_type
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise config.error("architectures", f"expected a list of one name, found {architectures!r}")
    name = str(architectures[0])
    family = FAMILIES.get(name) or _BODIES.get(name) or _CLASSIFIERS.get(name) or _ALIASES.get(name)
    if family is None and name in RECURRENT:
        raise config.error("architectures", f"{name!r} is not implemented: {RECURRENT[name]}")
    if family is None:
        raise config.error("architectures", f"{name!r} is not implemented; known: {', '.join(FAMILIES)}")
    return family


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint's description of its model."""

    path: Path
    config: Config
    family: Family
    spec: ModelSpec
    gguf: GgufFile | None  # None: a folder of safetensors


def describe(path: Path) -> Description:
    """Describe the checkpoint folder or the GGUF file `path`. Raises ModelError naming the file and the keys."""
    if not path.is_file():
        config = Config.load(path)
        return Description(path, config, *interpret(config), None)
    file = read_gguf(path)
    architecture = find_architecture(file.metadata)
    config = read_config(file, FAMILIES[architecture.hub], architecture)
    family, spec = interpret(config)
    spec = with_sizes(as_stored(spec), file.tensors.values())
    return Description(path, config, stored_in_gguf(family, architecture), spec, file)


def interpret(config: Config) -> tuple[Family, ModelSpec]:
    """Return the family and the spec of a config.json. Raises ModelError naming the file and every refused key."""
    family = find_family(config)
    spec = replace(family.read_spec(config), quantization=read_layouts(config))
    architecture = (config.raw("architectures") or [""])[0]
    if architecture in _BODIES:
        spec = replace(spec, tied=True, generates=False)
    elif architecture in _CLASSIFIERS:
        classifier = family.classifier(config, spec)
        spec, family = replace(spec, tied=True, generates=False, classifier=classifier), _with_head(family, classifier)
    config.finish()
    return family, spec


def _with_head(family: Family, classifier: Classifier) -> Family:
    """Return the family with the tensors of a classifier, and without the patterns that would pass over them."""
    modules = [f"{module}.weight" for layer in classifier.layers for module in (layer.module, layer.norm) if module]
    ignored = tuple(pattern for pattern in family.ignored if not any(fnmatchcase(name, pattern) for name in modules))
    refs = family.refs
    return replace(family, ignored=ignored, refs=lambda spec: refs(spec) | classifier_refs(spec, classifier))


def read_spec(path: Path) -> ModelSpec:
    """Return the spec of the checkpoint folder or GGUF file `path`. Raises ModelError naming the file and the keys."""
    return describe(path).spec
