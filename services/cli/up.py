"""`ryzanstein up`: runs a whole installation on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import time
from collections.abc import Sequence
from itertools import chain

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.cli.errors import CommandError
from services.cli.stack.layout import StackProcess
from services.cli.stack.options import StackOptions, check
from services.cli.stack.supervisor import Stack
from services.cli.tables import print_whole
from services.common.processes.process import ManagedProcess
from services.common.rpc import open_channel


class StartProgress:
    """Shows the processes while they start: a live table in a terminal, else plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, transient=True, refresh_per_second=10)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def report(self, name: str, state: str) -> None:
        """Show the new state of one process."""
        self._states[name] = state
        if self._live:
            self._live.update(self._table())
        else:
            self._console.print(f"{name}: {state}", highlight=False)

    def _table(self) -> Table:
        table = Table(box=None, show_header=False)
        for name, state in self._states.items():
            table.add_row(name, f"[green]{state}" if state.startswith("ready") else f"[yellow]{state} …")
        return table


def run(options: StackOptions) -> None:
    """Start the installation, print its addresses, supervise it until Ctrl-C or SIGTERM, then stop it."""
    check(options)
    asyncio.run(_run(options, Console()))


async def _run(options: StackOptions, console: Console) -> None:
    began = time.monotonic()
    progress = StartProgress(console)
    stack = Stack(options, progress.report)
    task = asyncio.ensure_future(_start_and_supervise(stack, progress, console, began))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        console.print("Stopping …", highlight=False)
        await stack.stop()
    console.print("Stopped; nothing is left running.", highlight=False)


async def _start_and_supervise(stack: Stack, progress: StartProgress, console: Console, began: float) -> None:
    with progress:
        await stack.start()
    elapsed = time.monotonic() - began
    first = {process.spec.model: process.spec.address for process in reversed(stack.processes)}
    cards = [await _model_card(first[model]) for model in stack.options.models]
    for table in (_processes_table(stack.processes), _startup_table(cards)):
        console.print(table) if console.is_terminal else print_whole(console, table)
    console.print(f"Logs: {stack.folder / 'logs'}", highlight=False, soft_wrap=True)
    console.print(_how_to_call(cards, stack.options, elapsed), highlight=False, soft_wrap=True)
    await stack.supervise()


async def _model_card(address: str) -> worker_pb2.ModelCard:
    async with open_channel(address) as channel:
        try:
            return await worker_pb2_grpc.WorkerStub(channel).GetModelCard(worker_pb2.GetModelCardRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"the worker does not answer: {error.details()}") from error


def _processes_table(processes: Sequence[ManagedProcess[StackProcess]]) -> Table:
    table = Table(title="What runs where", title_justify="left")
    several = len({process.spec.model for process in processes if process.spec.model}) > 1
    for column in ("service", *(("model",) if several else ()), "pid", "address", "ready after"):
        table.add_column(column, overflow="fold", no_wrap=column != "address")
    for process in processes:
        table.add_row(
            process.spec.name,
            *((process.spec.model.name if process.spec.model else "",) if several else ()),
            str(process.pid),
            process.spec.address,
            f"{process.ready_after_s:.1f} s",
        )
    return table


def _startup_table(cards: Sequence[worker_pb2.ModelCard]) -> Table:
    """Phases and facts by model, of its first worker."""
    table = Table(title="Worker start (slowest rank)", title_justify="left")
    table.add_column("phase")
    for card in cards:
        table.add_column(f"{card.model}: ms" if len(cards) > 1 else "ms", justify="right")
    phases = [{phase.name: f"{phase.ms:.0f}" for phase in card.startup} for card in cards]
    for rows, style in ((phases, ""), ([_facts(card) for card in cards], "dim")):
        for label in dict.fromkeys(chain.from_iterable(rows)):
            table.add_row(label, *(row.get(label, "") for row in rows), style=style)
    return table


def _facts(card: worker_pb2.ModelCard) -> dict[str, str]:
    facts = {f"weights: {', '.join(kinds)}": form for form, kinds in _kinds_by_format(card).items()}
    facts["numbers of the KV cache"] = card.kv_dtype or card.dtype
    return facts | {f"memory: {name}": f"{size / 2**20:.0f} MiB" for name, size in sorted(card.memory_bytes.items())}


def _kinds_by_format(card: worker_pb2.ModelCard) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for kind, form in sorted(card.weight_formats.items()):
        kinds.setdefault(form, []).append(kind)
    return kinds


def _how_to_call(cards: Sequence[worker_pb2.ModelCard], options: StackOptions, elapsed_s: float) -> str:
    path, example = _example(cards[0])
    body = shlex.quote(json.dumps({"model": cards[0].model, **example}))
    models = f"Models: {', '.join(card.model for card in cards)}. " if len(cards) > 1 else ""
    key = ' -H "Authorization: Bearer $RYZANSTEIN_API_KEY"' if options.api_key else ""
    return (
        f"\nReady in {elapsed_s:.1f} s at {options.url} (a page, and OpenAI's API: /docs). {models}Try it:\n\n"
        f"curl {options.url}/v1/{path} -H 'Content-Type: application/json'{key} -d {body}\n\n"
        "Ctrl-C stops everything.\n"
    )


def _example(card: worker_pb2.ModelCard) -> tuple[str, dict[str, object]]:
    """Return the path and the body, without the model, of a call that the model can answer."""
    text = "How long may I keep a book?"
    if len(card.classes.labels) == 1:  # a cross-encoder
        return "rerank", {"query": text, "documents": ["Books are lent for three weeks.", "We open at nine."]}
    if card.HasField("classes"):
        return "classify", {"input": text}
    if card.only_embeds:
        return "embeddings", {"input": text}
    if card.chat_template:
        question = [{"role": "user", "content": "Name the capital of France."}]
        return "chat/completions", {"messages": question, "max_tokens": 64}
    return "completions", {"prompt": "def fibonacci(n):", "max_tokens": 64}
