"""The file that `make bench` writes: the machine, its metrics, and their noise."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, computed_field

from services.cli.errors import CommandError


class Better(StrEnum):
    """Whether a metric improves by falling or by rising."""

    LOWER = "lower"
    HIGHER = "higher"


def readable(value: float) -> str:
    """Four significant digits, without exponents for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Metric(_Frozen):
    """One metric, measured once per round."""

    unit: str
    better: Better
    samples: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]  # in the order of the rounds

    @computed_field  # type: ignore[prop-decorator]
    @property
    def median(self) -> float:
        """The metric's value."""
        return median(self.samples)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def spread(self) -> float:
        """Largest sample minus smallest: the noise within one run."""
        return max(self.samples) - min(self.samples)


class Results(_Frozen):
    """One run of the benchmark set."""

    format: Literal[1] = 1
    taken: str  # ISO 8601, UTC
    commit: str  # ends in "+changes" if the checkout had uncommitted changes
    rounds: Annotated[int, Field(ge=1)]
    machine: dict[str, str]
    versions: dict[str, str]
    metrics: dict[str, Metric]


def read_results(path: Path) -> Results:
    """Read a file of `make bench`; raises :class:`CommandError`, which names the wrong field."""
    try:
        return Results.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CommandError(f"{path} is not a file of `make bench`: {where}: {first['msg']}") from error
