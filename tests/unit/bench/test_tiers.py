"""Throughputs are compared within a round, since the speed of a machine changes between rounds."""

from __future__ import annotations

import pytest

from bench.tiers import Measured


def test_throughput_is_relative_to_the_first_mode_of_the_same_round() -> None:
    measured = Measured({}, {"none": [1.0, 4.0, 2.0], "host": [2.0, 5.0, 2.0]}, (), ())
    assert measured.relative("none") == 1.0
    assert measured.relative("host") == pytest.approx(0.8)
