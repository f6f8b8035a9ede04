"""Measures what our plane costs in front of vLLM: vLLM by its own server, and the same vLLM behind `ryzanstein up`.

    python -m bench.plane 100m --vllm /opt/vllm/bin/python --rounds 3 --out F

Both servers get the same engine arguments, weights and prompts, and run in turns, one at a time. The table shows
medians over the rounds: output tokens/s with their ratio, and the time to the first token with its difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.compare import SETTLE_S, Entry, Scenario, compare
from bench.make_checkpoint import SHAPES, write_checkpoint
from bench.serve import Load
from bench.servers import Asked, Peer, read_peers
from bench.standstill import watch
from bench.stats import median
from services.cli.stack.options import read_engine_args
from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import engine_arguments

ALONE, BEHIND = "vllm", "ryzanstein-vllm"
START_TIMEOUT_S = 900.0


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's EngineArgs as options of its server."""
    words = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif value is not None:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
    return words


def peers(python: str, engine_args: Mapping[str, Any], ranks: int, dtype: str, max_len: int) -> dict[str, Peer]:
    """The two servers; `python` is that of the environment with vLLM."""
    settings = WorkerSettings(
        model="model",
        engine="vllm",
        engine_args=dict(engine_args),
        tensor_parallel=ranks,
        dtype=dtype,
        max_model_len=max_len,
    )
    arguments = engine_arguments(settings, "") | {"model": None}  # the checkpoint is known later
    server = [python, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments)]
    ours = [str(Path(sys.executable).parent / "ryzanstein"), "up", "--engine", "vllm", "--engine-python", python]
    ours += ["--tensor-parallel", str(ranks), "--dtype", dtype, "--max-model-len", str(max_len)]
    ours += ["--start-timeout", f"{START_TIMEOUT_S:g}"]
    for name, value in engine_args.items():
        ours += ["--engine-arg", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    alone = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {
        ALONE: _peer(ALONE, server, alone | {"OMP_NUM_THREADS": "{threads}"}),
        BEHIND: _peer(BEHIND, ours, read_peers()["ryzanstein"].env),
    }


def _peer(name: str, words: list[str], env: dict[str, str]) -> Peer:
    """A server as bench/peers.toml has them: braces in its command stand for names."""
    command = shlex.join(words).replace("{", "{{").replace("}", "}}") + " --model {model} --port {port}"
    return Peer(name, command, "/health", env=env, start_timeout_s=START_TIMEOUT_S)


def show(results: dict, console: Console) -> None:
    """Print the medians of both servers, the ratio of throughputs and the difference of times to the first token."""
    table = Table(title="vLLM alone, and behind our plane; medians of rounds")
    for column in ("load", "alone tokens/s", "behind tokens/s", "ratio", "alone TTFT ms", "behind TTFT ms", "more ms"):
        table.add_column(column)
    for scenario, by_peer in results["scenarios"].items():
        if by_peer.keys() != {ALONE, BEHIND}:
            continue
        rate, first = (
            {name: median([run[field] for run in runs]) for name, runs in by_peer.items()}
            for field in ("output_tokens_per_s", "ttft_ms_p50")
        )
        cells = (rate[ALONE], rate[BEHIND], rate[BEHIND] / rate[ALONE])
        times = (first[ALONE], first[BEHIND], first[BEHIND] - first[ALONE])
        table.add_row(
            scenario, *(f"{cell:,.0f}" for cell in cells[:2]), f"{cells[2]:.3f}", *(f"{ms:.1f}" for ms in times)
        )
    console.print(table)
    for name, reasons in results["failed"].items():
        for reason in reasons:
            console.print(f"[red]{name}[/] {reason}")


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    vllm: Annotated[str, typer.Option(help="Python of the environment with vLLM and our package.")],
    engine_arg: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of vLLM's EngineArgs, for both.")] = None,
    clients: Annotated[list[int] | None, typer.Option(help="Concurrent requests; 16 and 64 if left out.")] = None,
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    rounds: int = 3,
    ranks: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    dtype: str = "bfloat16",
    max_len: int = 4096,
    settle: Annotated[float, typer.Option(help="Seconds that the machine has to itself after each server.")] = SETTLE_S,
    out: Annotated[Path | None, typer.Option(help="Write all runs as JSON.")] = None,
) -> None:
    """Compare vLLM by its own server with vLLM behind our plane, on a random checkpoint of SHAPE."""
    engine_args = read_engine_args(engine_arg or [])
    vocab = SHAPES[shape].vocab
    loads = tuple(
        Scenario(f"{count} clients ({prompt_tokens}+{output_tokens})", load)
        for count in clients or (16, 64)
        for load in (Load(2 * count, count, prompt_tokens, output_tokens, vocab=vocab),)
    )
    both = peers(vllm, engine_args, ranks, dtype, max_len)
    with tempfile.TemporaryDirectory() as folder, watch(os.sched_getaffinity(0)) as machine:
        checkpoint = Path(folder) / f"llama-{shape}"
        write_checkpoint(SHAPES[shape], checkpoint)
        logs = Path(tempfile.mkdtemp(prefix="plane-logs-"))
        entries = [Entry(peer, "", Asked(str(checkpoint), ranks)) for peer in both.values()]
        (results,) = asyncio.run(compare(entries, loads, rounds, logs, machine, settle)).values()
    show(results, Console())
    if out:
        facts = {"shape": shape, "ranks": ranks, "engine_args": engine_args}
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        out.write_text(json.dumps(facts | stamp | results, indent=1) + "\n")
    raise typer.Exit(bool(results["failed"]))


if __name__ == "__main__":
    typer.run(main)
