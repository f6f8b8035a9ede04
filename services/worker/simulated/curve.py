"""How long the steps of a real worker took: recorded by `bench.engine --curve`, read by simulated ranks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

DEFAULT_CURVE = Path(__file__).parent / "curves" / "default.json"


class CurveError(Exception):
    """A file is no curve; the message names the file and the field."""


class CurvePoint(BaseModel):
    """The median time of steps of one size, without what their keys add."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(ge=1)
    seconds: float = Field(gt=0, lt=3600)


def _in_order(points: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    if any(low.rows >= high.rows for low, high in itertools.pairwise(points)):
        raise ValueError(f"expected points whose rows grow, not {[point.rows for point in points]}")
    return points


_Points = Annotated[tuple[CurvePoint, ...], Field(min_length=1), AfterValidator(_in_order)]
_KeySeconds = Annotated[float, Field(ge=0, lt=1)]


class StepCurve(BaseModel):
    """Seconds of a step by its rows and by the keys that they attend to.

    Between two points the time is linear; beyond the last one it goes on as between the last two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str  # processor or GPU, with the number of cores or GPUs
    model: str
    device: Literal["cpu", "cuda"]
    dtype: str
    tensor_parallel: int = Field(ge=1)
    kv_tokens: int = Field(0, ge=0, description="size of the worker's KV cache; 0: the default of workers")
    decode: _Points  # steps of decodes only, by their number
    decode_key_s: _KeySeconds  # seconds that a key of a decode adds
    prefill: _Points  # steps of one prompt's rows only, by their number
    prefill_key_s: _KeySeconds  # seconds that a key of a prefill row adds

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises CurveError."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CurveError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors())
            raise CurveError(f"{path} is no curve of `bench.engine --curve`: {'; '.join(problems)}") from error

    def write(self, path: Path) -> None:
        """Write a file."""
        path.write_text(self.model_dump_json(indent=2) + "\n")

    def seconds(self, n_decodes: int, decode_keys: float, n_prefill_rows: int, prefill_keys: float) -> float:
        """Seconds of a step. One that decodes and prefills reads the weights once."""
        of_decodes = _interpolate(self.decode, n_decodes) + self.decode_key_s * decode_keys
        of_prefills = _interpolate(self.prefill, n_prefill_rows) + self.prefill_key_s * prefill_keys
        weights_s = min(self.decode[0].seconds, self.prefill[0].seconds) if n_decodes and n_prefill_rows else 0.0
        return of_decodes + of_prefills - weights_s


def _interpolate(points: Sequence[CurvePoint], rows: int) -> float:
    """Seconds at `rows`; fewer rows than the first point's take as long as these, none take no time."""
    if not rows:
        return 0.0
    if rows <= points[0].rows or len(points) == 1:
        return points[0].seconds
    at = min(bisect_right(points, rows, key=lambda point: point.rows), len(points) - 1)
    low, high = points[at - 1], points[at]
    return max(low.seconds, low.seconds + (rows - low.rows) * (high.seconds - low.seconds) / (high.rows - low.rows))
