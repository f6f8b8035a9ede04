"""Products of our CPU kernels by the form of the weight: bfloat16, int8, int4, interleaved in one process.

    python -m bench.products --shape 4864x896 --rows 1,4,16,64

prints a table of medians in microseconds. Weights do not fit the caches together, as in a model.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from services.worker.backends.base import Linear
from services.worker.backends.cpu.ops import KernelOps
from services.worker.backends.weights import Dense, Rounded, Stacked, Weight
from services.worker.kernels.bfloat16 import open_kernels

_FORMS = {
    "bfloat16": (0, 0),
    "int8 per output": (8, 0),
    "int8, 32 inputs": (8, 32),
    "int4, 32 inputs": (4, 32),
    "int4, 128": (4, 128),
}


def main(
    shape: Annotated[str, typer.Option(help="Outputs x inputs.")] = "4864x896",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,4,16,64",
    copies: Annotated[int, typer.Option(min=1, help="Weights of each form, multiplied in turn.")] = 8,
    repeats: Annotated[int, typer.Option(min=3)] = 15,
) -> None:
    """Measure and print the table."""
    n_out, n_in = (int(size) for size in shape.split("x"))
    kernels = open_kernels()
    ops, values = KernelOps(kernels), torch.randn(n_out, n_in).bfloat16()
    layers = {form: [ops.linear(_weight(values, *how), None) for _ in range(copies)] for form, how in _FORMS.items()}
    table = Table(
        "rows", *_FORMS, title=f"{shape}, {torch.get_num_threads()} threads, {kernels.made_for}: µs (x bfloat16)"
    )
    for n in (int(count) for count in rows.split(",")):
        x = torch.randn(n, n_in).bfloat16()
        found = _measure(layers, x, repeats)
        of_bfloat16 = found["bfloat16"]
        table.add_row(str(n), *(f"{us:.0f} ({of_bfloat16 / us:.2f})" for us in found.values()))
    Console().print(table)


def _weight(values: Tensor, bits: int, group: int) -> Stacked:
    part: Weight = Dense(values)
    if bits:
        part = Rounded(values, 0, values.shape[1], 8 if bits == 8 else 4, group)
    return Stacked((part,))


def _measure(layers: dict[str, list[Linear]], x: Tensor, repeats: int) -> dict[str, float]:
    """Return the median time of a product by form, in microseconds."""
    times: dict[str, list[float]] = {form: [] for form in layers}
    for _ in range(repeats):
        for form, products in layers.items():
            began = time.perf_counter()
            for product in products:
                product(x)
            times[form].append((time.perf_counter() - began) / len(products) * 1e6)
    return {form: statistics.median(found) for form, found in times.items()}


if __name__ == "__main__":
    typer.run(main)
