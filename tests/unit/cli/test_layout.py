"""The layout of a local installation: who is started, where, and how they find each other."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.errors import CommandError
from services.cli.stack.layout import StackProcess, lay_out
from services.cli.stack.options import StackOptions, check, read_engine_args
from services.common.tls.certificate import Identity
from services.common.tls.issuing import Authority
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL


def laid_out(first_port: int = 9001, **options: object) -> dict[str, StackProcess]:
    ports = itertools.count(first_port)
    given = StackOptions(**{"model": ["m"], **options})
    specs = lay_out(given, Path("/run/x"), Path("/bin/redis"), lambda: next(ports))
    return {spec.name: spec for spec in specs}


def test_every_service_of_the_architecture_runs() -> None:
    assert set(laid_out()) == {"redis", "worker-0", "kv-coordinator", "router", "gateway"}


def test_an_external_redis_replaces_the_embedded_redis() -> None:
    specs = laid_out(redis="redis://elsewhere:6379/3")
    assert "redis" not in specs
    assert {spec.env["RYZANSTEIN_REDIS_URL"] for spec in specs.values()} == {"redis://elsewhere:6379/3"}


def test_services_get_the_addresses_of_their_peers() -> None:
    specs = laid_out()
    assert specs["gateway"].env["RYZANSTEIN_ROUTER_ADDRESSES"] == specs["router"].address
    assert specs["router"].env["RYZANSTEIN_COORDINATOR_ADDRESS"] == specs["kv-coordinator"].address
    assert specs["worker-0"].address.endswith(":" + specs["worker-0"].env["RYZANSTEIN_WORKER_PORT"])


def test_each_model_has_workers_of_its_own_with_all_cores() -> None:
    specs = laid_out(model=["/a", "o/b:int8"], workers=2, served_model_name=["first", "second"])
    workers = [spec for name, spec in specs.items() if name.startswith("worker-")]
    keys = ("WORKER_ID", "MODEL", "QUANTIZATION", "SERVED_MODEL_NAME")
    assert [tuple(spec.env[f"RYZANSTEIN_{key}"] for key in keys) for spec in workers] == [
        ("worker-0", "/a", "auto", "first"),
        ("worker-1", "/a", "auto", "first"),
        ("worker-2", "o/b", "int8", "second"),
        ("worker-3", "o/b", "int8", "second"),
    ]
    assert {spec.env["OMP_NUM_THREADS"] for spec in workers} == {laid_out(workers=2)["worker-0"].env["OMP_NUM_THREADS"]}


def test_workers_of_a_machine_share_its_memory_and_know_when_to_sleep() -> None:
    specs = laid_out(
        model=["a/one", "a/two"], max_awake=1, idle_sleep="1h30m", pin=["two"], workers=2, priority=["one=-3"]
    )
    for index, (pinned, priority) in enumerate([("False", "-3"), ("False", "-3"), ("True", "0"), ("True", "0")]):
        env = specs[f"worker-{index}"].env
        settings = [
            env[f"RYZANSTEIN_{key}"] for key in ("MEMORY_HOST", "MAX_AWAKE", "IDLE_SLEEP_S", "PINNED", "PRIORITY")
        ]
        assert settings == ["up-8000", "1", "5400", pinned, priority]


def test_workers_are_told_the_numbers_of_their_cache_and_whether_to_speculate() -> None:
    env = laid_out(kv_dtype="int8", speculation="off")["worker-0"].env
    assert (env["RYZANSTEIN_KV_DTYPE"], env["RYZANSTEIN_SPECULATION"]) == ("int8", "off")


def test_simulated_workers_of_a_model_share_a_process() -> None:
    specs = laid_out(engine="simulated", workers=100, model=["a/one", "a/two"], engine_arg=["speed=2.5"])
    workers = [spec for name, spec in specs.items() if name.startswith("worker-")]
    assert [spec.env["RYZANSTEIN_VIRTUAL_WORKERS"] for spec in workers] == ["100", "100"]
    assert {spec.env["RYZANSTEIN_ENGINE_ARGS"] for spec in workers} == {'{"speed": 2.5}'}
    assert "RYZANSTEIN_VIRTUAL_WORKERS" not in laid_out(workers=2)["worker-0"].env


def test_port_for_metrics_in_the_environment_of_the_whole_is_no_services(tmp_path: Path) -> None:
    specs = laid_out(fine_tuning=str(tmp_path))
    ports = {name: spec.env.get("RYZANSTEIN_METRICS_PORT") for name, spec in specs.items() if name != "redis"}
    assert {port for name, port in ports.items() if name != "finetuner"} == {"0"}
    assert ports["finetuner"] != "0"


def test_workers_are_told_their_engine_and_its_arguments() -> None:
    given = ["--max-loras=2", "enforce_eager=True", "quantization=fp8", 'hf_overrides={"a": 1}']
    worker = laid_out(engine="vllm", engine_arg=given, engine_python="/vllm/python")["worker-0"]
    assert worker.command[0] == "/vllm/python"
    env = worker.env
    settings = WorkerSettings(
        model="m", engine=env["RYZANSTEIN_ENGINE"], engine_args=json.loads(env["RYZANSTEIN_ENGINE_ARGS"])
    )
    assert settings.engine == "vllm"
    assert settings.engine_args == {
        "max_loras": 2,
        "enforce_eager": True,
        "quantization": "fp8",
        "hf_overrides": {"a": 1},
    }
    with pytest.raises(CommandError, match="--engine-arg seed: expected KEY=VALUE"):
        read_engine_args(["seed"])


def test_a_set_setting_reaches_every_process() -> None:
    specs = laid_out(settings=["max-running=16", 'jwt_limits={"a": "b=c"}'])
    assert {spec.env["RYZANSTEIN_MAX_RUNNING"] for spec in specs.values()} == {"16"}
    assert specs["gateway"].env["RYZANSTEIN_JWT_LIMITS"] == '{"a": "b=c"}'


@pytest.mark.parametrize("key", ["max_runing", "dtype", "kv_tokens", "redis_url", "worker_port", "metrics_port"])
def test_set_rejects_options_ports_and_unknown_names_with_a_list(key: str) -> None:
    with pytest.raises(
        CommandError, match=f"--set {key}: expected a setting without .*: adapter_cache_mb, .*max_running,"
    ):
        laid_out(settings=[f"{key}=1"])
    with pytest.raises(CommandError, match=f"--set {key}: expected KEY=VALUE, such as max_running=16"):
        laid_out(settings=[key])


def test_two_installations_on_one_redis_do_not_meet() -> None:
    namespaces = {laid_out(port=port)["router"].env["RYZANSTEIN_NAMESPACE"] for port in (8000, 8001)}
    assert len(namespaces) == 2


def test_only_the_gateway_listens_elsewhere() -> None:
    specs = laid_out(host="0.0.0.0", port=8123)
    hosts = {name: spec.env["RYZANSTEIN_HOST"] for name, spec in specs.items() if name != "redis"}
    assert {name for name, host in hosts.items() if host != "127.0.0.1"} == {"gateway"}
    assert specs["gateway"].address == "http://127.0.0.1:8123"
    assert laid_out(host="::", port=8123)["gateway"].address == "http://[::1]:8123"


@given(workers=st.integers(1, 8), ranks=st.integers(1, 8))
def test_no_two_processes_share_an_address_or_a_worker_id(workers: int, ranks: int) -> None:
    specs = laid_out(workers=workers, tensor_parallel=ranks)
    addresses = [spec.address for spec in specs.values()]
    assert len(set(addresses)) == len(addresses)
    ids = [spec.env["RYZANSTEIN_WORKER_ID"] for name, spec in specs.items() if name.startswith("worker-")]
    assert sorted(ids) == sorted(f"worker-{index}" for index in range(workers))


def test_no_service_is_given_a_port_that_the_gateway_will_bind() -> None:
    specs = laid_out(first_port=9001, port=9001, grpc_port=9003, workers=3)
    assert specs["gateway"].address.endswith(":9001")
    picked = [spec.address for name, spec in specs.items() if name not in ("gateway", "redis")]
    assert sorted(picked) == [f"127.0.0.1:{port}" for port in (9002, 9004, 9005, 9006, 9007)]


def test_the_gateway_speaks_tls_with_files_that_are_tried_first(tmp_path: Path) -> None:
    issued = Authority.new(timedelta(days=1)).issue(Identity("rz.llm", "public"), timedelta(days=1))
    for name, content in (("tls.crt", issued.certificate), ("tls.key", issued.key)):
        (tmp_path / name).write_bytes(content)
    files = {"tls_cert": str(tmp_path / "tls.crt"), "tls_key": str(tmp_path / "tls.key")}
    gateway = laid_out(**files)["gateway"]
    assert gateway.address.startswith("https://")
    assert gateway.env["RYZANSTEIN_GATEWAY_TLS_CERTIFICATE"] == files["tls_cert"]
    assert gateway.env["RYZANSTEIN_GATEWAY_TLS_KEY"] == files["tls_key"]
    for wrong, message in (
        ({"tls_cert": files["tls_cert"]}, "give both"),
        ({**files, "tls_key": "/none"}, "no certificate"),
    ):
        with pytest.raises(CommandError, match=f"--tls-key.*{message}"):
            check(StackOptions(model=[str(BUNDLED_MODEL)], **wrong))


@given(workers=st.integers(1, 8), ranks=st.integers(1, 8))
def test_threads_exceed_the_cores_only_at_one_thread_a_process(workers: int, ranks: int) -> None:
    import os

    options = StackOptions(model=["m"], workers=workers, tensor_parallel=ranks)
    cores = len(os.sched_getaffinity(0))
    assert options.threads_per_rank >= 1
    assert options.threads_per_rank == 1 or options.threads_per_rank * workers * ranks <= cores
