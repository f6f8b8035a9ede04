"""Tensors of a captured step share memory where their lifetimes are disjoint."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels.capture import Arena

_VOCABULARY = 203
_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}


@given(
    made=st.lists(st.tuples(st.integers(1, 300), st.sets(st.integers(0, 9), min_size=1)), min_size=1, max_size=12),
    rows=st.integers(1, 3),
    most=st.integers(3, 5),
)
def test_tensors_share_memory_only_with_tensors_of_disjoint_lifetimes(
    made: list[tuple[int, set[int]]], rows: int, most: int
) -> None:
    """Each is named by some of ten calls: from the first to the last of them it is there."""
    tensors = [torch.empty(rows, size, dtype=torch.uint8) for size, _ in made]
    memory = Arena(tensors, rows, most)
    for index in range(10):
        for tensor, (size, calls) in zip(tensors, made, strict=True):
            if index in calls:
                memory.use(tensor.data_ptr() + size - 1, index)  # a view of it is it
    arena = torch.zeros(memory.place(), dtype=torch.uint8)
    places = [memory.in_arena(tensor, arena) for tensor in tensors]
    assert [place.shape for place in places] == [(most, size) for size, _ in made]
    for index in range(10):
        there = [i for i, (_, calls) in enumerate(made) if min(calls) <= index <= max(calls)]
        for i in there:
            places[i].fill_(i + 1)
        assert all((places[i] == i + 1).all() for i in there)
    assert len(arena) <= sum(-(-size * most // 64) * 64 for size, _ in made)
    last = made[0][0] - 1
    assert memory.moved(tensors[0].data_ptr() + last, arena.data_ptr()) == places[0].data_ptr() + last
    assert memory.moved(arena.data_ptr(), 0) == arena.data_ptr(), "it was there before"
    there_before = torch.arange(2 * most).view(most, 2)
    assert torch.equal(memory.in_arena(there_before[:rows], arena), there_before)
