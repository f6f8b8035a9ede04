"""Which cluster Kubernetes' client speaks to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def use_kubeconfig(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Have clients that are opened from now on read `path`; KUBECONFIG is read when `kubernetes` is imported."""
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):
        patch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


def write_kubeconfig(path: Path, url: str, namespace: str = "default") -> Path:
    """Write the kubeconfig of an API server that asks for no credentials."""
    document = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path
