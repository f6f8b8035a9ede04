"""Calls of the kernels of layers with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _scanned(tokens: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Return addresses and strides of x, b, c and dt; b and c have one stride."""
    x, b, c, dt = tokens
    assert b.stride(0) == c.stride(0)
    return x.data_ptr(), x.stride(0), b.data_ptr(), c.data_ptr(), b.stride(0), dt.data_ptr(), dt.stride(0)


class RecurrentKernels:
    """Operations of `Bfloat16Kernels` for layers with a state.

    `rows` [sequences] int64 are the rows of a store's states that a call advances, by equally many tokens of each.
    """

    _library: Any

    def scan_(
        self,
        states: torch.Tensor,
        rows: torch.Tensor,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rate: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Advance `states` [n, n_heads, height, width].

        `tokens`: inputs [n_tokens, n_heads, height], b and c [n_tokens, n_heads, width], decay [n_tokens, n_heads] or
        like b, by sequence; `rate` [n_tokens, n_heads]. `out` gets results like the inputs. All float32 and contiguous.
        """
        addresses, n_decays = [tensor.data_ptr() for tensor in tokens], tokens[-1].shape[2:].numel()
        self._library.rz_scan(
            *(states.data_ptr(), rows.data_ptr(), len(rows), len(out) // len(rows), *addresses),
            *(n_decays, None if rate is None else rate.data_ptr(), out.data_ptr(), *states.shape[1:]),
        )

    def convolve_(
        self,
        states: torch.Tensor,
        rows: torch.Tensor,
        x: torch.Tensor,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        gated: bool,
    ) -> None:
        """Write silu(conv(x)) to `out` [n, n_channels], or c * conv(b * x) of `x` [n, 3 * n_channels].

        `states` [.., kernel - 1, n_channels] are advanced. `taps` [kernel, n_channels] and `bias` are float32.
        """
        (kernel, n_channels), n = taps.shape, len(rows)
        self._library.rz_convolve(
            *(x.data_ptr(), x.stride(0), n_channels, gated, taps.data_ptr()),
            *(None if bias is None else bias.data_ptr(), kernel, states.data_ptr(), rows.data_ptr()),
            *(n, len(out) // n, out.data_ptr()),
        )

    def state_space_(
        self,
        states: torch.Tensor,
        rows: torch.Tensor,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        numbers: Sequence[torch.Tensor],
        least_step: float,
        n_groups: int,
        out: torch.Tensor,
    ) -> None:
        """Advance `states` [.., n_heads, head_dim, n_states] float32; `out` [n, n_heads * head_dim] gets the results.

        `tokens`: the heads' inputs [n, n_heads * head_dim], b and c of the groups, and dt [n, n_heads]. `numbers`:
        rate, bias of the steps and skip, [n_heads] float32 each.
        """
        n_heads, head_dim, n_states = states.shape[1:]
        self._library.rz_state_space(
            *(*_scanned(tokens), *(each.data_ptr() for each in numbers), least_step),
            *(states.data_ptr(), rows.data_ptr(), len(rows), len(out) // len(rows), out.data_ptr()),
            *(n_heads, head_dim, n_groups, n_states),
        )

    def channel_space_(
        self,
        states: torch.Tensor,
        rows: torch.Tensor,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        numbers: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Advance `states` [.., n_channels, n_states] float32; `out` [n, n_channels] gets the results.

        `tokens`: the channels' inputs [n, n_channels], b and c [n, n_states], and dt [n, n_channels]. `numbers`: rates
        [n_channels, n_states], bias of the steps and skip [n_channels], all float32.
        """
        self._library.rz_channel_space(
            *(*_scanned(tokens), *(each.data_ptr() for each in numbers)),
            *(states.data_ptr(), rows.data_ptr(), len(rows), len(out) // len(rows), out.data_ptr(), *states.shape[1:]),
        )

    def delta_rule_(
        self,
        states: torch.Tensor,
        rows: torch.Tensor,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        numbers: tuple[torch.Tensor, torch.Tensor],
        n_key_heads: int,
        out: torch.Tensor,
    ) -> None:
        """Advance `states` [.., n_heads, value_dim, key_dim] float32; `out` [n, n_heads * value_dim] gets results.

        `tokens`: queries, keys and values [n, channels], dt and the rates of corrections [n, n_heads], of one stride.
        `numbers`: rate and bias of the steps, [n_heads] float32.
        """
        x, dt, rate = tokens
        assert dt.stride(0) == rate.stride(0)
        n_heads, height, width = states.shape[1:]
        self._library.rz_delta_rule(
            *(x.data_ptr(), x.stride(0), dt.data_ptr(), rate.data_ptr(), dt.stride(0)),
            *(*(each.data_ptr() for each in numbers), states.data_ptr(), rows.data_ptr(), len(rows)),
            *(len(out) // len(rows), out.data_ptr(), n_heads, n_heads // n_key_heads, height, width),
        )

    def gated_norm(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        n_groups: int,
        eps: float,
        out: torch.Tensor,
        *,
        outside: bool,
        sigmoid: bool,
    ) -> None:
        """Write norm(x * silu(z)) to `out` [n, size] or, `outside`, norm(x) * silu(z).

        `sigmoid`: that of z takes silu's place. The norm is that of each group, with `weight` [size] float32; None:
        there is none.
        """
        n, size = out.shape
        self._library.rz_gated_norm(
            *(x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0), None if weight is None else weight.data_ptr()),
            *(n_groups, eps, outside, sigmoid, out.data_ptr(), n, size // n_groups),
        )
