"""A straight line fitted through recent measurements."""

from __future__ import annotations


class FittedLine:
    """Least squares over points (x, y), with decaying weights: after `points` more points, a point weighs 1/e."""

    def __init__(self, points: float) -> None:
        self._keep = 1.0 - 1.0 / points
        self.weight = self._x = self._y = 0.0  # decaying sums
        self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        """Add a point."""
        self.weight = self._keep * self.weight + 1.0
        self._x = self._keep * self._x + x
        self._y = self._keep * self._y + y
        self._xx = self._keep * self._xx + x * x
        self._xy = self._keep * self._xy + x * y

    @property
    def mean_x(self) -> float:
        """The mean of x; needs a point."""
        return self._x / self.weight

    @property
    def mean_y(self) -> float:
        """The mean of y; needs a point."""
        return self._y / self.weight

    @property
    def variance(self) -> float:
        """The variance of x: the smaller, the less certain the slope."""
        return self._xx / self.weight - self.mean_x * self.mean_x

    @property
    def slope(self) -> float:
        """The growth of y per unit of x; needs points that differ in x."""
        return (self._xy / self.weight - self.mean_x * self.mean_y) / self.variance
