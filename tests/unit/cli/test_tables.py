"""Headings are whole on a terminal of 80 columns, also with names as Kubernetes makes them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from ryzanstein.v1 import routing_pb2, worker_pb2

from services.cli.stack.layout import ProcessSpec
from services.cli.stack.process import ManagedProcess
from services.cli.status import _COLUMNS, _print_workers
from services.cli.up import _example, _processes_table

VIEW = routing_pb2.WorkerView(
    worker_id="ryzanstein-workers-default-0",
    model="Qwen--Qwen3-Coder-480B-A35B-Instruct",
    why_not="no state for too long",
    state=worker_pb2.WorkerState(phase=worker_pb2.PHASE_RECOVERING, running=64, waiting=1024, decode_step_ms=123.4),
)


def console(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width), stream


@pytest.mark.parametrize("width", [80, 200])
def test_status_shows_every_heading_and_every_number(width: int) -> None:
    terminal, stream = console(width)
    _print_workers(terminal, routing_pb2.ListWorkersResponse(router_id="r", policy="cost", workers=[VIEW]))
    text = " ".join(stream.getvalue().split())
    assert "…" not in text
    assert all(column in text for column in _COLUMNS[3:])
    assert all(value in text for value in (VIEW.worker_id, VIEW.model, VIEW.why_not, "recovering", "1024", "123.4"))
    assert max(map(len, stream.getvalue().splitlines())) <= width


@pytest.mark.parametrize("width", [80, 240])
def test_status_shows_adapters_where_workers_have_slots_for_them(width: int) -> None:
    adapters = [worker_pb2.ResidentAdapter(name=name, in_slot=name != "kept") for name in ("one", "two", "kept")]
    state = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, adapters=adapters, adapter_slots=8)
    adapted = routing_pb2.WorkerView(worker_id="adapted", model="m", eligible=True, state=state)
    for views, shown in (([VIEW], False), ([VIEW, adapted], True)):
        terminal, stream = console(width)
        _print_workers(terminal, routing_pb2.ListWorkersResponse(router_id="r", policy="cost", workers=views))
        text = " ".join(stream.getvalue().split())
        assert ("adapters" in text, "2/8, 1 kept" in text, "0/0" in text) == (shown, shown, shown)


def test_up_shows_every_heading_and_every_process() -> None:
    async def never() -> bool:
        return False

    address = "unix:///run/user/1000/ryzanstein/8000/redis.sock" * 2
    process = ManagedProcess(ProcessSpec("kv-coordinator", (), address, never, never), Path("log"))
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
