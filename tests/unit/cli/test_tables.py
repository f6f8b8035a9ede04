"""Headings are whole on a terminal of 80 columns, also with names as Kubernetes makes them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from ryzanstein.v1 import routing_pb2, worker_pb2
from typer.testing import CliRunner

from services.cli.keys import _LIMITS
from services.cli.main import app
from services.cli.stack.layout import StackProcess
from services.cli.status import _COLUMNS, _print_accounts, _print_workers
from services.cli.up import _example, _processes_table
from services.common.processes.process import ManagedProcess
from tests.programs import CHART

CLI = CHART.parents[1] / "services/cli"

VIEW = routing_pb2.WorkerView(
    worker_id="ryzanstein-workers-default-0",
    model="Qwen--Qwen3-Coder-480B-A35B-Instruct[awq]",
    why_not="no state for too long",
    state=worker_pb2.WorkerState(phase=worker_pb2.PHASE_RECOVERING, running=64, waiting=1024, decode_step_ms=123.4),
)


def console(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, force_terminal=True, color_system=None, markup=False, emoji=False), stream


def shown_by_status(views: Sequence[routing_pb2.WorkerView], width: int = 240) -> str:
    """The table of the workers and what stands below it."""
    terminal, stream = console(width)
    listed = routing_pb2.ListWorkersResponse(router_id="r", policy="cost", workers=views)
    _print_workers(terminal, listed)
    _print_accounts(terminal, listed)
    assert max(map(len, stream.getvalue().splitlines())) <= width
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_status_shows_every_heading_and_every_number(width: int) -> None:
    text = " ".join(shown_by_status([VIEW], width).split())
    assert "…" not in text
    assert all(column in text for column in _COLUMNS[3:])
    assert all(value in text for value in (VIEW.worker_id, VIEW.model, VIEW.why_not, "recovering", "1024", "123.4"))


@pytest.mark.parametrize(
    ("phase", "name"), [(worker_pb2.PHASE_SLEEPING, "sleeping"), (worker_pb2.PHASE_WAKING, "waking"), (99, "phase_99")]
)
def test_status_names_the_phase_also_of_a_newer_worker(phase: worker_pb2.Phase, name: str) -> None:
    view = routing_pb2.WorkerView(worker_id="w", model="m", state=worker_pb2.WorkerState(phase=phase))
    assert f" {name} " in shown_by_status([view])


@pytest.mark.parametrize("width", [80, 240])
def test_status_shows_the_accepted_share_of_drafts(width: int) -> None:
    state = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, drafted_tokens=200, accepted_tokens=126)
    drafting = routing_pb2.WorkerView(worker_id="drafting", model="m", eligible=True, state=state)
    for views, shown in (([VIEW], False), ([VIEW, drafting], True)):
        text = " ".join(shown_by_status(views, width).split())
        assert ("drafts accepted" in text, "63%" in text) == (shown, shown)


def test_status_shows_how_full_the_places_below_the_device_are() -> None:
    places = [
        worker_pb2.KvPlaceState(place=worker_pb2.KV_PLACE_HOST, bytes=30, capacity_bytes=40),
        worker_pb2.KvPlaceState(place=worker_pb2.KV_PLACE_DISK, bytes=1, capacity_bytes=50, fault="[Errno 28] full"),
    ]
    state = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, kv_places=places)
    keeping = routing_pb2.WorkerView(worker_id="keeping", model="m", eligible=True, state=state)
    for views, shown in (([VIEW], False), ([VIEW, keeping], True)):
        text = " ".join(shown_by_status(views).split())
        assert ("KV below" in text, "host 75%, disk 2% fails: [Errno 28] full" in text) == (shown, shown)


def test_status_shows_the_memory_of_a_worker_and_whether_the_worker_is_pinned() -> None:
    memory = {"weights": 200 << 20, "host_cache": 700 << 20}
    sleeping = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SLEEPING, memory_bytes=30 << 20, memory=memory)
    pinned = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, memory_bytes=800 << 20, memory=memory, pinned=True)
    ranked = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, priority=-2)
    views = [
        routing_pb2.WorkerView(worker_id=worker_id, model="m", state=state)
        for worker_id, state in (("w0", sleeping), ("w1", pinned), ("w2", ranked))
    ]
    text = shown_by_status(views)
    assert all(
        part in text
        for part in ("30 of 900 MiB", "800 of 900 MiB", "serving (pinned)", "serving (priority -2)", " sleeping ")
    )
    assert "memory of w0, w1: 900 MiB: host cache 700, weights 200\n" in text
    assert "memory of w2" not in text


@pytest.mark.parametrize("width", [80, 240])
def test_status_shows_adapters_of_workers_with_slots(width: int) -> None:
    adapters = [worker_pb2.ResidentAdapter(name=name, in_slot=name != "kept") for name in ("one", "two", "kept")]
    state = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, adapters=adapters, adapter_slots=8)
    adapted = routing_pb2.WorkerView(worker_id="adapted", model="m", eligible=True, state=state)
    for views, shown in (([VIEW], False), ([VIEW, adapted], True)):
        text = " ".join(shown_by_status(views, width).split())
        assert ("adapters" in text, "2/8, 1 kept" in text, "0/0" in text) == (shown, shown, shown)


def test_up_shows_every_heading_and_every_process() -> None:
    async def never() -> bool:
        return False

    address = "unix:///run/user/1000/ryzanstein/8000/redis.sock" * 2
    process = ManagedProcess(StackProcess("kv-coordinator", (), address, never, never), Path("log"))
    process.ready_after_s = 12.3
    terminal, stream = console(80)
    terminal.print(_processes_table([process]))
    text = stream.getvalue()
    assert "…" not in text
    assert all(word in text for word in ("kv-coordinator", "service", "address", "ready after", "12.3 s"))


@pytest.mark.parametrize(
    ("card", "path", "field"),
    [
        (worker_pb2.ModelCard(), "completions", "prompt"),
        (worker_pb2.ModelCard(chat_template="{{ messages }}"), "chat/completions", "messages"),
        (worker_pb2.ModelCard(only_embeds=True), "embeddings", "input"),
        (worker_pb2.ModelCard(only_embeds=True, classes={"labels": ["LABEL_0"]}), "rerank", "documents"),
        (worker_pb2.ModelCard(only_embeds=True, classes={"labels": ["good", "bad"]}), "classify", "input"),
    ],
)
def test_up_prints_a_call_that_the_model_can_answer(card: worker_pb2.ModelCard, path: str, field: str) -> None:
    called, body = _example(card)
    assert (called, field in body) == (path, True)


def test_a_list_of_keys_shows_whole_ids_in_a_pipe_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "[m]:cat:" + "m" * 60  # neither markup nor an emoji
    key = {"id": "k" * 24, "name": "n" * 40, "models": [model], "created_at": 1, "until": 0, "admin": True}
    shown = key | {"hours": None} | dict.fromkeys(_LIMITS, 10**9)
    monkeypatch.setattr("services.cli.admin.Admin.call", lambda *_: {"keys": [shown]})
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, ["keys", "list"]).stdout
    lines = [line for line in text.splitlines() if key["id"] in line]
    assert len(lines) == 1
    assert all(str(key[name]) in lines[0] for name in ("id", "name")), lines
    assert model in lines[0]
    assert "…" not in text


def test_no_command_prints_a_table_that_may_be_cut() -> None:
    """Tables go through `print_whole`, save those of `up`, whose cells are folded."""
    printed = re.compile(r"print\(\s*(?:table\)|_\w*table\()")
    actual = {path.name for path in CLI.rglob("*.py") if printed.search(path.read_text())}
    assert actual == {"tables.py", "up.py"}
