"""Output of ranks keeps its level in the server's log, and a traceback is one record."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys

import pytest

from services.common.logs import JsonFormatter
from services.worker.process.launcher import Launcher
from services.worker.process.output import RankOutput


def line_of_rank(level: int, message: str, *, error: BaseException | None = None) -> str:
    info = (type(error), error, error.__traceback__) if error else None
    record = logging.makeLogRecord({"name": "services.x", "levelno": level, "msg": message, "exc_info": info})
    record.levelname = logging.getLevelName(level)
    return JsonFormatter("worker", {"rank": 1}).format(record)


@pytest.fixture
def printed() -> list[str]:
    try:
        raise MemoryError("no room")
    except MemoryError as error:
        raised = error
    return [
        line_of_rank(logging.WARNING, "slow disk"),
        line_of_rank(logging.ERROR, "the rank has failed", error=raised),
        "W1125 15:02:03.123456 77 torch/distributed/run.py:852] setting OMP",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "    import nothing",
        "",
        "ModuleNotFoundError: No module named 'nothing'",
        '{"not": "ours"}',
        "{ not JSON",
        "",
        "plain words",
    ]


def test_levels_survive_and_a_traceback_is_one_record(printed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    output = RankOutput()
    for line in printed:
        output.add(line)
    output.end()
    records = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert records == [
        ("WARNING", "slow disk"),
        ("ERROR", "the rank has failed"),
        ("WARNING", "setting OMP"),
        ("ERROR", "ModuleNotFoundError: No module named 'nothing'"),
        ("INFO", '{"not": "ours"}'),
        ("INFO", "{ not JSON"),
        ("INFO", "plain words"),
    ]
    mine = json.loads(JsonFormatter("worker").format(caplog.records[1]))
    assert (mine["rank"], mine["logger"]) == (1, "services.x")
    assert mine["error"].splitlines()[0] == "Traceback (most recent call last):"
    assert mine["error"].splitlines()[-1] == "MemoryError: no room"
    assert caplog.records[3].error.splitlines()[1:] == printed[4:8]  # type: ignore[attr-defined]
    assert output.tail.startswith("slow disk\nthe rank has failed\nTraceback")
    assert output.tail.endswith("plain words")


def test_a_traceback_that_is_cut_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    output = RankOutput()
    output.add("Traceback (most recent call last):")
    output.add("  File")
    output.end()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_line_for_terminals_is_not_logged() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("gateway"))
    log = logging.Logger("uvicorn.error")
    log.addHandler(handler)
    log.info("Started %d", 1, extra={"color_message": "Started [\x1b[36m%d\x1b[0m]"})
    assert "color_message" not in json.loads(stream.getvalue())


async def test_a_line_without_end_is_cut_and_the_next_lines_are_read() -> None:
    code = "print('x' * 3_000_000, flush=True); print('the end')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    launcher = Launcher(process, 1)
    assert await launcher.wait() == 0
    cut, *rest, last = launcher.output_tail.splitlines()
    assert (cut, last) == ("[a line of more than 1,048,576 bytes]", "the end")
    assert sum(len(line) for line in rest if line != cut) <= 1 << 20, "what is left of it at most"
