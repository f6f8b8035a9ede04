"""The picture of a plan in docs/plan.md: an office's day on a machine that is eighty times slower than two cores.

python docs/pictures/plan.py docs/pictures/plan.svg
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
REQUESTS = (10, 30, 80, 160, 200, 190, 120, 150, 200, 180, 120, 60, 30, 15)  # by hour
SLOWER = 80.0


def slow_curve() -> StepCurve:
    """That of a model of some billions of parameters."""
    curve = StepCurve.read(DEFAULT_CURVE)

    def slowed(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
        return tuple(point.model_copy(update={"seconds": SLOWER * point.seconds}) for point in points)

    keys = {name: SLOWER * getattr(curve, name) for name in ("decode_key_s", "prefill_key_s")}
    return curve.model_copy(update={"decode": slowed(curve.decode), "prefill": slowed(curve.prefill), **keys})


def day() -> str:
    """The trace, in Azure's format."""
    draw, rows = random.Random(0), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for hour, n_requests in enumerate(REQUESTS):
        for at in sorted(draw.uniform(0, 3600) for _ in range(n_requests)):
            when = BEGIN + timedelta(hours=hour, seconds=at)
            rows.append(f"{when.isoformat()},{draw.randint(50, 400)},{draw.randint(20, 100)}")
    return "\n".join(rows) + "\n"


def draw(path: str) -> None:
    """Write the SVG."""
    with tempfile.TemporaryDirectory() as folder:
        trace, curve = Path(folder) / "day.csv", Path(folder) / "machine.json"
        trace.write_text(day())
        slow_curve().write(curve)
        targets = ("--target", "first_token_p95=40s", "--target", "pace_p95=1s", "--most", "8")
        command = [sys.executable, "-m", "services.planner", str(trace), "--curve", str(curve), *targets]
        subprocess.run([*command, "--policy", "cost", "--policy", "round_robin", "--picture", path], check=True)


if __name__ == "__main__":
    draw(sys.argv[1])
