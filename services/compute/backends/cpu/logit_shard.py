"""This rank's part of the logits, by our kernels."""

from __future__ import annotations

from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.draws import Chances
from services.compute.kernels.bfloat16 import Bfloat16Kernels


class KernelLogitShard:
    """Uses our kernels, which need one or two passes; the number of columns is a multiple of 16."""

    def __init__(self, first_id: int, kernels: Bfloat16Kernels) -> None:
        self.first_id, self._kernels = first_id, kernels

    def sample(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the key of each row's best score."""
        return self._kernels.draw(logits, self.first_id, chances.temperature, chances.seeds, chances.positions)

    def best(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys of the `width` best columns and a bound on the values of the others."""
        best = self._kernels.pick(logits, self.first_id, width)
        return best, keys.values_of(best[:, :1])

    def mass(self, logits: Tensor) -> Tensor:
        """Return the logsumexp."""
        return self._kernels.logsumexp(logits).unsqueeze(-1)
