"""An adapter's changes of its base's tensors; they give the weights of PEFT's `merge_and_unload`.

Beside plain LoRA: DoRA (arXiv:2402.09353), modules that were trained whole, biases, and embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.compute.model.adapters.peft import BEFORE, MERGED, Factors, PeftFolder
from services.compute.model.spec import ModelError
from services.tools.merger.experts import Read, StackFactors, StackPart, Stacks, stack_factors, targeted

_MAGNITUDE = ".lora_magnitude_vector"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"  # [rank, n_ids] and [size, rank]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one tensor of the base."""

    factors: Factors | None = None
    experts: tuple[StackFactors, StackPart] | None = None
    magnitude: str = ""  # name of DoRA's vector
    embedding: str = ""  # module whose table, [n_ids, size], has factors
    whole: str = ""  # name of the tensor that replaces it


def changes(peft: PeftFolder, stacks: Stacks) -> dict[str, Change]:
    """Return the changes by transformers' names of the base's tensors. Every tensor of the adapter belongs to one.

    `stacks` are the base's parameters of experts; their changes are by stored names. Raises ModelError naming the first
    tensor or key that is not implemented.
    """
    peft.require_plain(but=MERGED)
    found = dict[str, Change]()
    for module in peft.modules:
        if of_experts := targeted(peft, module, stacks):
            name, factors = stack_factors(peft, module, of_experts)
            found |= {part.stored: Change(experts=(factors, part)) for part in stacks[name].parts}
        else:
            found[f"{module}.weight"] = Change(peft.factors_of(module))
    for name in peft.others():
        module = name.removeprefix(BEFORE)
        if _MAGNITUDE in module and f"{module.partition(_MAGNITUDE)[0]}.weight" in found:
            target = f"{module.partition(_MAGNITUDE)[0]}.weight"
            found[target] = replace(found[target], magnitude=name)
        elif module.endswith((_EMBEDDING_A, _EMBEDDING_B)):
            table = module.rpartition(".")[0]
            if not {f"{BEFORE}{table}{end}" for end in (_EMBEDDING_A, _EMBEDDING_B)} <= peft.tensors.keys():
                raise ModelError(f"{peft.file}: {name}: its other factor is missing")
            found[f"{table}.weight"] = Change(embedding=table)
        elif name.startswith(BEFORE) and module.endswith((".weight", ".bias")) and ".lora_" not in module:
            found[module] = Change(whole=name)
        else:
            raise ModelError(f"{peft.file}: {name}: not implemented")
    if not found:
        raise ModelError(f"{peft.file}: holds no tensors")
    return found


def changed(base: Tensor, change: Change, read: Read, peft: PeftFolder, name: str) -> Tensor:
    """Return the tensor `name` of the base after its change, in its dtype; `read` gives the adapter's tensors.

    Raises ModelError if their shapes differ.
    """
    if change.whole:
        whole = read(change.whole)
        _require(whole, tuple(base.shape), peft, change.whole)
        return whole.to(base.dtype).contiguous()
    if change.experts:
        factors, part = change.experts
        return factors.added(base, part, read)
    transposed = bool(change.embedding) or bool(peft.config.get("fan_in_fan_out"))  # stored [in, out]
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


def _require(found: Tensor, wanted: tuple[int, ...], peft: PeftFolder, name: str) -> None:
    if tuple(found.shape) != wanted:
        hint = "; a vocabulary of another size is not implemented" if len(wanted) > 1 else ""
        raise ModelError(f"{peft.file}: {name}: shape {list(found.shape)}, but the base's is {list(wanted)}{hint}")
