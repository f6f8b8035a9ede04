"""Rights of the release's service accounts, by the API server's answers and by calls with their own tokens."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane.releases import install, kubeconfig_of
from tests.cluster.kube import Kube, KubeCommandError

SECRET = "ryzanstein-redis-auth-1"
SERVING, MAKER, ROUTER = "ryzanstein", "ryzanstein-secrets", "ryzanstein-router"


@pytest.fixture(scope="module")
def installed(namespaces: Namespaces) -> Kube:
    kube = namespaces("permissions")
    kube.kubectl("create", "secret", "generic", "somebody-elses", "--from-literal=password=x")
    install(kube)
    return kube


def _may(kube: Kube, account: str, verb: str, what: str) -> bool:
    user = f"system:serviceaccount:{kube.namespace}:{account}"
    try:
        return kube.kubectl("auth", "can-i", verb, *what.split(" "), f"--as={user}").strip() == "yes"
    except KubeCommandError as error:
        if str(error).rstrip().endswith("no"):
            return False
        raise


def test_serving_pods_have_no_permissions(installed: Kube) -> None:
    """Nothing but what every account may: ask who it is, and read the API's own description."""
    for verb, what in [("get", "pods"), ("list", "secrets"), ("create", "configmaps"), ("patch", "deployments")]:
        assert not _may(installed, SERVING, verb, what), f"{verb} {what}"


def test_routers_may_watch_the_names_of_the_models_and_do_no_more(installed: Kube) -> None:
    assert _may(installed, ROUTER, "watch", "configmaps/ryzanstein-models")
    assert not _may(installed, ROUTER, "watch", "configmaps")
    for verb, what in [("get", "configmaps/ryzanstein-models"), ("list", "secrets"), ("get", "pods")]:
        assert not _may(installed, ROUTER, verb, what), f"{verb} {what}"


def test_the_job_may_make_secrets_and_read_its_own(installed: Kube) -> None:
    assert _may(installed, MAKER, "create", "secrets")
    assert _may(installed, MAKER, "get", f"secrets/{SECRET}")
    forbidden = ["get secrets/somebody-elses", "list secrets", "watch secrets", "get pods", "create pods"]
    forbidden += [f"{verb} secrets/{SECRET}" for verb in ("update", "patch", "delete")]
    forbidden += ["create secrets --namespace=default", "get secrets --all-namespaces", "get nodes"]
    for action in forbidden:
        verb, what = action.split(" ", 1)
        assert not _may(installed, MAKER, verb, what), action


def test_the_job_makes_the_password_once(installed: Kube, tmp_path: Path) -> None:
    """The command of the rendered Job, as its service account: a second run leaves the password as it is."""
    command = _command(installed)
    config = kubeconfig_of(installed, MAKER, tmp_path)
    passwords = []
    for _ in range(2):
        done = _ryzanstein(command, config)
        assert done.returncode == 0, done.stderr
        passwords.append(installed.get("secret", SECRET)["data"]["password"])
    assert passwords[0] == passwords[1]
    assert len(base64.b64decode(passwords[0])) >= 32


def test_audit_log_holds_only_permitted_requests(installed: Kube, tmp_path: Path) -> None:
    """By the audit log, where the cluster keeps one next to its kubeconfig."""
    log = installed.kubeconfig.parent / "audit.log"
    if not log.exists():
        pytest.skip(f"this cluster has no audit log at {log}")
    assert _ryzanstein(_command(installed), kubeconfig_of(installed, MAKER, tmp_path)).returncode == 0
    prefix = f"system:serviceaccount:{installed.namespace}:"
    seen = set()
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["user"]["username"].startswith(prefix):
            seen.add((event["verb"], event.get("objectRef", {}).get("resource"), event["user"]["username"]))
    assert seen
    maker = prefix + MAKER
    assert seen <= {("get", "secrets", maker), ("create", "secrets", maker)}


def test_certificate_job_changes_only_its_own_secret(namespaces: Namespaces, tmp_path: Path) -> None:
    """The command of the rendered CronJob, as its service account: made, kept, and the CA's replacement begun."""
    kube = namespaces("certificates")
    kube.kubectl("create", "secret", "generic", "somebody-elses", "--from-literal=password=x")
    install(kube)
    (job,) = kube.items("cronjobs", "app.kubernetes.io/component=secrets")
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    command, config = [*container["command"], *container["args"]], kubeconfig_of(kube, MAKER, tmp_path)
    written = []
    for options in ([], [], ["--new-authority"]):
        done = _ryzanstein([*command, *options], config)
        assert done.returncode == 0, done.stderr
        written.append(done.stdout.count(" written"))
    assert written == [7, 0, 7]  # the CA, four services, Redis and people's tools
    worker = kube.get("secret", "ryzanstein-tls-worker")
    assert (worker["type"], set(worker["data"])) == ("kubernetes.io/tls", {"tls.crt", "tls.key", "ca.crt"})
    assert base64.b64decode(worker["data"]["ca.crt"]).count(b"BEGIN CERTIFICATE") == 2
    assert not _may(kube, MAKER, "update", "secrets/somebody-elses")
    assert not _may(kube, MAKER, "delete", "secrets/ryzanstein-tls-worker")


def _command(kube: Kube) -> list[str]:
    (job,) = kube.items("jobs", "app.kubernetes.io/component=secrets")
    (container,) = [each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == "secrets"]
    command = [*container["command"], *container.get("args", ())]
    assert command[:3] == ["ryzanstein", "kube", "ensure-secrets"]
    return command


def _ryzanstein(command: list[str], config: Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / command[0])
    env = {**os.environ, "KUBECONFIG": str(config)}
    return subprocess.run([program, *command[1:]], env=env, capture_output=True, text=True, timeout=30, check=False)
