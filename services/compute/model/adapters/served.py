"""An adapter's changes of a served model: the low-rank factors of its linear layers, by logical key.

Free of torch, because the server process also uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

from services.compute.model.adapters.peft import BEFORE, CONFIG, MERGE, TENSORS, Factors, PeftFolder
from services.compute.model.families.naming import TEXT_PREFIXES, TensorRef, renamed, stored_size
from services.compute.model.families.sizes import logical_shape, read_shapes
from services.compute.model.formats.gguf.config import find_architecture
from services.compute.model.registry import Description, find_family
from services.compute.model.spec import ModelError

# Linear layers, by the last part of their keys.
ADAPTED = (
    *("q", "k", "v", "o", "attention_gate", "gate", "up", "down"),
    *("conv_b", "conv_c", "conv_x", "conv_out"),
    *("ssm_z", "ssm_x", "ssm_b", "ssm_c", "ssm_dt", "ssm_select", "ssm_out"),
    *(f"delta_{part}" for part in ("q", "k", "v", "z", "rate", "dt", "z_few", "dt_few", "out")),
    *(f"lightning_{part}" for part in ("q", "k", "v", "gate", "out")),
)
_EMBEDDINGS = ("embed", "head")
_PIECE = 1 << 20
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer of the model that a module's factors change, perhaps one of several stored in one tensor."""

    key: str  # logical
    factors: Factors
    ref: TensorRef  # where the layer's rows lie among the module's outputs
    n_out: int  # the layer's outputs


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that fits a model. `digest` covers configuration and tensors."""

    folder: Path
    digest: str
    rank: int  # the largest
    targets: tuple[AdapterTarget, ...]
    n_left_out: int = 0  # tensors that change parts of the checkpoint which are not served, such as a vision tower

    @property
    def n_bytes(self) -> int:
        """Bytes of all factors in float32, on a single rank."""
        return sum(_FLOAT * one.factors.rank * (one.factors.n_in + one.n_out) for one in self.targets)


def read_adapter(
    folder: Path, model: Description, max_rank: int, on_read: Callable[[int], None] = lambda n_bytes: None
) -> ServedAdapter:
    """Check every tensor of an adapter against `model`, and its numbers. Raises ModelError naming file and key.

    Tensors that change what the model leaves out are also left out. `on_read` is called with the bytes of every piece
    that is read for the digest.
    """
    peft = PeftFolder.open(folder)
    if model.gguf and find_architecture(model.gguf.metadata).scaled:
        why = f"the matrices of {model.path} hold factors that the adapter's lack"
        raise ModelError(f"{folder}: {why}; serve the base from safetensors")
    served = [module for module in peft.modules if not _left_out(module, model)]
    others = [name for name in peft.others() if not _left_out(name.removeprefix(BEFORE), model)]
    n_left_out = len(peft.tensors) - 2 * len(served) - len(others)
    peft.require_plain(but=("modules_to_save",) if n_left_out and not others else (), hint=f"; {MERGE}")
    by_module = _layers(model)
    targets = []
    for factors in map(peft.factors_of, served):
        layers = by_module.get(_renamed(factors.module, model))
        if layers is None:
            raise ModelError(f"{peft.file}: {factors.a}: {_why_not(factors.module, model)}")
        if factors.rank > max_rank:
            raise ModelError(
                f"{peft.file}: {factors.a}: rank {factors.rank}; at most {max_rank} (RYZANSTEIN_ADAPTER_MAX_RANK)"
            )
        for key, ref in layers.items():
            n_out, n_in = _shape(key, model)
            wanted = stored_size(ref, n_out), n_in
            if (factors.n_out, factors.n_in) != wanted:
                raise ModelError(
                    f"{peft.file}: {factors.a}: made for a layer of {factors.n_in} inputs and {factors.n_out} outputs; "
                    f"this model's has {wanted[1]} and {wanted[0]}"
                )
            targets.append(AdapterTarget(key, factors, ref, n_out))
    if others:
        raise ModelError(f"{peft.file}: {others[0]}: not implemented ({len(others)} tensors in all); {MERGE}")
    if not targets:
        raise ModelError(f"{peft.file}: holds no tensors of LoRA" + (" for what is served" if n_left_out else ""))
    peft.require_finite()
    rank = max(target.factors.rank for target in targets)
    return ServedAdapter(folder, digest_of(folder, on_read), rank, tuple(targets), n_left_out)


def digest_of(folder: Path, on_read: Callable[[int], None] = lambda n_bytes: None) -> str:
    """Return the SHA-256 of an adapter's configuration and tensors; see `read_adapter`. Raises ModelError."""
    digest = sha256()
    try:
        for name in (CONFIG, TENSORS):
            file = folder / name
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
                    on_read(len(piece))
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _layers(model: Description) -> Mapping[str, dict[str, TensorRef]]:
    """Return the layers that can be adapted, by transformers' name of their module, then by logical key."""
    layers: dict[str, dict[str, TensorRef]] = defaultdict(dict)
    others = set[str]()  # modules with a part that is not adapted, such as a gate next to the queries
    for key, ref in find_family(model.config).refs(model.spec).items():
        module = ref.name.removesuffix(".weight")
        if key.rpartition(".")[2] in ADAPTED and ".experts." not in key:
            layers[module][key] = ref
        else:
            others.add(module)
    return {module: parts for module, parts in layers.items() if module not in others}


def _left_out(name: str, model: Description) -> bool:
    """Whether a module or a tensor belongs to a part of the checkpoint that is not served."""
    return bool(model.spec.left_out) and any(fnmatchcase(f"{name}.", pattern) for pattern in model.family.ignored)


def _renamed(module: str, model: Description) -> str:
    """Return the name that the family's references have for a module, also without a wrapper of the text's model."""
    return renamed(module, model.family.prefixes or TEXT_PREFIXES)


def _shape(key: str, model: Description) -> tuple[int, int]:
    n_out, n_in = logical_shape(key, read_shapes(model.config, model.family, model.spec))
    return n_out.value, n_in.value


def _why_not(module: str, model: Description) -> str:
    refs = find_family(model.config).refs(model.spec)
    held = {ref.name.removesuffix(".weight"): key for key, ref in refs.items()}
    key = held.get(_renamed(module, model))
    if key is None:
        return f"the model has no module {module}"
    what = "an embedding or output head" if key in _EMBEDDINGS else "an expert" if ".experts." in key else "a module"
    return f"{module} is {what} whose adaptation is not implemented; {MERGE}"
