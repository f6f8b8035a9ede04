"""The launches of `kernels/states.py`: one for the sequences of a step with one row, one for those with several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.compute.backends.base import Ops
from services.compute.backends.cuda.small import power_of_two
from services.compute.backends.recurrent import Convolution
from services.compute.backends.states import ScanTokens, StatePlan, StateRows, StateTurn
from services.compute.backends.torch.recurrent import TorchConvolution

_HELD = 2048  # numbers of a state that a program of a scan token by token holds
_LARGEST_WIDTH = 256  # numbers of a row of a state that chunks hold in registers
_TILE = 16  # tokens of a chunk, and rows of a state of its program: the least of tensor cores, larger ones spill


class TritonConvolution(TorchConvolution):
    """The convolution by our kernel, a launch for each turn of a step."""

    def __init__(self, kernels: Any, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [n_channels, kernel]; `bias`: [n_channels]. Both float32."""
        super().__init__(weight, bias)
        self._kernels = kernels

    def filtered(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return conv(x) in float32."""
        x = x if x.stride(1) == 1 else x.contiguous()
        n_taps, n_channels = self._taps.shape
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for turn in plan.turns:
            tile_channels = 128 if turn.longest == 1 else 64
            self._kernels.convolve[(len(turn.segments), -(-n_channels // tile_channels))](
                turn.segments,
                x,
                x.stride(0),
                self._taps,
                self._taps if self._bias is None else self._bias,
                state,
                out,
                n_channels=n_channels,
                n_taps=n_taps,
                n_kept=power_of_two(max(1, n_taps - 1)),
                has_bias=self._bias is not None,
                tile_rows=1 if turn.longest == 1 else 32,
                tile_channels=tile_channels,
                num_warps=1 if turn.longest == 1 else 4,
            )
        return out


class TritonStates:
    """Convolutions and scans by our kernels.

    A row's bits do not depend on other sequences. A row that is its sequence's only one of a step is scanned token by
    token. Several are scanned in chunks, so bits depend on where a prompt is cut, as they do in products.
    """

    def __init__(self, kernels: Any, *, exact: bool) -> None:
        """`exact`: scan token by token always, since the products of chunks round their factors."""
        self._kernels, self._exact = kernels, exact

    def convolution(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return what `Ops.convolution` does."""
        return TritonConvolution(self._kernels, weight, bias)

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        """Return what `Ops.scan` does."""
        tokens = tokens.contiguous()
        out = torch.empty_like(tokens.inputs)
        for turn in plan.turns:
            single = turn.longest == 1 or self._exact
            if single or tokens.rates is not None or state.shape[-1] > _LARGEST_WIDTH:
                self._token_by_token(turn, tokens, state, out)
            else:
                self._in_chunks(turn, tokens, state, out)
        return out

    def _token_by_token(self, turn: StateTurn, tokens: ScanTokens, state: Tensor, out: Tensor) -> None:
        height, n_columns, rates = state.shape[2], power_of_two(state.shape[3]), tokens.rates
        tile_height = min(power_of_two(height), max(1, _HELD // n_columns))
        more = {"own": rates is None and tokens.decay.dim() == 3, "has_rates": rates is not None, "num_warps": 4}
        given = (tokens.decay if rates is None else rates, state, out)
        _launch(self._kernels.scan, turn, tokens, given, n_columns=n_columns, tile_height=tile_height, **more)

    def _in_chunks(self, turn: StateTurn, tokens: ScanTokens, state: Tensor, out: Tensor) -> None:
        n_columns = max(_TILE, power_of_two(state.shape[3]))
        more = {"own": tokens.decay.dim() == 3, "num_warps": 4 if n_columns <= 128 else 8, "num_stages": 1}
        sizes = {"n_columns": n_columns, "tile_height": _TILE, "n_tokens": _TILE}
        _launch(self._kernels.chunks, turn, tokens, (state, out), **sizes, **more)


def _launch(
    kernel: Any, turn: StateTurn, tokens: ScanTokens, given: tuple[Tensor, ...], *, tile_height: int, **more: int
) -> None:
    """Launch a program for each segment, head and tile of rows; `given` ends with the state and the results."""
    _, n_heads, height, width = given[-2].shape
    rate = tokens.decay if tokens.rate is None else tokens.rate
    kernel[(len(turn.segments), n_heads, -(-height // tile_height))](
        *(turn.segments, tokens.inputs, tokens.b, tokens.c, tokens.decay, rate, *given),
        **{"n_heads": n_heads, "height": height, "width": width, "tile_height": tile_height, **more},
        has_rate=tokens.rate is not None,
    )


def states_error(ours: TritonStates, reference: Ops, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference between our results and states and those of `reference` for a few tokens."""
    plan = StatePlan.of([StateRows(0, 1, 2, save=0), StateRows(1, 25, 1)], device)
    rows = torch.randn(25, 4, 16, generator=torch.Generator().manual_seed(4)).to(device)
    x, b, c, raw = rows.unsqueeze(2).unbind(1)
    one, own, rate = raw[:, :, 0].sigmoid(), raw.sigmoid(), raw[:, :, 1].sigmoid()
    b, rates = b / 4, -rows[:16, 0].abs().unsqueeze(0)  # larger ones would let a corrected state grow
    kinds = (ScanTokens(x, b, c, one, rate), ScanTokens(x, b, c, own), ScanTokens(x, b, c, own, rates=rates))
    computed, expected = ([_computed(ops, kind, plan, dtype) for kind in kinds] for ops in (ours, reference))
    return float((torch.stack(computed) - torch.stack(expected)).abs().max())


def _computed(ops: Ops | TritonStates, tokens: ScanTokens, plan: StatePlan, dtype: torch.dtype) -> Tensor:
    """Return the results of both operations and their states, side by side in float32."""
    n_channels = 16
    newest = torch.zeros(3, 2, n_channels, dtype=dtype, device=tokens.inputs.device)
    heads = torch.zeros(3, 1, n_channels, n_channels, device=tokens.inputs.device)
    weight = tokens.b[:3, 0].t()
    convolved = ops.convolution(weight, weight[:, 0].contiguous()).activated(
        tokens.inputs[:, 0].to(dtype), newest, plan
    )
    results = (convolved, ops.scan(tokens, heads, plan), newest, heads)
    return torch.cat([part.float().flatten() for part in results])
