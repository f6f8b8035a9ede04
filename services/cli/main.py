"""The `ryzanstein` command: defines the subcommands, and prints their errors as one line with exit status 1."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.console import Console

from services.cli.canary import canary
from services.cli.checkpoints import checkpoints
from services.cli.errors import CommandError
from services.cli.keys import keys, seconds_of
from services.cli.kube.commands import kube
from services.cli.options import takes_options
from services.cli.routes import routes
from services.cli.stack.default_model import ChosenModel, default_model
from services.cli.stack.options import HOST, StackOptions
from services.cli.stack.state import read_state

_DOWN_S = 60.0


TrainedQuantization = Literal["none", "nf4"]
BucketWidth = Literal["1m", "1h", "1d"]


class Commands(typer.core.TyperGroup):
    """Prints a :class:`CommandError` or a missing package as one line on stderr."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except CommandError as error:
            cause: Exception = error
            message, status = str(error), error.status
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("services", "ryzanstein"):
                raise
            cause, status = error, 1
            message = f"this needs the Python package {package}: {sys.executable} -m pip install {package}"
        Console(stderr=True).print(f"ryzanstein: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(status) from cause


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")]
Url = Annotated[str, typer.Option(help="Base URL of a gateway elsewhere, instead of --port.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ryzanstein {version('ryzanstein')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def describe(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models, talk to them, and see how they do."""


@app.command("serve", help="The same as `up`.")
@app.command()
@takes_options
def up(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    *,
    options: StackOptions,
) -> None:
    """Start a whole installation on this machine; Ctrl-C stops it."""
    from services.cli import up as command  # imported here, so that other commands start faster

    models = options.model or arguments or []
    if arguments and arguments != models:
        raise CommandError(f"MODEL {' '.join(arguments)} and --model {' '.join(models)}: give one of them")
    if models:
        command.run(replace(options, model=models))
        return
    chosen = default_model()
    if chosen.note:
        Console().print(chosen.note, highlight=False, soft_wrap=True)
    name = options.served_model_name or ([chosen.name] if chosen.name else None)
    config = chosen.generation_config
    command.run(replace(options, model=[chosen.model], served_model_name=name, generation_config=config))


@app.command()
def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            envvar="RYZANSTEIN_MODEL",
            help="A folder, whose weights are not read, or what `up` takes.",
        ),
    ] = "",
    workers: Annotated[int, typer.Option(min=1, max=2000, help="How many workers, all in one process.")] = 1,
    curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times of a worker's steps.", show_default="SmolLM2 on two cores"),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster than the curve.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Mean length of an answer.")] = 128,
    name: Annotated[str, typer.Option("--served-model-name", help="Name in the API; default: the model's own.")] = "",
    host: Annotated[str, typer.Option(help="Address that the gateway listens on; 0.0.0.0: every one.")] = HOST,
    port: Port = 8000,
    api_key: Annotated[str, typer.Option(envvar="RYZANSTEIN_API_KEY", help="Key that callers must send.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; repeatable.")
    ] = None,
) -> None:
    """Start an installation whose workers compute nothing, to develop and load-test clients."""
    from services.cli import up as command

    chosen = ChosenModel(model) if model else default_model()
    given = {"speed": speed, "answer_tokens": answer_tokens} | ({"curve": json.dumps(_file(curve))} if curve else {})
    options = StackOptions(
        [chosen.model],
        [name or chosen.name] if name or chosen.name else None,
        workers=workers,
        engine="simulated",
        engine_arg=[f"{key}={value}" for key, value in given.items()],
        host=host,
        port=port,
        api_key=api_key,
        settings=settings,
    )
    command.run(options)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def plan(arguments: typer.Context) -> None:
    """Say how many workers meet targets, by hour, from the log of requests or a trace; --help lists the options."""
    os.execv(sys.executable, [sys.executable, "-m", "services.planner", *arguments.args])  # gets signals itself


def _file(path: Path) -> str:
    if not path.is_file():
        raise CommandError(f"--curve {path}: no such file")
    return str(path.absolute())


@app.command()
def down(port: Port = 8000) -> None:
    """Stop the installation on PORT and wait until it is gone."""
    pid = read_state(port).pid
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while _runs(pid):
        if time.monotonic() > deadline:
            raise CommandError(f"the installation on port {port} (pid {pid}) did not stop in {_DOWN_S:.0f} s")
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process runs. A zombie has ended, but its parent has not waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@app.command()
def status(
    port: Port = 8000,
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="A router elsewhere.")] = "",
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Its KV coordinator.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show workers, load, KV use and sessions."""
    from services.cli import status as command

    if not router:
        state = read_state(port)
        router, coordinator = state.router, state.coordinator
    command.show(router, [coordinator] if coordinator else [], as_json=as_json)


@app.command()
def trace(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The answer's x-request-id, or a trace id.")],
    jaeger: Annotated[str, typer.Option(envvar="RYZANSTEIN_JAEGER", help="URL of Jaeger.")] = "http://127.0.0.1:16686",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show where the time of a request went."""
    from services.cli import trace as command

    command.show(request, jaeger, as_json=as_json)


def _address(port: int, url: str) -> str:
    """The base URL of the gateway that a command talks to."""
    return url.rstrip("/") or f"http://{HOST}:{port}"


@app.command()
def chat(
    port: Port = 8000,
    url: Url = "",
    model: Annotated[str, typer.Option(help="Default: the first one served.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    api_key: Annotated[str, typer.Option(envvar="RYZANSTEIN_API_KEY")] = "",
) -> None:
    """Talk to a served model."""
    from services.cli import chat as command

    url = _address(port, url)
    chosen = model or command.first_model(url, api_key)
    command.run(command.ChatSession(url, chosen, temperature, max_tokens, api_key))


@app.command()
def fetch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="OWNER/NAME or hf://OWNER/NAME[:QUANTIZATION][@REVISION].")
    ],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where models are kept; may be shared by many machines.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit; default: main.")] = "",
    name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="Name in DIR; default: OWNER--NAME[@REVISION].")
    ] = "",
    endpoint: Annotated[str, typer.Option(envvar="HF_ENDPOINT", help="URL of the hub or of a mirror.")] = "",
    retries: Annotated[int, typer.Option(min=0, help="How often a failed download is tried again.")] = 5,
) -> None:
    """Bring a model into DIR, whole or not at all, and print its path; nothing to do when it is there."""
    from services.cli.fetch.command import fetch as command
    from services.cli.fetch.repository import ModelReference

    reference = ModelReference.parse(model, revision)
    if "/" in name or name.startswith("."):
        raise CommandError(f"--as {name}: a name in DIR, without slashes and not beginning with a dot")
    print(command(reference, to, name or reference.name, endpoint, retries))  # noqa: T201


@app.command()
def finetune(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Conversations, a JSON object per line.")],
    model: Annotated[str, typer.Option(help="The served model to start from.")],
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Conversations that are not trained on, to measure the loss.")
    ] = None,
    suffix: Annotated[str, typer.Option(help="A part of the result's name.")] = "",
    epochs: Annotated[int, typer.Option(min=0, max=50, help="Passes over FILE; 0: by its size.")] = 0,
    batch_size: Annotated[int, typer.Option(min=0, max=256, help="Conversations per step; 0: by FILE's size.")] = 0,
    learning_rate_multiplier: Annotated[float, typer.Option(min=0, max=1000, help="Times 0.0002; 0: 1.")] = 0.0,
    lora_rank: Annotated[int, typer.Option(min=1, max=64, help="Rank of the adapter.")] = 16,
    quantization: Annotated[
        TrainedQuantization, typer.Option(help="nf4: the base in 4 bits while it trains (QLoRA).")
    ] = "none",
    watch: Annotated[bool, typer.Option("--watch", help="Show progress and losses until the model is served.")] = False,
    port: Port = 8000,
    url: Url = "",
    api_key: Annotated[str, typer.Option(envvar="RYZANSTEIN_API_KEY")] = "",
) -> None:
    """Train a LoRA adapter on FILE, and serve it; prints the job's id, with --watch the name of the new model."""
    from services.cli import finetune as command

    chosen: dict[str, float] = {
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate_multiplier": learning_rate_multiplier,
    }
    hyper: dict[str, float | str] = {name: value for name, value in chosen.items() if value}
    hyper |= {"lora_rank": lora_rank, "quantization": quantization}
    body = {"model": model, **({"suffix": suffix} if suffix else {})}
    command.run(command.GatewayApi(_address(port, url), api_key), file, validation, body, hyper, watch=watch)


@app.command()
def usage(
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back: 30d, 12h.")] = "7d",
    by: Annotated[
        list[str] | None,
        typer.Option(help="tenant, key, model or batch; again for each. Default: tenant and model."),
    ] = None,
    bucket: Annotated[BucketWidth, typer.Option(help="Width of a row: a minute, an hour or a day.")] = "1d",
    csv: Annotated[bool, typer.Option("--csv", help="For spreadsheets.")] = False,
    port: Port = 8000,
    url: Url = "",
    api_key: Annotated[str, typer.Option(envvar="RYZANSTEIN_API_KEY")] = "",
) -> None:
    """Show the tokens used and their costs: all with an administrator's key, else those of the key's tenant."""
    from services.cli import usage as command

    groups = command.checked_groups(by or ["tenant", "model"])
    since_s = seconds_of("--since", since)
    command.run(command.TableQuery(_address(port, url), api_key, since_s, bucket, groups), as_csv=csv)


app.add_typer(checkpoints)
app.add_typer(kube, name="kube")
app.add_typer(keys, name="keys")
app.add_typer(routes, name="routes")
app.add_typer(canary, name="canary")

bench = typer.Typer(no_args_is_help=True, help="What `make bench` measured.")
app.add_typer(bench, name="bench")


@bench.command("compare")
def bench_compare(
    before: Annotated[Path, typer.Argument(help="An earlier file of `make bench`.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
    everything: Annotated[bool, typer.Option("--all", help="Also what did not move.")] = False,
) -> None:
    """Show what moved further than it varies; exit status 1 when anything became worse."""
    from services.cli.benchmarks import comparison

    if comparison.run(before, after, everything=everything):
        raise typer.Exit(1)
