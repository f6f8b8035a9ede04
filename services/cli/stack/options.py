"""The options of `ryzanstein up`, which are checked before any process starts."""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.cli.errors import CommandError
from services.common import denied
from services.common.adapters import check_name, check_path
from services.common.cores import usable_cores
from services.common.extras import pip_install
from services.common.gguf_files import find_model, local_path, split_choice

HOST = "127.0.0.1"
_HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The options of one local installation."""

    model: str  # a folder, a GGUF file, or a hub id (owner/name); :NAME chooses among GGUF files
    served_model_name: str = ""  # empty: that of the folder, file or repository
    workers: int = 1
    tensor_parallel: int = 1
    engine: str = "native"
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # arguments of vLLM's engine
    engine_python: str = ""  # interpreter of the workers; empty: this one
    dtype: str = "auto"
    quantization: str = "auto"
    max_model_len: int = 0  # 0: the model's own limit
    kv_tokens: int = 0  # 0: the worker's default
    gpu_memory_utilization: float = 0.9
    kv_dtype: str = "auto"
    host: str = HOST  # the gateway's address; all others listen on 127.0.0.1
    port: int = 8000
    grpc_port: int = 0  # public gRPC; 0: off
    tls_cert: str = ""  # PEM file with the public ports' certificate; empty: plain text
    tls_key: str = ""
    api_key: str = ""  # empty: callers need no key
    redis_url: str = ""  # empty: embedded
    policy: str = "cost"
    fallback_model: str = ""
    adapters: tuple[tuple[str, str], ...] = ()  # names and folders of LoRA adapters
    adapter_source: str = ""  # folder whose adapters may be loaded while it runs; empty: none
    fine_tuning: str = ""  # folder of fine-tuning jobs and what they train; empty: no fine-tuner
    generation_config: str = ""  # JSON of sampling parameters that outweigh the model's own; empty: none

    @property
    def threads_per_rank(self) -> int:
        """The number of cores for each rank."""
        return max(1, usable_cores() // (self.workers * self.tensor_parallel))

    @property
    def url(self) -> str:
        """The gateway's URL on this machine."""
        host = {"0.0.0.0": HOST, "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"


def read_engine_args(given: Iterable[str]) -> dict[str, Any]:
    """The values of KEY=VALUE by key; a value is JSON where it can be, else text. Raises :class:`CommandError`."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise CommandError(f"--engine-arg {text}: expected KEY=VALUE, such as gpu_memory_utilization=0.8")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = {"True": True, "False": False}.get(value, value)
    return found


def named_folder(option: str, text: str) -> tuple[str, str]:
    """Return the name and the absolute folder of NAME=DIR. Raises :class:`CommandError`."""
    name, separator, folder = text.partition("=")
    if not (separator and name and folder):
        raise CommandError(f"{option} {text}: expected NAME=DIR")
    try:
        check_name(name)
        check_path(folder)
    except ValueError as error:
        raise CommandError(f"{option} NAME=DIR: {error}") from error
    return name, str(Path(folder).absolute())


def check(options: StackOptions) -> None:
    """Raise :class:`CommandError` for options that would fail, before any process starts."""
    try:
        _check_model(options.model)
    except PermissionError as error:
        raise CommandError(f"--model {options.model}: {denied.reason(Path(error.filename))}") from error
    _check_engine(options)
    for name, folder in options.adapters:
        if not (Path(folder) / "adapter_config.json").is_file():
            raise CommandError(f"--adapter {name}={folder}: no adapter_config.json there")
    if options.adapter_source and not Path(options.adapter_source).is_dir():
        raise CommandError(f"--adapter-source {options.adapter_source}: no such folder")
    _check_certificate(options)
    if options.fine_tuning:
        _check_fine_tuning(options)
    _check_port(options.host, options.port)
    if options.grpc_port:
        _check_port(options.host, options.grpc_port)
    if options.redis_url and not options.redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise CommandError(f"--redis {options.redis_url}: must start with redis://, rediss:// or unix://")
    if options.api_key and os.environ.get("RYZANSTEIN_API_KEYS"):
        raise CommandError("--api-key and RYZANSTEIN_API_KEYS: give one of them")


def _check_model(model: str) -> None:
    try:
        path = local_path(model)
    except ValueError as error:
        raise CommandError(f"--model {error}") from error
    choice = split_choice(model)[1]
    if path is not None and path.is_dir() and (choice or not (path / "config.json").is_file()):
        _check_gguf(model, path, choice)


def _check_fine_tuning(options: StackOptions) -> None:
    if missing := [name for name in ("peft", "transformers") if not find_spec(name)]:
        lack = f"({', '.join(missing)} missing)"
        install = pip_install("finetune", f"{sys.executable} -m pip")
        raise CommandError(f"--fine-tuning needs the extra finetune {lack}: {install}")
    if not Path(split_choice(options.model)[0]).exists():
        raise CommandError(f"--fine-tuning: --model must be a folder or a GGUF file, and is {options.model}")
    if options.engine != "native":
        raise CommandError("--fine-tuning: vLLM's engine loads no adapters; use --engine native")


def _check_engine(options: StackOptions) -> None:
    if options.engine == "native" and options.engine_args:
        raise CommandError("--engine-arg: is vLLM's; give --engine vllm, too")
    if options.engine != "vllm":
        return
    python = options.engine_python or sys.executable
    try:
        found = subprocess.run([python, "-c", _HAS_VLLM], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise CommandError(f"--engine-python {python}: {error.strerror}") from error
    if not found:
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


def _check_gguf(model: str, folder: Path, choice: str) -> None:
    try:
        found = find_model(folder, choice)
    except ValueError as error:
        raise CommandError(f"--model {model}: {error}") from error
    if found is None:
        raise CommandError(f"--model {model}: the folder has neither config.json nor a GGUF file")


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
