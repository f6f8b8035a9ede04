"""A straight line through what was measured lately."""

from __future__ import annotations


class FittedLine:
    """Least squares over points (x, y) of which old ones count less and less: after `points` more, a third as much."""

    def __init__(self, points: float) -> None:
        self._keep = 1.0 - 1.0 / points
        self.weight = self._x = self._y = 0.0  # decaying sums, also of:
        self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        """One more point."""
        self.weight = self._keep * self.weight + 1.0
        self._x = self._keep * self._x + x
        self._y = self._keep * self._y + y
        self._xx = self._keep * self._xx + x * x
        self._xy = self._keep * self._xy + x * y

    @property
    def mean_x(self) -> float:
        """Of at least one point."""
        return self._x / self.weight

    @property
    def mean_y(self) -> float:
        """Of at least one point."""
        return self._y / self.weight

    @property
    def variance(self) -> float:
        """Of x: the smaller, the less is known of the slope."""
        return self._xx / self.weight - self.mean_x * self.mean_x

    @property
    def slope(self) -> float:
        """What y grows by for 1 of x; needs points that differ in x."""
        return (self._xy / self.weight - self.mean_x * self.mean_y) / self.variance
