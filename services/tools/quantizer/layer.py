"""Quantizes the linear layers of one decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.weights import Dense, Stacked
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.shard import Shard
from services.tools.quantizer.grid import QuantizedWeight
from services.tools.quantizer.methods.base import Inputs, Method, Repeats
from services.tools.quantizer.methods.rtn import RoundToNearest
from services.tools.quantizer.scheme import Scheme
from services.tools.quantizer.units import Unit

Shapes = Callable[[str], tuple[int, ...]]  # the shape of the tensor with a key


@dataclass(slots=True)
class LayerTensors:
    """The tensors of a layer by their keys, changed in place by :func:`scale_layer`."""

    weights: dict[str, Tensor]  # [n_out, n_in] float32
    whole: dict[str, Tensor]  # tensors that are not quantized: vectors and routers, in their stored dtype

    def stacked(self, unit: Unit) -> Tensor:
        """Return the weights of a unit, one below the other."""
        return torch.cat([self.weights[key] for key in unit.keys])


def read_layer(
    source: Checkpoint, index: int, units: Iterable[Unit], shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> LayerTensors:
    """Read the tensors of layer `index`, of which those of `units` are to be quantized. Raises ModelError.

    `dtype` is that of other matrices if they are stored quantized.
    """
    tensors, quantized = LayerTensors({}, {}), {key for unit in units for key in unit.keys}
    for key in (key for key in source if key.startswith(f"layers.{index}.")):
        shape = shapes(key)
        if len(shape) == 1:
            tensors.whole[key] = source.vector(key, shape[0]).clone()
            continue
        weight = source.weight(Shard.whole(key, (shape[0], shape[1])))
        if key in quantized:
            tensors.weights[key] = Stacked((weight,)).dense(torch.float32, device)
        elif isinstance(weight, Dense):
            tensors.whole[key] = weight.values.clone()
        else:
            tensors.whole[key] = Stacked((weight,)).dense(dtype, torch.device("cpu"))
    return tensors


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A unit, what its layers see, and how they are to be stored."""

    unit: Unit
    inputs: Inputs | None  # None for a method that is not calibrated, and for an expert that saw no row
    scheme: Scheme

    def saw_enough(self, method: Method) -> bool:
        """Whether `method` can be used: experts of a mixture see only the rows that are routed to them."""
        if self.inputs is None:
            return not method.calibrated
        return not self.unit.mixed or self.inputs.n_rows >= method.fewest(len(self.inputs.magnitudes))


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer's linear layers and other tensors by their keys, and relative errors by unit if inputs were seen."""

    linears: Mapping[str, QuantizedWeight]
    whole: Mapping[str, Tensor]
    errors: Mapping[str, float]
    rounded: frozenset[str]  # units that saw too few rows for the method: rounded to nearest


def quantize_layer(
    tensors: LayerTensors, tasks: list[LayerTask], method: Method, dtype: torch.dtype, norm_offset: float
) -> QuantizedLayer:
    """Quantize the linear layers of `tasks`; changes `tensors`. `dtype` is that of stored scales."""
    rounded = frozenset(task.unit.name for task in tasks if not task.saw_enough(method))
    if method.scales:
        tasks = [
            task if task.unit.name in rounded else _scaled(task, tensors, method, dtype, norm_offset) for task in tasks
        ]
    linears: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}
    for task in tasks:
        weight = tensors.stacked(task.unit)
        one = RoundToNearest() if task.unit.name in rounded else method
        made = one.quantize(weight, task.inputs, task.scheme, dtype)
        if task.inputs is not None:
            errors[task.unit.name] = relative_error(weight, made, task.inputs)
        start = 0
        for key in task.unit.keys:
            stop = start + len(tensors.weights[key])
            linears[key] = made.rows(start, stop)
            start = stop
    return QuantizedLayer(linears, tensors.whole, errors, rounded)


def relative_error(weight: Tensor, made: QuantizedWeight, inputs: Inputs) -> float:
    """Return the squared error of the outputs over the squared outputs, on the calibration's rows."""
    return inputs.error(weight - made.numbers()) / max(inputs.error(weight), torch.finfo(torch.float32).tiny)


def _scaled(
    task: LayerTask, tensors: LayerTensors, method: Method, dtype: torch.dtype, norm_offset: float
) -> LayerTask:
    """Scale the columns of a unit, and what makes its inputs the other way, which changes no output."""
    unit = task.unit
    if task.inputs is None or not (unit.norm or unit.maker):
        return task
    repeats = Repeats(unit.times, unit.block)
    factors = method.scale(tensors.stacked(unit), task.inputs, task.scheme, dtype, repeats)
    if unit.norm:
        factors = _divide_norm(tensors.whole, unit.norm, factors, norm_offset)
    else:
        divisors = repeats.mean(factors)
        tensors.weights[unit.maker] /= divisors.unsqueeze(1)
        _divide(tensors.whole, f"{unit.maker}.bias", divisors)
    for key in unit.keys:
        tensors.weights[key] *= factors
    return LayerTask(unit, task.inputs.scaled(factors), task.scheme)


def _divide_norm(vectors: dict[str, Tensor], key: str, factors: Tensor, offset: float) -> Tensor:
    """Divide a norm's outputs by `factors`; return the factors that its rounded weight really divides by."""
    before = vectors[key].to(factors.device).float() + offset
    vectors[key] = (before / factors - offset).to(vectors[key].dtype).to(vectors[key].device)
    after = vectors[key].to(factors.device).float() + offset
    exact = torch.where((before != 0) & (after != 0), before / after, factors)
    _divide(vectors, f"{key}.bias", exact)
    return exact


def _divide(vectors: dict[str, Tensor], key: str, divisors: Tensor) -> None:
    if key in vectors:
        vectors[key] = (vectors[key].float() / divisors.to(vectors[key].device)).to(vectors[key].dtype)
