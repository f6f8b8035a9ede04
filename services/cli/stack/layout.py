"""Computes the processes of a local installation from its options."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli.stack.models import UpModel
from services.cli.stack.options import GATEWAY, HOST, ROUTER, WORKER, StackOptions, variable
from services.cli.stack.probes import http_alive, http_ready, redis_alive, redis_ready
from services.common.gguf_files import split_choice
from services.common.ports import free_port
from services.common.processes.process import ProcessSpec
from services.common.processes.workers import grpc_alive, grpc_serving


@dataclass(frozen=True, slots=True)
class StackProcess(ProcessSpec):
    """A process of the installation."""

    model: UpModel | None = None  # a worker's


def lay_out(
    options: StackOptions, run_dir: Path, redis_server: Path, pick_port: Callable[[], int] = free_port
) -> tuple[StackProcess, ...]:
    """The processes in the order of their start; they stop in the opposite order."""
    # A picked port is not reserved. So skip the gateway's ports, which the gateway binds last.
    ports = (port for port in iter(pick_port, None) if port not in (options.port, options.grpc_port))
    specs: list[StackProcess] = []
    redis_url = options.redis
    if not redis_url:
        socket = run_dir / "redis.sock"
        redis_url = f"unix://{socket}"
        specs.append(_redis(redis_server, socket, redis_url))
    coordinator, router = next(ports), next(ports)
    shared = {
        "RYZANSTEIN_REDIS_URL": redis_url,
        "RYZANSTEIN_HOST": HOST,
        "RYZANSTEIN_METRICS_PORT": "0",  # an image's own would be that of all services
        "RYZANSTEIN_NAMESPACE": f"up-{options.port}",
    }
    together = options.engine == "simulated"  # workers of a model in one process
    of_workers = [model for model in options.models for _ in range(1 if together else options.workers)]
    specs += [_worker(options, model, index, next(ports), shared) for index, model in enumerate(of_workers)]
    specs.append(_service("kv-coordinator", "kv_coordinator", "coordinator_port", coordinator, shared))
    of_router = {
        "RYZANSTEIN_COORDINATOR_ADDRESS": f"{HOST}:{coordinator}",
        "RYZANSTEIN_EXPECTED_MODELS": ",".join(model.name for model in options.models),
    }
    env = shared | of_router | options.settings_of(ROUTER)
    specs.append(_service("router", "router", "router_port", router, env))
    if options.fine_tuning:
        specs.append(_finetuner(options, next(ports), shared))
    specs.append(_gateway(options, f"{HOST}:{router}", shared))
    if options.settings:
        from services.cli.stack.settings import read_settings  # imports all services' settings: a second

        chosen = read_settings(options.settings, {name for spec in specs for name in spec.env})
        specs = [replace(spec, env=spec.env | chosen) for spec in specs]  # a service ignores those of others
    return tuple(specs)


def _redis(executable: Path, socket: Path, url: str) -> StackProcess:
    command = (str(executable), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
    return StackProcess("redis", command, url, redis_ready(url), redis_alive(url))


def _service(
    name: str, package: str, setting: str, port: int, env: dict[str, str], stop_s: float = 5.0, python: str = ""
) -> StackProcess:
    """A service by gRPC on this machine; `setting` is that of its port."""
    address, command = f"{HOST}:{port}", (python or sys.executable, "-m", f"services.{package}")
    env = env | {variable(setting): str(port)}
    return StackProcess(name, command, address, grpc_serving(address), grpc_alive(address), env, stop_s)


def _worker(options: StackOptions, model: UpModel, index: int, port: int, shared: dict[str, str]) -> StackProcess:
    env = shared | {
        "RYZANSTEIN_WORKER_ID": f"worker-{index}",
        "OMP_NUM_THREADS": str(options.threads_per_rank),
    }
    if options.engine == "vllm":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else the ranks of several workers share the first cores
    if options.engine == "simulated":
        env["RYZANSTEIN_VIRTUAL_WORKERS"] = str(options.workers)
    sources = [str(Path(folder).absolute()) for folder in (options.adapter_source, options.fine_tuning) if folder]
    chosen = {
        "RYZANSTEIN_ENGINE_ARGS": json.dumps(options.engine_args) if options.engine_args else "",
        "RYZANSTEIN_OVERRIDE_GENERATION_CONFIG": options.generation_config,
        "RYZANSTEIN_SERVED_MODEL_NAME": model.given_name,
        "RYZANSTEIN_ADAPTERS": json.dumps(options.adapters) if options.adapters else "",
        "RYZANSTEIN_ADAPTER_SOURCES": ",".join(sources),
    }
    env |= options.settings_of(WORKER) | {name: value for name, value in chosen.items() if value}
    env |= {
        "RYZANSTEIN_MODEL": model.source,
        "RYZANSTEIN_QUANTIZATION": model.quantization,
        "RYZANSTEIN_MEMORY_HOST": shared["RYZANSTEIN_NAMESPACE"],
        "RYZANSTEIN_IDLE_SLEEP_S": str(options.idle_sleep_s),
        "RYZANSTEIN_PINNED": str(model.pinned),
        "RYZANSTEIN_PRIORITY": str(model.priority),
    }
    spec = _service(f"worker-{index}", "worker", "worker_port", port, env, 15.0, options.engine_python)
    return replace(spec, model=model)


def _finetuner(options: StackOptions, port: int, shared: dict[str, str]) -> StackProcess:
    env = shared | {
        "RYZANSTEIN_METRICS_PORT": str(port),
        "RYZANSTEIN_FINETUNER_MODELS": json.dumps({model.name: _absolute(model.source) for model in options.models}),
        "RYZANSTEIN_FINETUNER_FOLDER": str(Path(options.fine_tuning).absolute()),
    }
    url, command = f"http://{HOST}:{port}", (sys.executable, "-m", "services.finetuner")
    return StackProcess(
        "finetuner", command, url, http_ready(f"{url}/readyz"), http_alive(f"{url}/livez"), env, stop_s=15.0
    )


def _absolute(source: str) -> str:
    """A model's folder or file, with its choice among GGUF files."""
    path, choice = split_choice(source)
    absolute = str(Path(path).expanduser().resolve())
    return f"{absolute}:{choice}" if choice else absolute


def _gateway(options: StackOptions, router: str, shared: dict[str, str]) -> StackProcess:
    env = (
        shared
        | {
            "RYZANSTEIN_HOST": options.host,
            "RYZANSTEIN_GATEWAY_PORT": str(options.port),
            "RYZANSTEIN_ROUTER_ADDRESSES": router,
        }
        | options.settings_of(GATEWAY)
    )
    if options.tls_cert:
        files = {"CERTIFICATE": options.tls_cert, "KEY": options.tls_key}
        env |= {f"RYZANSTEIN_GATEWAY_TLS_{name}": str(Path(path).absolute()) for name, path in files.items()}
    if options.api_key:
        caller: dict[str, object] = {
            "name": "up",
            "key_sha256": hashlib.sha256(options.api_key.encode()).hexdigest(),
            "admin": bool(options.adapter_source or options.fine_tuning),  # loading adapters is an administrator's
        }
        env |= {"RYZANSTEIN_TENANCY": "true", "RYZANSTEIN_API_KEYS": json.dumps([caller])}
    url, command = options.url, (sys.executable, "-m", "services.gateway")
    return StackProcess("gateway", command, url, http_ready(f"{url}/health"), http_alive(f"{url}/livez"), env)
