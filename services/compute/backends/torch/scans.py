"""Scans over states by their definition, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.states import ScanTokens, StatePlan, in_turn


def scan(tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
    """Return the results of a step's tokens, whose sums have one order however the step is cut; `state` is advanced."""

    out = torch.empty_like(tokens.inputs)

    def advance(rows: Tensor, first: int, end: int) -> None:
        if len(rows) > 1 or end - first == 1:
            states = state[rows]
            out[first:end] = _step(states, tokens.part(first, end))
            state.index_copy_(0, rows, states)
            return
        states = state[int(rows)].unsqueeze(0)  # a view
        for row in range(first, end):
            out[row : row + 1] = _step(states, tokens.part(row, row + 1))

    in_turn(advance, state, plan)
    return out


def _step(states: Tensor, token: ScanTokens) -> Tensor:
    """Let one token of each sequence change `states` [n, n_heads, height, width] in place; return the results."""
    b, c, inputs = token.b.unsqueeze(-2), token.c.unsqueeze(-2), token.inputs
    if token.rates is not None:
        states.mul_(torch.exp(token.decay.unsqueeze(-1) * token.rates))
    else:
        states.mul_(token.decay.unsqueeze(-2) if token.decay.dim() == 3 else token.decay[..., None, None])
    if token.rate is not None:
        inputs = (inputs - torch.sum(states * b, dim=-1)) * token.rate.unsqueeze(-1)
    states.add_(inputs.unsqueeze(-1) * b)
    return torch.sum(states * c, dim=-1)
