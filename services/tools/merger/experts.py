"""An adapter's changes of experts that are one parameter of a layer: `target_parameters` of PEFT.

Such a parameter has a matrix for each expert, and all of them share an A, [n_experts * rank, n_in], with the expert
slowest, and a B, [n_out, n_experts * rank], with the expert fastest. Where a module has two such parameters, the names
of one's factors have `.base_layer` behind the module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from services.compute.model.adapters.peft import BEFORE, A, B, PeftFolder
from services.compute.model.families.fused import stacked_refs
from services.compute.model.families.naming import Refs
from services.compute.model.families.sizes import logical_shape, read_shapes
from services.compute.model.files import StoredEntry
from services.compute.model.registry import Description
from services.compute.model.spec import ModelError

INNER = ".base_layer"
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class StackPart:
    """The place of a part of the matrices in a checkpoint."""

    stored: str
    expert: int | None = None  # the matrix's expert; None: all experts, in the parameter's own layout
    start: int = 0  # rows of the expert's matrix
    stop: int | None = None
    transposed: bool = False  # the expert's rows are stored [in, out]


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter [n_experts, *shape]."""

    n_experts: int
    shape: tuple[int, int]
    turned: bool  # [in, out]; `shape` also shows it, unless it is a square
    parts: tuple[StackPart, ...]


Stacks = Mapping[str, ExpertParameter]  # by transformers' names


@dataclass(frozen=True, slots=True)
class StackFactors:
    """The factors of a stack."""

    a: str
    b: str
    scale: float
    n_experts: int
    turned: bool  # B A is [n_out, n_in] where the stack's matrices are [in, out]

    def added(self, base: Tensor, part: StackPart, read: Read) -> Tensor:
        """Return the tensor `base` of the part after its change, in its dtype."""
        a, b = read(self.a).float(), read(self.b).float()
        a, b = a.view(self.n_experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.n_experts)
        total, experts = base.clone(), range(self.n_experts) if part.expert is None else (part.expert,)
        for expert in experts:
            change = self.scale * (b[:, :, expert] @ a[expert])
            change = (change.t() if self.turned else change)[part.start : part.stop]
            place = total if part.expert is not None else total[expert]
            place.copy_(place.float() + (change.t() if part.transposed else change))
        return total


def find_stacks(model: Description, stored: Mapping[str, StoredEntry]) -> Stacks:
    """Return the parameters of experts, stored as one tensor or as one for each expert's projection."""
    refs, prefix = model.family.refs(model.spec), model.family.optional_prefix
    by_name: dict[str, Refs] = defaultdict(dict)
    for named in (stacked_refs(model.spec, model.family.stacked), refs):
        for key, ref in named.items():
            if ref.place is not None and not key.endswith(".bias"):
                by_name[ref.name][key] = ref
    stacks: dict[str, ExpertParameter] = {}
    for name, of_name in by_name.items():
        others = {refs[key].name if replace(refs[key], name=name) == ref else "" for key, ref in of_name.items()}
        whole = _stored(name, prefix, stored)
        if not whole and len(others) == 1:  # the same tensor by a name of its own
            whole = _stored(others.pop(), prefix, stored)
        if whole:
            n_experts, *shape = stored[whole].shape
            turned = any(ref.transposed for ref in of_name.values())
            stacks[name] = ExpertParameter(n_experts, (shape[0], shape[1]), turned, (StackPart(whole),))
        elif parts := _by_expert(model, refs, of_name, stored):
            n_in = logical_shape(next(iter(of_name)), read_shapes(model.config, model.family, model.spec))[1].value
            n_out = max(part.stop or 0 for part in parts)
            n_experts = 1 + max(part.expert or 0 for part in parts)
            stacks[name] = ExpertParameter(n_experts, (n_out, n_in), False, parts)
    return stacks


def _by_expert(
    model: Description, refs: Refs, of_stack: Refs, stored: Mapping[str, StoredEntry]
) -> tuple[StackPart, ...]:
    """Return the parts of a stack whose projections are tensors of their own; () if they are not."""
    sizes, parts = read_shapes(model.config, model.family, model.spec), list[StackPart]()
    for key, within in of_stack.items():
        ref = refs[key]
        place = _stored(ref.name, model.family.optional_prefix, stored)
        if not place or ref.place is not None or ref.unit or ref.n_stored is not None:
            return ()
        stop = within.start + logical_shape(key, sizes)[0].value
        parts.append(StackPart(place, within.place, within.start, stop, ref.transposed))
    return tuple(parts)


def _stored(name: str, prefix: str, stored: Mapping[str, StoredEntry]) -> str:
    return next((one for one in (name, name.removeprefix(prefix)) if one in stored), "")


def targeted(peft: PeftFolder, module: str, stacks: Stacks) -> dict[str, ExpertParameter]:
    """Return the stacks whose factors those of a module may be, by name: none if the module has one weight.

    Raises ModelError for other parameters.
    """
    inner = module.replace(INNER, "")
    parameters = {}
    for target in peft.config.get("target_parameters") or ():
        container, _, leaf = str(target).rpartition(".")
        name = f"{inner}.{leaf}"
        if name in stacks and (not container or f".{inner}".endswith(f".{container}")):
            parameters[name] = stacks[name]
        elif container and leaf != "weight" and f".{inner}".endswith(f".{container}"):
            raise peft.error("target_parameters", f"{target} is not implemented for this model")
    return parameters


def stack_factors(peft: PeftFolder, module: str, stacks: Mapping[str, ExpertParameter]) -> tuple[str, StackFactors]:
    """Return the one of `stacks` that a module's factors fit, and the factors. Raises ModelError naming the tensor."""
    a, b = (f"{BEFORE}{module}{end}" for end in (A, B))
    (ranks, n_in), (n_out, other_ranks) = peft.shapes(module)
    fitting = {name: stack for name, stack in stacks.items() if sorted(stack.shape) == sorted((n_out, n_in))}
    if len(fitting) != 1:
        raise ModelError(
            f"{peft.file}: {a}: factors of {n_in} inputs and {n_out} outputs fit "
            f"{' and '.join(fitting) or 'none'} of {', '.join(stacks)}"
        )
    [(name, stack)] = fitting.items()
    rank = peft.rank(name)
    if not ranks == other_ranks == stack.n_experts * rank:
        raise ModelError(
            f"{peft.file}: {a}: {ranks} rows with {other_ranks} columns of {b}; {stack.n_experts} experts of rank "
            f"{rank} have {stack.n_experts * rank}"
        )
    turned = stack.turned if n_out == n_in else (n_out, n_in) != stack.shape
    return name, StackFactors(a, b, peft.scale(name, rank), stack.n_experts, turned)
