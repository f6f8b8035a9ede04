"""Orders the merges of SentencePiece's BPE, whose files have scores of pieces instead. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping


def piece_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, best-scored pieces first, which is SentencePiece's order."""
    merges = [
        (-score, whole[:cut], whole[cut:])
        for whole, score in scores.items()
        for cut in range(1, len(whole))
        if whole[:cut] in scores and whole[cut:] in scores
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]
