"""The plan of docs/plan.md: an office's day on a slow machine, and on one that is twice as fast.

python docs/pictures/plan.py --picture docs/pictures/plan.svg
python docs/pictures/plan.py --policy cost --policy round_robin
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from services.worker.simulated.curve import DEFAULT_CURVE, CurvePoint, StepCurve

BEGIN = datetime(2026, 11, 16, 6, tzinfo=UTC)
REQUESTS = (10, 40, 100, 130, 80, 120, 130, 60, 30, 10)  # by hour
SLOWER = {"slow": 80.0, "fast": 40.0}  # times as long as on two cores


def slow_curve(slower: float) -> StepCurve:
    """The curve of a model with some billions of parameters."""
    curve = StepCurve.read(DEFAULT_CURVE)

    def slowed(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
        return tuple(point.model_copy(update={"seconds": slower * point.seconds}) for point in points)

    keys = {name: slower * getattr(curve, name) for name in ("decode_key_s", "prefill_key_s")}
    return curve.model_copy(update={"decode": slowed(curve.decode), "prefill": slowed(curve.prefill), **keys})


def day() -> str:
    """The trace, in Azure's format."""
    draw, rows = random.Random(0), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for hour, n_requests in enumerate(REQUESTS):
        for at in sorted(draw.uniform(0, 3600) for _ in range(n_requests)):
            when = BEGIN + timedelta(hours=hour, seconds=at)
            rows.append(f"{when.isoformat()},{draw.randint(50, 400)},{draw.randint(20, 100)}")
    return "\n".join(rows) + "\n"


def plan(options: Sequence[str]) -> None:
    """Print the plan, with more options of `ryzanstein plan`."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "day.csv"
        trace.write_text(day())
        curves = []
        for name, slower in SLOWER.items():
            file = Path(folder) / f"{name}.json"
            slow_curve(slower).write(file)
            curves += ["--curve", str(file)]
        targets = ("--target", "first_token_p95=40s", "--target", "pace_p95=1s", "--most", "10")
        command = [sys.executable, "-m", "services.planner", str(trace), *curves, *targets]
        subprocess.run([*command, *options], check=False)  # 1: an hour without a plan


if __name__ == "__main__":
    plan(sys.argv[1:])
