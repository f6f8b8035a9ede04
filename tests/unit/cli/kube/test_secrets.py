"""`ryzanstein kube ensure-secrets`: passwords are made once, kept, and never shown."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.kube import cluster
from services.cli.main import app
from tests.kube_api import NAMESPACE, KubeApi, Object
from tests.kubeconfig import use_kubeconfig


def ensure(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kube", "ensure-secrets", *arguments])


def password(api: KubeApi, name: str, key: str = "password") -> str:
    return base64.b64decode(api.objects["secrets", name]["data"][key]).decode()


def own(**data: str) -> Object:
    return {"metadata": {"name": "own"}, "data": data}


def test_each_secret_is_made_once_with_a_password_of_its_own(api: KubeApi) -> None:
    names = ("--name", "redis-1", "--name", "redis-2", "--label", "app.kubernetes.io/instance=mine")
    result = ensure(*names)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [f"secret {NAMESPACE}/redis-{n} made" for n in (1, 2)]
    first, second = password(api, "redis-1"), password(api, "redis-2")
    assert first != second
    assert min(len(first), len(second)) >= 43, "32 random bytes"
    assert set(first) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"), "for a URL as it is"
    assert api.objects["secrets", "redis-1"]["metadata"]["labels"] == {"app.kubernetes.io/instance": "mine"}
    again = ensure(*names)
    assert again.exit_code == 0
    assert again.output.splitlines() == [f"secret {NAMESPACE}/redis-{n} is there already" for n in (1, 2)]
    assert (password(api, "redis-1"), password(api, "redis-2")) == (first, second)
    assert not any(secret in result.output for secret in (first, second))


def test_an_existing_password_is_kept_also_after_a_concurrent_run(api: KubeApi) -> None:
    api.put("secrets", own(token=base64.b64encode(b"mine").decode()))
    assert ensure("--name", "own", "--key", "token").exit_code == 0
    assert password(api, "own", "token") == "mine"
    assert api.asked == ["GET secrets/own"], "nothing is written"
    api.before["POST secrets"] = lambda: api.put("secrets", {"metadata": {"name": "raced"}, "data": {}})
    result = ensure("--name", "raced")
    assert (result.exit_code, result.output) == (0, f"secret {NAMESPACE}/raced is there already\n")


def test_a_secret_without_the_key_is_refused_and_not_touched(api: KubeApi) -> None:
    api.put("secrets", own(other="", more=""))
    result = ensure("--name", "own")
    assert result.exit_code == 1
    assert f"secret {NAMESPACE}/own has no key 'password', only ['more', 'other']" in result.output
    assert api.asked == ["GET secrets/own"]


@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_a_refusal_of_the_api_server_fails_and_says_which_secret(api: KubeApi, verb: str) -> None:
    api.refused[f"{verb} secrets"] = 403
    result = ensure("--name", "mine")
    assert result.exit_code == 1
    assert f"secret {NAMESPACE}/mine: Forbidden (403)" in result.output
    assert not api.objects


def test_a_label_without_a_value_is_rejected_before_any_request(api: KubeApi) -> None:
    result = ensure("--name", "mine", "--label", "broken")
    assert result.exit_code == 1
    assert "--label broken: expected NAME=VALUE" in result.output
    assert not api.asked


def test_a_machine_without_a_cluster_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kubeconfig(monkeypatch, tmp_path / "none")
    result = ensure("--name", "mine")
    assert result.exit_code == 1
    assert result.output.startswith("ryzanstein: no Kubernetes cluster: ")


def test_the_namespace_is_the_context_s_or_the_pod_s(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ensure("--name", "one").output == f"secret {NAMESPACE}/one made\n"
    in_pod = api.kubeconfig.with_name("namespace")
    in_pod.write_text("mine\n")
    monkeypatch.setattr(cluster, "_OWN_NAMESPACE", in_pod)
    api.kubeconfig.unlink()
    assert cluster.current_namespace() == "mine"
