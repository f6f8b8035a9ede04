"""The options of `ryzanstein up`, which are checked before any process starts."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from services.cli.errors import CommandError
from services.cli.options import option_parameters
from services.cli.stack.models import UpModel, read_models
from services.common.adapters import check_name, check_path
from services.common.cores import usable_cores
from services.common.durations import read_duration
from services.common.extras import pip_install
from services.common.gguf_files import split_choice
from services.common.worker_options import Dtype, EngineName, KvDtype, Quantization, Speculation

HOST = "127.0.0.1"
_LONGEST_IDLE_S = 10_000 * 86_400
_HIGHEST_PRIORITY = 1000
_HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"

Texts = list[str] | None

# Marks an option that is also a setting, by the same name, of this service.
WORKER, ROUTER, GATEWAY = "worker", "router", "gateway"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The options of one local installation. All but the last one are options of `ryzanstein up`, in this order."""

    model: Annotated[
        Texts,
        Option(
            metavar="MODEL[:QUANTIZATION]",
            help="A folder, a GGUF file, or a hub id; repeatable.",
            show_default="SmolLM2",
        ),
    ] = None
    served_model_name: Annotated[Texts, Option(help="Name in the API, for each model; default: the model's own.")] = (
        None
    )
    workers: Annotated[int, Option(min=1, max=64, help="How many workers of each model.")] = 1
    max_awake: Annotated[int, WORKER, Option(min=0, help="Workers awake at a time, others sleep; 0: all.")] = 0
    idle_sleep: Annotated[str, Option(metavar="TIME", help="Sleep after this time without requests; 0: never.")] = "0"
    pin: Annotated[Texts, Option(metavar="MODEL", help="A model's name: it never sleeps; repeatable.")] = None
    priority: Annotated[
        Texts, Option(metavar="MODEL=N", help="Idle models with a lower priority sleep first; default: 0; repeatable.")
    ] = None
    tensor_parallel: Annotated[
        int, WORKER, Option("--tensor-parallel", "--tensor-parallel-size", min=1, max=16, help="Ranks per worker.")
    ] = 1
    engine: Annotated[EngineName, WORKER, Option(help="What computes: our engine, vLLM, or a simulation.")] = "native"
    engine_arg: Annotated[
        Texts, Option(metavar="KEY=VALUE", help="An argument of vLLM or of the simulation; repeatable.")
    ] = None
    engine_python: Annotated[str, Option(metavar="PATH", help="Python with vLLM; default: this one.")] = ""
    dtype: Annotated[Dtype, WORKER, Option(help="Number format of weights and activations.")] = "auto"
    quantization: Annotated[Quantization, WORKER, Option(help="Rounds weights at load; auto: as stored.")] = "auto"
    max_model_len: Annotated[int, WORKER, Option(min=0, help="Longest sequence in tokens; 0: the model's own.")] = 0
    kv_tokens: Annotated[int, WORKER, Option(min=0, help="KV cache per worker in tokens; 0: chosen by the worker.")] = 0
    gpu_memory_utilization: Annotated[
        float, WORKER, Option(min=0.05, max=1.0, help="Share of a GPU's memory for weights, largest step and KV cache.")
    ] = 0.9
    kv_dtype: Annotated[KvDtype, WORKER, Option(help="Numbers of the KV cache; int8 and fp8: half of bf16.")] = "auto"
    host_cache_gib: Annotated[float, WORKER, Option(min=0, help="Host memory for evicted KV blocks.")] = 0.0
    disk_cache: Annotated[str, WORKER, Option(metavar="DIR", help="Folder for evicted KV blocks.")] = ""
    disk_cache_gib: Annotated[float, WORKER, Option(min=0.01, help="Size of that folder for each worker.")] = 10.0
    speculation: Annotated[Speculation, WORKER, Option(help="Draft several tokens a step where it pays.")] = "auto"
    adapter: Annotated[Texts, Option(metavar="NAME=DIR", help="A LoRA adapter served as NAME; repeatable.")] = None
    adapter_source: Annotated[str, Option(metavar="DIR", help="Folder of LoRA adapters to load while it runs.")] = ""
    fine_tuning: Annotated[str, Option(metavar="DIR", help="Train adapters of the model, and keep them in DIR.")] = ""
    host: Annotated[str, Option(help="Address that the gateway listens on; 0.0.0.0: every one.")] = HOST
    port: Annotated[int, Option(min=1, max=65535, help="Port of the gateway.")] = 8000
    grpc_port: Annotated[int, GATEWAY, Option(min=0, max=65535, help="Port of the public gRPC API; 0: off.")] = 0
    tls_cert: Annotated[str, Option(metavar="FILE", help="Certificate in PEM: REST and gRPC speak TLS then.")] = ""
    tls_key: Annotated[str, Option(metavar="FILE", help="Its key, PEM.")] = ""
    api_key: Annotated[str, Option(envvar="RYZANSTEIN_API_KEY", help="Key that callers must send.")] = ""
    redis: Annotated[str, Option(metavar="URL", help="Your Redis; default: an embedded one.")] = ""
    policy: Annotated[str, ROUTER, Option(help="How the router places requests: a name, or a composition.")] = "cost"
    fallback_model: Annotated[str, GATEWAY, Option(help="Served when the asked model has no worker.")] = ""
    start_timeout: Annotated[float, Option(min=1, help="Seconds to wait until everything is ready.")] = 120.0
    settings: Annotated[Texts, Option("--set", metavar="KEY=VALUE", help="Any other setting; repeatable.")] = None
    generation_config: str = ""  # JSON of sampling parameters that outweigh the model's own; empty: none

    @property
    def models(self) -> tuple[UpModel, ...]:
        """The models in the order of their options."""
        names, pins = self.served_model_name or (), self.pin or ()
        return read_models(self.model or (), self.quantization, names, pins, self.priorities)

    @property
    def priorities(self) -> dict[str, int]:
        """Priorities by the model's name."""
        return dict(_named_priority(text) for text in self.priority or ())

    @property
    def idle_sleep_s(self) -> int:
        """Seconds without requests after which a worker sleeps; 0: never."""
        return _whole_seconds("--idle-sleep", self.idle_sleep)

    @property
    def threads_per_rank(self) -> int:
        """The number of cores for each rank. Models share the cores: a rank without requests sleeps."""
        return max(1, usable_cores() // (self.workers * self.tensor_parallel))

    @property
    def url(self) -> str:
        """The gateway's URL on this machine."""
        host = {"0.0.0.0": HOST, "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    def settings_of(self, service: str) -> dict[str, str]:
        """The environment of a service by its options; it chooses itself what is empty or 0."""
        names = [each.name for each in option_parameters(StackOptions) if service in each.annotation.__metadata__]
        return {variable(name): str(value) for name in names if (value := getattr(self, name))}

    @property
    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's engine."""
        return read_engine_args(self.engine_arg or ())

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters: names and absolute folders."""
        return dict(_named_folder(text) for text in self.adapter or ())


def variable(setting: str) -> str:
    """The environment variable of a setting."""
    return f"RYZANSTEIN_{setting.upper()}"


def pair(option: str, text: str, example: str) -> tuple[str, str]:
    """The key, spelled as a name in Python, and the value of KEY=VALUE. Raises :class:`CommandError`."""
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not key:
        raise CommandError(f"{option} {text}: expected KEY=VALUE, such as {example}")
    return key, value


def read_engine_args(given: Iterable[str]) -> dict[str, Any]:
    """The values of KEY=VALUE by key; a value is JSON where it can be, else text. Raises :class:`CommandError`."""
    arguments: dict[str, Any] = {}
    for text in given:
        key, value = pair("--engine-arg", text, "gpu_memory_utilization=0.8")
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = {"True": True, "False": False}.get(value, value)
    return arguments


def _named_priority(text: str) -> tuple[str, int]:
    """Return the model and the number of MODEL=N. Raises :class:`CommandError`."""
    name, equals, number = text.rpartition("=")
    if not equals or not re.fullmatch(r"[-+]?\d{1,4}", number) or abs(int(number)) > _HIGHEST_PRIORITY:
        limits = f"from -{_HIGHEST_PRIORITY} to {_HIGHEST_PRIORITY}"
        raise CommandError(f"--priority {text}: expected MODEL=N, with a whole number N {limits}")
    return name, int(number)


def _named_folder(text: str) -> tuple[str, str]:
    """Return the name and the absolute folder of NAME=DIR. Raises :class:`CommandError`."""
    name, separator, folder = text.partition("=")
    if not (separator and name and folder):
        raise CommandError(f"--adapter {text}: expected NAME=DIR")
    try:
        check_name(name)
        check_path(folder)
    except ValueError as error:
        raise CommandError(f"--adapter NAME=DIR: {error}") from error
    return name, str(Path(folder).absolute())


def check(options: StackOptions) -> None:
    """Raise :class:`CommandError` for options that would fail, before any process starts."""
    for model in options.models:
        model.check()
    _check_sleep(options)
    _check_engine(options)
    _check_adapters(options)
    _check_certificate(options)
    if options.fine_tuning:
        _check_fine_tuning(options)
    _check_port(options.host, options.port)
    if options.grpc_port:
        _check_port(options.host, options.grpc_port)
    if options.redis and not options.redis.startswith(("redis://", "rediss://", "unix://")):
        raise CommandError(f"--redis {options.redis}: must start with redis://, rediss:// or unix://")
    if options.api_key and os.environ.get("RYZANSTEIN_API_KEYS"):
        raise CommandError("--api-key and RYZANSTEIN_API_KEYS: give one of them")


def _whole_seconds(option: str, text: str) -> int:
    """Seconds of a duration. Raises :class:`CommandError`."""
    try:
        seconds = read_duration(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from error
    if seconds and not 1 <= seconds <= _LONGEST_IDLE_S:
        raise CommandError(f"{option} {text}: expected 0, or from 1s to {_LONGEST_IDLE_S // 86_400}d")
    return int(seconds)


def _check_sleep(options: StackOptions) -> None:
    _whole_seconds("--idle-sleep", options.idle_sleep)
    names = [model.name for model in options.models]
    for pin in options.pin or ():
        if pin not in names:
            raise CommandError(f"--pin {pin}: expected the name of a model: {', '.join(names)}")
    for name in options.priorities:
        if name not in names:
            raise CommandError(f"--priority {name}: expected the name of a model: {', '.join(names)}")
    awake, pinned = options.max_awake, options.workers * sum(model.pinned for model in options.models)
    if awake and pinned > awake:
        raise CommandError(f"--pin: more pinned workers than --max-awake {awake}")
    if awake and awake == pinned and not all(model.pinned for model in options.models):
        raise CommandError(f"--pin: with --max-awake {awake} and as many pinned workers, other models never wake")


def _check_adapters(options: StackOptions) -> None:
    if options.adapter and len(options.models) > 1:
        raise CommandError("--adapter: with several models, load the adapters of each by --adapter-source")
    for name, folder in options.adapters.items():
        if not (Path(folder) / "adapter_config.json").is_file():
            raise CommandError(f"--adapter {name}={folder}: no adapter_config.json there")
    if options.adapter_source and not Path(options.adapter_source).is_dir():
        raise CommandError(f"--adapter-source {options.adapter_source}: no such folder")


def _check_fine_tuning(options: StackOptions) -> None:
    if missing := [name for name in ("peft", "transformers") if not find_spec(name)]:
        lack = f"({', '.join(missing)} missing)"
        install = pip_install("finetune", f"{sys.executable} -m pip")
        raise CommandError(f"--fine-tuning needs the extra finetune {lack}: {install}")
    for model in options.models:
        if not Path(split_choice(model.source)[0]).exists():
            raise CommandError(f"--fine-tuning: --model must be a folder or a GGUF file, and is {model.source}")
    if options.engine != "native":
        raise CommandError(f"--fine-tuning: trains for our own engine, not for --engine {options.engine}")


def _check_engine(options: StackOptions) -> None:
    if options.engine == "native" and options.engine_args:
        raise CommandError("--engine-arg: is for --engine vllm or simulated")
    if options.engine != "vllm":
        return
    python = options.engine_python or sys.executable
    try:
        installed = subprocess.run([python, "-c", _HAS_VLLM], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise CommandError(f"--engine-python {python}: {error.strerror}") from error
    if not installed:
        raise CommandError(
            f"--engine vllm: {python} has no vLLM. It needs an environment of its own, because its pins exclude the "
            f"gateway's: python -m venv DIR; {pip_install('vllm', 'DIR/bin/pip')}; then --engine-python DIR/bin/python"
        )


def _check_certificate(options: StackOptions) -> None:
    if bool(options.tls_cert) != bool(options.tls_key):
        raise CommandError("--tls-cert and --tls-key: give both, or none")
    if options.tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key, password="")
        except OSError as error:  # ssl.SSLError is one
            files = f"--tls-cert {options.tls_cert}, --tls-key {options.tls_key}"
            raise CommandError(f"{files}: no certificate with its key: {error}") from error


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise CommandError(f"port {port} needs privileges; choose one from 1024 on with --port") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CommandError(f"port {port} is in use; choose another one with --port") from error
            raise CommandError(f"--host {host}: not an address of this machine: {error.strerror}") from error
