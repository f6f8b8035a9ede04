"""`ryzanstein status`: workers, load, KV use and sessions, as the router and the coordinator see them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc, worker_pb2

from services.cli.errors import CommandError
from services.cli.tables import plain_console, print_whole, width_of
from services.common.phases import phase_name
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls

_TIMEOUT_S = 10.0  # a busy node's router may take seconds
_DAY_S = 86_400.0
_COLUMNS = (
    "worker",
    "model",
    "phase",
    "takes work",
    "running",
    "waiting",
    "prefill queue",
    "KV used",
    "KV cached",
    "ms/step",
    "sessions",
)
_MEMORY = "memory"  # a column where workers measure it
_PLACES = "KV below"  # a column where workers keep KV blocks below the device
_ADAPTERS = "adapters"  # a column where workers have slots for them
_DRAFTS = "drafts accepted"  # a column where workers have drafted


def show(
    router: str,
    coordinators: Sequence[str],
    *,
    as_json: bool,
    tls: Tls | None = None,
    certificates: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Print the state of an installation; raises :class:`CommandError` if its router does not answer.

    `certificates`: when each one of the services ends, seconds since the epoch.
    """
    workers = asyncio.run(_list_workers(router, tls))
    answers = [asyncio.run(_index(coordinator, tls)) for coordinator in coordinators]
    index = _joined([answer for answer in answers if answer is not None])
    if as_json:
        state = _as_json(workers, index) | {"certificates": dict(certificates)}
        print(json.dumps(state, indent=2))  # noqa: T201
        return
    console = plain_console()
    _print_workers(console, workers)
    _print_accounts(console, workers)
    if index is not None:
        console.print(
            f"KV coordinator: {index.blocks} distinct prefix blocks known, {index.entries} entries, "
            f"{index.resyncs} resyncs"
        )
    if coordinators and index is None:
        console.print("KV coordinator: does not answer; placement goes on without prefix credit", style="red")
    elif silent := answers.count(None):
        console.print(f"KV coordinator: {silent} of {len(answers)} do not answer", style="red")
    if certificates:
        first = min(certificates, key=lambda name: certificates[name])
        days = (certificates[first] - time.time()) / _DAY_S
        console.print(f"mutual TLS: the first certificate to end is {first}, in {days:.0f} days", highlight=False)


async def _list_workers(router: str, tls: Tls | None) -> routing_pb2.ListWorkersResponse:
    async with open_channel(router, to="router", tls=tls) as channel:
        try:
            return await routing_pb2_grpc.RouterStub(channel).ListWorkers(
                routing_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"the router at {router} does not answer: {error.details()}") from error


async def _index(coordinator: str, tls: Tls | None) -> kv_pb2.StatsResponse | None:
    async with open_channel(coordinator, to="coordinator", tls=tls) as channel:
        try:
            return await kv_pb2_grpc.KvCoordinatorStub(channel).Stats(kv_pb2.StatsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None


def _joined(answers: Sequence[kv_pb2.StatsResponse]) -> kv_pb2.StatsResponse | None:
    """The sums over coordinators that divide the workers; None without an answer."""
    if not answers:
        return None
    joined = kv_pb2.StatsResponse()
    for answer in answers:
        joined.blocks, joined.entries = joined.blocks + answer.blocks, joined.entries + answer.entries
        joined.events, joined.gaps = joined.events + answer.events, joined.gaps + answer.gaps
        joined.resyncs += answer.resyncs
        joined.workers.extend(answer.workers)
        joined.hot.extend(answer.hot)
    return joined


def _as_json(workers: routing_pb2.ListWorkersResponse, index: kv_pb2.StatsResponse | None) -> dict[str, Any]:
    def plain(message: Any) -> dict[str, Any]:  # any protobuf message
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    return {"router": plain(workers), "kv_coordinator": plain(index) if index is not None else None}


def _print_workers(console: Console, listed: routing_pb2.ListWorkersResponse) -> None:
    """Print a table; or, if it does not fit a terminal, a paragraph per worker, so that no text is cut."""
    columns: tuple[str, ...] = _COLUMNS
    rows = [_cells(view) for view in listed.workers]
    for column, field, cell in (
        (_MEMORY, "memory", _memory),
        (_PLACES, "kv_places", _places),
        (_ADAPTERS, "adapter_slots", _adapters),
        (_DRAFTS, "drafted_tokens", _drafts),
    ):
        if any(getattr(view.state, field) for view in listed.workers):
            columns += (column,)
            rows = [(*row, cell(view.state)) for row, view in zip(rows, listed.workers, strict=True)]
    table = Table(*columns, title=f"Workers (router {listed.router_id}, policy {listed.policy})", title_justify="left")
    for view, row in zip(listed.workers, rows, strict=True):
        table.add_row(*row, style=None if view.eligible else "red")
    if not console.is_terminal or width_of(console, table) <= console.width:
        print_whole(console, table)
        return
    console.print(table.title, style="italic")
    for row in rows:
        worker, model, phase, *others = row
        values = ", ".join(f"{column} {cell}" for column, cell in zip(columns[3:], others, strict=True))
        console.print(f"{worker}: {model}, {phase}\n", values, sep="", highlight=False)


def _cells(view: routing_pb2.WorkerView) -> tuple[str, ...]:
    state = view.state
    total = max(state.kv_blocks_total, 1)
    return (
        view.worker_id,
        view.model,
        phase_name(state.phase) + _rank(state),
        "yes" if view.eligible else f"no: {view.why_not}",
        str(state.running),
        str(state.waiting),
        str(state.queued_prefill_tokens),
        f"{state.kv_blocks_used / total:.0%}",
        f"{state.kv_blocks_cached / total:.0%}",
        f"{state.decode_step_ms:.1f}",
        str(view.sessions),
    )


def _rank(state: worker_pb2.WorkerState) -> str:
    """Whether the worker may sleep for others, and its priority if it has one."""
    if state.pinned:
        return " (pinned)"
    return f" (priority {state.priority})" if state.priority else ""


def _memory(state: worker_pb2.WorkerState) -> str:
    """The memory that the worker holds, and that it takes while it serves."""
    return f"{_mib(state.memory_bytes)} of {_mib(sum(state.memory.values()))} MiB"


def _print_accounts(console: Console, listed: routing_pb2.ListWorkersResponse) -> None:
    """Print the parts of the memory that serving takes, once for workers with the same ones."""
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for view in listed.workers:
        largest_first = sorted(view.state.memory.items(), key=lambda part: (-part[1], part[0]))
        groups.setdefault(tuple(largest_first), []).append(view.worker_id)
    for parts, workers in groups.items():
        if parts:
            shown = ", ".join(f"{kind.replace('_', ' ')} {_mib(size)}" for kind, size in parts)
            total = _mib(sum(size for _, size in parts))
            console.print(f"memory of {', '.join(workers)}: {total} MiB: {shown}", highlight=False)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def _drafts(state: worker_pb2.WorkerState) -> str:
    """The share of drafted tokens that were drawn."""
    return f"{state.accepted_tokens / state.drafted_tokens:.0%}" if state.drafted_tokens else "-"


def _places(state: worker_pb2.WorkerState) -> str:
    """How full each place is, and why it stores none; names of newer versions are numbers."""
    names = {worker_pb2.KV_PLACE_HOST: "host", worker_pb2.KV_PLACE_DISK: "disk"}
    return ", ".join(
        f"{names.get(each.place, each.place)} {each.bytes / max(each.capacity_bytes, 1):.0%}"
        + (f" fails: {escape(each.fault)}" if each.fault else "")
        for each in state.kv_places
    )


def _adapters(state: worker_pb2.WorkerState) -> str:
    """The adapters in slots, the slots, and the adapters that are in memory only."""
    in_slots = sum(adapter.in_slot for adapter in state.adapters)
    cached = f", {len(state.adapters) - in_slots} kept" if len(state.adapters) > in_slots else ""
    return f"{in_slots}/{state.adapter_slots}{cached}"
