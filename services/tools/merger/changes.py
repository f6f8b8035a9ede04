"""An adapter's changes of its base's tensors; they give the weights of PEFT's `merge_and_unload`.

Beside plain LoRA: DoRA (arXiv:2402.09353), modules that were trained whole, biases, and embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.compute.model.adapters.peft import BEFORE, MERGED, A, Factors, PeftFolder
from services.compute.model.spec import ModelError
from services.tools.merger.experts import INNER, Read, StackFactors, StackPart, Stacks, stack_factors, targeted
from services.tools.merger.names import BaseNames

_MAGNITUDE = ".lora_magnitude_vector"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"  # [rank, n_ids] and [size, rank]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one tensor of the base."""

    factors: Factors | None = None
    experts: tuple[StackFactors, StackPart] | None = None
    magnitude: str = ""  # name of DoRA's vector
    embedding: str = ""  # module whose table, [n_ids, size], has factors
    whole: str = ""  # name of the tensor that replaces it, before factors are added
    transposed: bool = False  # the base's is stored [in, out]


def changes(peft: PeftFolder, stacks: Stacks, names: BaseNames) -> dict[str, Change]:
    """Return the changes by the family's names of the base's tensors. Every tensor of the adapter belongs to one.

    `stacks` are the base's parameters of experts, whose changes are by the names of their tensors; `names` are those of
    all its tensors. Raises ModelError naming the first tensor or key that is not implemented, or lacks a tensor.
    """
    named = names.named
    peft.require_plain(but=MERGED)
    peft.require_finite()
    by_target = dict[str, Change]()
    for module in peft.modules:
        if of_experts := targeted(peft, named(module), stacks):
            name, factors = stack_factors(peft, module, of_experts)
            by_target |= {part.stored: Change(experts=(factors, part)) for part in stacks[name].parts}
        else:
            target = named(f"{module.replace(INNER, '')}.weight")
            if target in by_target:
                raise ModelError(f"{peft.file}: {BEFORE}{module}{A}: {target} also has other factors")
            by_target[target] = Change(peft.factors_of(module), transposed=names.is_transposed(target))
    for name in peft.others():
        target, change = _other(peft, name)
        target = named(target)
        before = by_target.get(target, Change())
        by_target[target] = replace(
            before,
            magnitude=change.magnitude or before.magnitude,
            embedding=change.embedding or before.embedding,
            whole=change.whole or before.whole,
        )
    _check_dora(peft, by_target)
    if not by_target:
        raise ModelError(f"{peft.file}: holds no tensors")
    _check_saved(peft, by_target, stacks, names)
    return by_target


def _other(peft: PeftFolder, name: str) -> tuple[str, Change]:
    """Return the base's tensor that a tensor which is no factor of a linear layer belongs to, and its part of a change.

    Raises ModelError if it has none.
    """
    module = name.removeprefix(BEFORE)
    if _MAGNITUDE in module:
        return f"{module.partition(_MAGNITUDE)[0]}.weight", Change(magnitude=name)
    if module.endswith((_EMBEDDING_A, _EMBEDDING_B)):
        table = module.rpartition(".")[0]
        for other in (f"{BEFORE}{table}{end}" for end in (_EMBEDDING_A, _EMBEDDING_B)):
            if other not in peft.tensors:
                raise ModelError(f"{peft.file}: {name}: its other factor, {other}, is missing")
        return f"{table}.weight", Change(embedding=table)
    if name.startswith(BEFORE) and module.endswith((".weight", ".bias")) and ".lora_" not in module:
        return module.replace(INNER, ""), Change(whole=name)
    raise ModelError(f"{peft.file}: {name}: not implemented")


def _check_dora(peft: PeftFolder, by_target: dict[str, Change]) -> None:
    """Raise ModelError if magnitudes and factors do not belong together as `use_dora` says."""
    dora = bool(peft.config.get("use_dora"))
    for target, change in by_target.items():
        adapted = change.factors is not None or bool(change.embedding)
        if change.magnitude and not (adapted and dora):
            why = "has no factors next to it" if dora else "use_dora is not set"
            raise ModelError(f"{peft.file}: {change.magnitude}: {why}")
        if dora and adapted and not change.magnitude:
            raise ModelError(f"{peft.file}: use_dora is set, but {target} has factors and no {_MAGNITUDE[1:]}")


def _check_saved(peft: PeftFolder, by_target: Mapping[str, Change], stacks: Stacks, names: BaseNames) -> None:
    """Raise ModelError for a part of the base that was trained as the configuration says, without a tensor."""
    for module in peft.config.get("modules_to_save") or ():
        held = names.within(str(module))
        if held and not any(by_target.get(name, Change()).whole for name in held):
            raise peft.error("modules_to_save", f"{module}: {peft.file.name} holds none of its tensors")
    for parameter in map(str, peft.config.get("target_parameters") or ()):
        held = [name for name in names.within(parameter) if name.endswith(parameter)]
        held += [part.stored for name in stacks if f".{name}".endswith(f".{parameter}") for part in stacks[name].parts]
        if held and not by_target.keys() & held:
            raise peft.error("target_parameters", f"{parameter}: {peft.file.name} holds no factors of it")
    if peft.config.get("bias") in ("all", "lora_only") and not any(name.endswith(".bias") for name in by_target):
        adapted = [f"{name.removesuffix('.weight')}.bias" for name, change in by_target.items() if change.factors]
        if any(map(names.place, adapted)):
            raise peft.error("bias", f"{peft.config['bias']}: {peft.file.name} holds no bias")


def changed(base: Tensor, change: Change, read: Read, peft: PeftFolder, name: str) -> Tensor:
    """Return the tensor `name` of the base after its change, in its dtype; `read` gives the adapter's tensors.

    Raises ModelError if their shapes differ, or a number is beyond the dtype.
    """
    made = _changed(base, change, read, peft, name)
    if not made.isfinite().all():
        raise ModelError(f"{peft.file}: {name}: after its change not all numbers are finite in {made.dtype}")
    return made


def _changed(base: Tensor, change: Change, read: Read, peft: PeftFolder, name: str) -> Tensor:
    if change.whole:
        whole = read(change.whole)
        _require(whole, tuple(base.shape), peft, change.whole)
        base = whole.to(base.dtype).contiguous()
        if change.factors is None and not change.embedding:
            return base
    if change.experts:
        factors, part = change.experts
        return factors.added(base, part, read)
    transposed = bool(change.embedding) or change.transposed
    weight = base.float().t() if transposed else base.float()
    if change.embedding:
        a, b = (read(f"{BEFORE}{change.embedding}{end}").float() for end in (_EMBEDDING_A, _EMBEDDING_B))
        scale = peft.scale(change.embedding, len(a))
    else:
        assert change.factors is not None, "a change has factors or replaces a tensor"
        a, b, scale = read(change.factors.a).float(), read(change.factors.b).float(), change.factors.scale
    if (b.shape[0], a.shape[1]) != tuple(weight.shape):
        raise ModelError(f"{peft.file}: factors of {name} make {[b.shape[0], a.shape[1]]}, not {list(weight.shape)}")
    weight = weight + scale * (b @ a)
    if change.magnitude:
        magnitude = read(change.magnitude).float().view(-1)
        _require(magnitude, (weight.shape[0],), peft, change.magnitude)
        weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)
    return (weight.t() if transposed else weight).to(base.dtype).contiguous()


def _require(tensor: Tensor, wanted: tuple[int, ...], peft: PeftFolder, name: str) -> None:
    if tuple(tensor.shape) != wanted:
        hint = "; a vocabulary of another size is not implemented" if len(wanted) > 1 else ""
        raise ModelError(f"{peft.file}: {name}: shape {list(tensor.shape)}, but the base's is {list(wanted)}{hint}")
