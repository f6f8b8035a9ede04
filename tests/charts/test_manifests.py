"""Every object is one that Kubernetes knows, field by field, in the oldest and the newest version supported."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils
from packaging.version import Version

from tests.charts.rendering import OLDEST, Object, Rendered, render
from tests.programs import CHART

VERSIONS = (OLDEST, kubernetes_validate.latest_version())

for read in (utils.schema_contents, utils.all_versions):  # it reads them for every object
    setattr(utils, read.__name__, cache(read))


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_their_schemas(rendered: Rendered, values: Path, version: str) -> None:
    """Kinds of others (Gateway API, KEDA, the Prometheus operator) are tried on a real API server."""
    needed = re.match(r"kubernetes-([0-9.]+)", values.stem)  # older versions would refuse the file's fields
    if needed and Version(version) < Version(needed[1]):
        return
    for manifest in rendered.objects:
        if _is_of_kubernetes(manifest):
            _validated(json.dumps(manifest, sort_keys=True), version)


def test_a_wrong_field_is_found() -> None:
    (gateway,) = [
        manifest for manifest in render().of("Deployment") if manifest["metadata"]["name"].endswith("-gateway")
    ]
    wrong = json.loads(json.dumps(gateway))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePolicy"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_the_chart_declares_the_tested_versions() -> None:
    wanted = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert wanted == f">={OLDEST}-0"
    assert Version(VERSIONS[1]) >= Version("1.36")


def _is_of_kubernetes(manifest: Object) -> bool:
    group = manifest["apiVersion"].split("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and group != "gateway.networking.k8s.io")


@cache
def _validated(text: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(text), version, strict=True)
