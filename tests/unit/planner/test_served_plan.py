"""A plan as a picture, and as an endpoint that autoscalers ask."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from services.planner.__main__ import main
from services.planner.picture import picture
from services.planner.planning import Need
from services.planner.rows import PlanRow
from services.planner.serving import PlanBoard, serving
from services.planner.trace import TraceError

SVG = "{http://www.w3.org/2000/svg}"
MONDAY = datetime(2026, 11, 16, 8, tzinfo=UTC)


def row(hour: int, workers: int | None, high: int | None = None, policy: str = "cost") -> PlanRow:
    """An hour of Monday."""
    start = MONDAY.replace(hour=hour)
    need = Need(workers, workers, high or workers, {})
    return PlanRow("a.json", policy, "none", start.timestamp(), f"{start:%Y-%m-%d %H:%M}", 10, need, None, None)


def failing(reason: str) -> Sequence[PlanRow]:
    raise TraceError(reason)


def ask(board: PlanBoard, path: str = "/v1/plan") -> httpx.Response:
    with serving(board, "127.0.0.1", 0) as port, httpx.Client(trust_env=False) as client:
        return client.get(f"http://127.0.0.1:{port}{path}")


def test_endpoint_answers_the_floor_of_the_hour_and_of_the_next_one_shortly_before() -> None:
    now = MONDAY
    board = PlanBoard(9, lambda: now)
    assert ask(board).status_code == 503
    board.renew(lambda: [row(8, 2), row(9, 5), row(10, None)])
    answer = ask(board)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert body["workers"] == 2
    assert body["schedule"][1] == {"hour": 9, "min": 5, "days": ["mon"]}
    assert body["unplanned"] == ["2026-11-16 10:00"]
    floors = []
    for at in ((8, 54), (8, 56), (9, 30), (10, 30), (11, 0)):
        now = MONDAY.replace(hour=at[0], minute=at[1])
        floors.append(ask(board).json()["workers"])
    assert floors == [2, 5, 5, 9, 0], "an hour that no fleet can serve needs the largest one"
    assert ask(board, "/").status_code == 404


def test_endpoint_keeps_the_plan_when_a_new_one_fails() -> None:
    board = PlanBoard(9, lambda: MONDAY)
    board.renew(lambda: failing("the log is empty"))
    assert ask(board).json() == {"error": "the log is empty"}
    board.renew(lambda: [row(8, 2)])
    board.renew(lambda: failing("Redis is away"))
    body = ask(board).json()
    assert (body["workers"], body["error"]) == (2, "Redis is away")


def test_address_and_variants_of_the_endpoint_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("8090", ":8090", "127.0.0.1:port", "127.0.0.1:70000"):
        with pytest.raises(SystemExit):
            main(["--target", "pace_p95=1s", "--serve", wrong])
        assert "such as 127.0.0.1:8090" in capsys.readouterr().err
    serve = ["--target", "pace_p95=1s", "--serve", "127.0.0.1:0"]
    assert main([*serve, "--policy", "cost", "--policy", "round_robin"]) == 2
    assert "--serve: expected one curve, one policy and one tier" in capsys.readouterr().err


def test_picture_has_a_bar_for_each_planned_hour_and_a_line_for_its_interval() -> None:
    drawn = ElementTree.fromstring(picture([row(8, 2), row(9, 4, 8), row(10, None), row(8, 1, policy="a<b")]))
    bars = [part for part in drawn.iter(f"{SVG}rect") if part.get("class") == "hour"]
    heights = [float(part.get("height", "")) for part in bars]
    assert heights == [25.0, 50.0, 12.5]
    lines = [part for part in drawn.iter(f"{SVG}line") if part.get("class") == "interval"]
    assert [float(part.get("y1", "")) - float(part.get("y2", "")) for part in lines] == [50.0]
    words = [part.text for part in drawn.iter(f"{SVG}text")]
    assert words.count("none") == 1
    assert "Workers by hour: a, a<b" in words


def test_plan_writes_its_picture(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "plan.svg"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-16 08:00:01+00:00,20,2\n")
    assert main([str(trace), "--target", "first_token_p95=1s", "--picture", str(file)]) == 0
    assert file.read_text().count('class="hour"') == 1
