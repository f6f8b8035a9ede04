"""Fixtures of every test of a cluster: namespaces that are removed after it, and a report when it fails.

The suite takes any cluster: ``RYZANSTEIN_TEST_KUBECONFIG`` names its kubeconfig. Without one it is left out.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.installation import Installation
from tests.cluster.kube import Kube
from tests.cluster.load import ClusterLoad, Traffic
from tests.cluster.prometheus import Prometheus
from tests.cluster.rig import Rig
from tests.programs import left_out

KUBECONFIG = os.environ.get("RYZANSTEIN_TEST_KUBECONFIG", "")
# Namespaces in the report of a failed test, unless the test has its own.
IN_USE: pytest.StashKey[list[Kube]] = pytest.StashKey()

# Measurements by test; shown at the end.
FIGURES: pytest.StashKey[dict[str, object]] = pytest.StashKey()

collect_ignore_glob = [] if KUBECONFIG else ["*test_*.py"]

Namespaces = Callable[..., Kube]
Disturb = Callable[..., ClusterLoad]
Restarts = Callable[[], dict[str, int]]

# Every component twice or more, so that each has a survivor; small requests, so that two nodes of one machine hold it.
SHARED = {
    "workers.defaults.replicas": 3,
    "workers.defaults.resources.requests.cpu": "100m",
    "gateway.replicas": 2,
    "router.replicas": 2,
    "ingress.enabled": "true",
    "ingress.className": "traefik",
    "ingress.controller": "traefik",
}
SHARED_NAMESPACE = "shared"
SETTLE_S = 5.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, measured in terminalreporter.config.stash.get(FIGURES, {}).items():
        terminalreporter.write_line(f"measured: {test}: {measured}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        own = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Kube)]
        for kube in own or item.session.stash.get(IN_USE, []):
            report.sections.append((f"namespace {kube.namespace}", kube.report()))
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    return Path(KUBECONFIG)


@pytest.fixture(scope="session")
def namespaces(kubeconfig: Path, request: pytest.FixtureRequest) -> Iterator[Namespaces]:
    """Makes namespaces: ``namespaces("name", labels={...})``. They are removed at the end of the session."""
    in_use = request.session.stash.setdefault(IN_USE, [])

    def create(name: str, labels: dict[str, str] | None = None) -> Kube:
        kube = Kube(kubeconfig, name)
        wanted = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}
        kube.apply(wanted)
        if kube.get("namespace", name)["status"]["phase"] == "Terminating":  # a namespace of an earlier session
            kube.wait(f"namespace/{name}", condition="delete", timeout_s=240)
            kube.apply(wanted)
        in_use.append(kube)
        return kube

    yield create
    for kube in in_use:
        kube.kubectl("delete", "namespace", kube.namespace, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="module", autouse=True)
def _leave_room(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every file's own installations go before the next one's come: a laptop's cluster holds two or three at a time."""
    yield
    in_use = request.session.stash.get(IN_USE, [])
    for kube in [kube for kube in in_use if kube.namespace != SHARED_NAMESPACE]:
        kube.kubectl("delete", "namespace", kube.namespace, "--wait=false", "--ignore-not-found")
        in_use.remove(kube)


@pytest.fixture(scope="session")
def earlier_chart() -> Path:
    """The chart of an earlier revision, whose images have the tag `previous`; `tests/cluster/previous` makes both."""
    folder = Path(os.environ.get("RYZANSTEIN_TEST_PREVIOUS", "build/previous"))
    if not (folder / "chart").is_dir():
        left_out(f"no earlier revision is in {folder}: run tests/cluster/previous")
    return folder.resolve() / "chart"


@pytest.fixture
def namespace(namespaces: Namespaces, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A namespace of the test's own, named like it, removed after it."""
    name = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:50].strip("-")
    kube = namespaces(f"{name}-{secrets.token_hex(2)}")
    yield kube
    kube.kubectl("delete", "namespace", kube.namespace, "--wait=false")
    request.session.stash[IN_USE].remove(kube)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, object]:
    """Measurements, which the end of the run shows."""
    return request.config.stash.setdefault(FIGURES, {})


@pytest.fixture(scope="session")
def rig() -> Rig:
    """The cluster's script, where the cluster runs on this machine."""
    script = os.environ.get("RYZANSTEIN_TEST_RIG")
    if not script:
        pytest.skip("RYZANSTEIN_TEST_RIG names no script: power, cables and processes are out of reach")
    return Rig(Path(script))


@pytest.fixture(scope="session")
def ingress() -> str:
    """Where the ingress controller listens."""
    url = os.environ.get("RYZANSTEIN_TEST_INGRESS", "")
    if not url:
        left_out("RYZANSTEIN_TEST_INGRESS names no ingress controller")
    return url


@pytest.fixture(scope="session")
def installed(namespaces: Namespaces) -> Installation:
    """The installation that most tests share; each leaves it as it found it."""
    installation = Installation(namespaces(SHARED_NAMESPACE))
    installation.install(*settings(SHARED))
    return installation


def settings(values: dict[str, object]) -> list[str]:
    """As arguments of Helm."""
    return [arg for name, value in values.items() for arg in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def prometheus(installed: Installation) -> Iterator[Prometheus]:
    """That of the shared installation, which scrapes every 15 s."""
    with installed.kube.forward(f"{installed.release}-prometheus", 9090) as url:
        yield Prometheus(url)


@pytest.fixture(scope="session")
def traffic(installed: Installation) -> Traffic:
    return Traffic.undisturbed(installed.url)


@pytest.fixture
def restarts(installed: Installation) -> Iterator[Restarts]:
    """Which containers were restarted since the test began."""
    before = installed.kube.restarts()

    def since() -> dict[str, int]:
        return {n: c - before.get(n, 0) for n, c in installed.kube.restarts().items() if c > before.get(n, 0)}

    return since


@pytest.fixture
def disturbed(
    installed: Installation, traffic: Traffic, figures: dict[str, object], request: pytest.FixtureRequest
) -> Disturb:
    """The load with faults in its middle; everything is ready again at the end, and no request failed."""

    def run(*faults: Callable[[], object], load: Traffic = traffic) -> ClusterLoad:
        with ClusterLoad(load) as clients:
            for fault in faults:
                fault()
                time.sleep(SETTLE_S)
                installed.wait_ready()
        figures[request.node.name] = clients.figures()
        clients.assert_unharmed()
        return clients

    return run
