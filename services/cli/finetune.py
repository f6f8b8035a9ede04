"""`ryzanstein finetune`: a file of conversations becomes a served adapter, with progress and a curve of its losses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.errors import CommandError
from services.cli.gateway import ask

_LOOK_S = 1.0
_OVER = ("succeeded", "failed", "cancelled", "paused")
_WIDTH, _HEIGHT = 56, 10  # a line of the curve fits 80 columns


@dataclass(frozen=True, slots=True)
class GatewayApi:
    """The API of an installation."""

    url: str
    api_key: str

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """Send a request; returns the answer's JSON. Raises CommandError."""
        return ask(method, self.url, f"/v1/{path}", self.api_key, **request)

    def upload(self, path: Path) -> str:
        """Upload a file of conversations; returns its id."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
        files = {"file": (path.name, content)}
        return str(self.ask("POST", "files", data={"purpose": "fine-tune"}, files=files)["id"])

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """The last events of a job, the oldest first."""
        events: list[dict[str, Any]] = self.ask("GET", f"fine_tuning/jobs/{job_id}/events?limit=1000")["data"]
        return events[::-1]


def run(
    gateway: GatewayApi,
    training: Path,
    validation: Path | None,
    body: dict[str, Any],
    hyper: Mapping[str, float | str],
    *,
    watch: bool,
) -> None:
    """Upload the files and create the job; prints its id, or with `watch`, once it has succeeded, the model's name."""
    body["training_file"] = gateway.upload(training)
    if validation is not None:
        body["validation_file"] = gateway.upload(validation)
    body["method"] = {"type": "supervised", "supervised": {"hyperparameters": dict(hyper)}}
    job = gateway.ask("POST", "fine_tuning/jobs", json=body)
    if not watch:
        print(job["id"])  # noqa: T201
        return
    job = _follow(gateway, job)
    if job["status"] != "succeeded":
        raise CommandError(f"{job['id']} {job['status']}: {(job['error'] or {}).get('message', 'by request')}")
    print(job["fine_tuned_model"])  # noqa: T201


def _follow(gateway: GatewayApi, job: dict[str, Any]) -> dict[str, Any]:
    """Show the job until it is over; returns it then."""
    with Live(console=Console(stderr=True), refresh_per_second=4) as live:
        while True:
            job = gateway.ask("GET", f"fine_tuning/jobs/{job['id']}")
            live.update(_view(job, gateway.events(job["id"])))
            if job["status"] in _OVER:
                return job
            time.sleep(_LOOK_S)


def _view(job: dict[str, Any], events: Sequence[dict[str, Any]]) -> RenderableType:
    steps = [event["data"] for event in events if "train_loss" in (event["data"] or {}) and "step" in event["data"]]
    checks = [event["data"] for event in events if "valid_loss" in (event["data"] or {}) and "step" in event["data"]]
    done, total = job["progress"].get("step", 0), job["progress"].get("steps", 0)
    last = steps[-1] if steps else {"tokens_per_s": 0, "left_s": 0}
    pace = Table.grid(padding=(0, 1))
    pace.add_row(
        ProgressBar(total=total or 1, completed=done, width=20), f"{done}/{total} steps",
        f"{last['tokens_per_s']:.0f} trained tokens/s", f"{last['left_s']:.0f} s left",
    )  # fmt: skip
    rows = [Text(line) for line in curve([(step["step"], step["train_loss"]) for step in steps])]
    if checks:
        first, now = checks[0]["valid_loss"], checks[-1]["valid_loss"]
        rows.append(Text(f"validation loss {first:.3f} at step {checks[0]['step']}, {now:.3f} now"))
    rows += [Text(event["message"], style="red") for event in events if event["level"] == "error"]
    return Group(Text(f"{job['id']} {job['status']}"), pace, *rows)


def curve(points: Sequence[tuple[int, float]]) -> list[str]:
    """Draw losses by step as lines of text; the highest loss is in the first line, the lowest in the last."""
    if len(points) < 2:
        return []
    first, last = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for step, loss in points:
        column = round((step - first) / max(1, last - first) * (_WIDTH - 1))
        row = round((high - loss) / ((high - low) or 1) * (_HEIGHT - 1))
        grid[row][column] = "•"
    marks = {0: f"{high:.3f}", _HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{marks.get(index, ''):>8} ┤{''.join(row)}" for index, row in enumerate(grid)]
    return [*lines, f"{'loss':>8} └{'─' * _WIDTH} step {last}"]
