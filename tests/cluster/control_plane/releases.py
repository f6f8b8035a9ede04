"""Releases of the chart whose pods no node takes, and what is left of them in the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.charts.rendering import render
from tests.cluster.kube import Kube, Object
from tests.programs import CHART

RELEASE = "ryzanstein"
# No node has this label: the tests are the same on a cluster with nodes and without.
NOWHERE = "podDefaults.nodeSelector.ryzanstein\\.dev/test=none"
NOWHERE_YAML = "podDefaults: {nodeSelector: {ryzanstein.dev/test: none}}"
KINDS = (
    "deployments,statefulsets,jobs,cronjobs,services,configmaps,serviceaccounts,roles,rolebindings,secrets,"
    "networkpolicies,poddisruptionbudgets,horizontalpodautoscalers,persistentvolumeclaims"
)
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}


def install(kube: Kube, *sets: str, major: int = 3, release: str = RELEASE) -> None:
    kube.helm("install", release, str(CHART), *_set(NOWHERE, *sets), major=major)


def upgrade(kube: Kube, *sets: str, major: int = 3, args: tuple[str, ...] = ()) -> None:
    """With exactly these values, none of the release before."""
    kube.helm("upgrade", RELEASE, str(CHART), "--reset-values", *_set(NOWHERE, *sets), *args, major=major)


def _set(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def owned(kube: Kube, release: str = RELEASE) -> dict[str, Object]:
    """The release's objects by kind and name."""
    manifest = kube.items(KINDS, f"app.kubernetes.io/instance={release}")
    return {f"{each['kind']} {each['metadata']['name']}": each for each in manifest if not _of_a_controller(each)}


def _of_a_controller(manifest: Object) -> bool:
    return bool(manifest["metadata"].get("ownerReferences"))


def specs(kube: Kube) -> dict[str, Any]:
    """The release's objects, without status, bookkeeping, and the additions of the controller of Jobs."""
    return {name: _said(manifest) for name, manifest in owned(kube).items()}


def _said(manifest: Object) -> Any:
    if manifest["kind"] == "Job":
        return manifest["spec"]["template"]["spec"]
    return manifest.get("spec") or manifest.get("data") or manifest.get("rules")


def rendered_names(namespace: str) -> set[str]:
    """Kinds and names of what :func:`install` makes; tests are made by `helm test` only."""
    objects = render(inline=NOWHERE_YAML, namespace=namespace).objects
    return {
        f"{each['kind']} {each['metadata']['name']}"
        for each in objects
        if "helm.sh/hook" not in (each["metadata"].get("annotations") or {})
    }


def replicas(kube: Kube, workload: str) -> int:
    kind, name = workload.split("/")
    return int(kube.get(kind, name)["spec"]["replicas"])


def kubeconfig_of(kube: Kube, account: str, folder: Path) -> Path:
    """A kubeconfig with a token of the account instead of the administrator's certificate."""
    config = yaml.safe_load(kube.kubeconfig.read_text())
    token = kube.kubectl("create", "token", account, "--duration=10m").strip()
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
