"""The plan of a step's states: which sequences are advanced together, and in which order."""

from __future__ import annotations

import torch

from services.compute.backends.states import StatePlan, StateRows

CPU = torch.device("cpu")


def test_plan_computes_single_rows_together_and_prompts_in_turn() -> None:
    decodes = [StateRows(0, 1, row=5), StateRows(1, 2, row=2, save=9)]
    prompts = [StateRows(2, 7, row=0, fresh=True), StateRows(7, 8, row=1)]
    plan = StatePlan.of([*decodes, *prompts], CPU)
    assert (plan.n_rows, plan.n_single, plan.singles.tolist(), plan.saves) == (8, 2, [5, 2], ((2, 9),))
    assert plan.runs == tuple(prompts)
    assert turns(plan) == [([[0, 1, 5, -1], [1, 2, 2, 9], [7, 8, 1, -1]], 1), ([[2, 7, 0, -1]], 5)]


def turns(plan: StatePlan) -> list[tuple[list[list[int]], int]]:
    return [(turn.segments.tolist(), turn.longest) for turn in plan.turns]


def test_plan_computes_pieces_of_a_sequence_in_turn() -> None:
    pieces = [StateRows(2, 7, row=3), StateRows(0, 1, row=3), StateRows(1, 2, row=3)]
    plan = StatePlan.of(pieces, CPU)
    assert (plan.n_rows, plan.n_single, plan.runs) == (7, 0, (StateRows(2, 7, row=3), StateRows(0, 2, row=3)))
    assert turns(plan) == [([[2, 7, 3, -1]], 5), ([[0, 1, 3, -1]], 1), ([[1, 2, 3, -1]], 1)]


def test_pieces_are_joined_up_to_a_copy_of_their_state() -> None:
    pieces = [
        StateRows(0, 1, 3),
        StateRows(1, 2, 3, save=8),
        StateRows(2, 3, 3),
        StateRows(3, 4, 2),
        StateRows(4, 9, 2),
    ]
    joined = (StateRows(0, 2, 3, save=8), StateRows(2, 3, 3), StateRows(3, 9, 2))
    assert StatePlan.of(pieces, CPU).runs == joined
