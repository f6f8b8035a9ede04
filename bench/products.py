"""Products of our CPU kernels by the form of the weight: bfloat16, int8, int4, interleaved in one process.

    python -m bench.products --shape 4864x896 --rows 1,4,16,64

prints a table of the best times in microseconds, which other work on the machine changes least. Weights do not fit the
caches together, as in a model.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from services.compute.backends.base import Linear
from services.compute.backends.cpu.ops import KernelOps
from services.compute.backends.weights import Dense, PerChannel, Rounded, Stacked, Weight
from services.compute.kernels.bfloat16 import open_kernels

_FORMS: dict[str, tuple[Literal[4, 8], int]] = {  # bits and inputs of a group
    "int8, 32 inputs": (8, 32),
    "int8, 128": (8, 128),
    "int4, 32 inputs": (4, 32),
    "int4, 128": (4, 128),
}


def main(
    shape: Annotated[str, typer.Option(help="Outputs x inputs.")] = "4864x896",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,4,16,64",
    copies: Annotated[int, typer.Option(min=1, help="Weights of each form, multiplied in turn.")] = 8,
    repeats: Annotated[int, typer.Option(min=3)] = 100,
) -> None:
    """Measure and print the table."""
    n_out, n_in = (int(size) for size in shape.split("x"))
    kernels = open_kernels()
    ops, values = KernelOps(kernels), torch.randn(n_out, n_in).bfloat16()
    weights = _weights(values)
    layers = {form: [ops.linear(Stacked((part,)), None) for _ in range(copies)] for form, part in weights.items()}
    table = Table(
        "rows", *weights, title=f"{shape}, {torch.get_num_threads()} threads, {kernels.made_for}: µs (x bfloat16)"
    )
    for n in (int(count) for count in rows.split(",")):
        x = torch.randn(n, n_in).bfloat16()
        found = _measure(layers, x, repeats)
        of_bfloat16 = found["bfloat16"]
        table.add_row(str(n), *(f"{us:.0f} ({of_bfloat16 / us:.2f})" for us in found.values()))
    Console().print(table)


def _weights(values: Tensor) -> dict[str, Weight]:
    per_output = PerChannel((values * 32).to(torch.int8), torch.full((len(values), 1), 1 / 32))
    rounded = {form: Rounded(values, 0, values.shape[1], bits, group) for form, (bits, group) in _FORMS.items()}
    return {"bfloat16": Dense(values), "int8 per output": per_output, **rounded}


def _measure(layers: dict[str, list[Linear]], x: Tensor, repeats: int) -> dict[str, float]:
    """Return the best time of a product by form, in microseconds."""
    best = dict.fromkeys(layers, float("inf"))
    for _ in range(repeats):
        for form, products in layers.items():
            began = time.perf_counter()
            for product in products:
                product(x)
            best[form] = min(best[form], (time.perf_counter() - began) / len(products) * 1e6)
    return best


if __name__ == "__main__":
    typer.run(main)
