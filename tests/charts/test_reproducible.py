"""The same values give the same bytes: a GitOps tool sees no change where there is none."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from tests.charts.rendering import CI_VALUES, HELMS, NEWEST, OLDEST, Rendered, render, run_helm
from tests.programs import CHART

TEMPLATES = sorted(
    [*CHART.rglob("templates/**/*.yaml"), *CHART.rglob("templates/**/*.tpl"), *CHART.glob("templates/*.txt")]
)
# Functions with results that differ between renderings or versions of Kubernetes, or that need a live cluster, which
# `helm template` and Argo CD do not have.
UNREPEATABLE = re.compile(
    r"\b(lookup|Capabilities|rand\w+|gen(CA|\w*Cert\w*|PrivateKey)|uuidv4|now|htpasswd|bcrypt|getHostByName)\b"
)
# But for an upgrade, which asks in which phase of mutual TLS its release is (without a cluster it is always the last),
# and refuses to begin where a secret lacks passwords.
UPGRADE = re.compile(r'\blookup "v1" "(Pod|Secret)" \.Release\.Namespace\b')
# And for what the API server would refuse in the middle of an upgrade: it is refused before, or left as it is.
FIXED = re.compile(r'lookup "([a-z.0-9]+/)?v1" "(Deployment|StatefulSet|PersistentVolumeClaim|StorageClass|Service)"')
EXPRESSION = re.compile(r"\{\{(?!-?\s*/\*)(.*?)\}\}", re.DOTALL)
QUOTED = re.compile(r'"[^"]*"|`[^`]*`')
HELM_SECRET_BYTES = 900 * 1024
CLUSTER_SCOPED = {
    "APIService", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "GatewayClass", "IngressClass",
    "MutatingWebhookConfiguration", "Namespace", "Node", "PersistentVolume", "PriorityClass", "RuntimeClass",
    "StorageClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ValidatingWebhookConfiguration",
}  # fmt: skip


def test_there_is_a_values_file_for_the_defaults() -> None:
    assert "default-values" in [path.stem for path in CI_VALUES]


@pytest.mark.parametrize("name", ["default", "everything", "pools", "gatewayapi"])
def test_helm_3_and_4_render_the_same(name: str) -> None:
    """The test of their images shows that Helm 4 also renders the other values."""
    three, four = (render(CHART / "ci" / f"{name}-values.yaml", major=major).objects for major in HELMS)
    assert sorted(map(_key, three)) == sorted(map(_key, four))


def test_another_rendering_for_another_kubernetes_is_equal() -> None:
    """Of the most that the chart renders; no template asks which Kubernetes it is, as the test of calls shows."""
    values = CHART / "ci" / "everything-values.yaml"
    assert render(values, kubernetes=OLDEST).text == render(values, kubernetes=NEWEST).text


@pytest.mark.parametrize("major", HELMS)
def test_lint_is_silent(major: int) -> None:
    """Of the least and of the most that the chart renders; that it renders the other values, the other tests show."""
    for name in ("default", "everything"):
        values = CHART / "ci" / f"{name}-values.yaml"
        run_helm("lint", "--strict", str(CHART), "--values", str(values), major=major)


def test_templates_call_only_repeatable_functions() -> None:
    for template in TEMPLATES:
        for expression in EXPRESSION.findall(FIXED.sub("", UPGRADE.sub("", template.read_text()))):
            assert not UNREPEATABLE.search(QUOTED.sub('""', expression)), (template.name, expression)


def test_hooks_are_tests_only(rendered: Rendered) -> None:
    """A hook that fails blocks upgrades, and Argo CD runs hooks at every sync."""
    for manifest in rendered.objects:
        assert (manifest["metadata"].get("annotations") or {}).get("helm.sh/hook", "test") == "test", _key(manifest)


def test_every_object_is_namespaced(rendered: Rendered) -> None:
    assert [_key(manifest) for manifest in rendered.of(*CLUSTER_SCOPED)] == []


def test_the_release_fits_its_secret(values: Path) -> None:
    """Helm keeps chart and manifest in one Secret, which etcd bounds to 1 MiB."""
    files = {str(path): path.read_text() for path in CHART.rglob("*") if path.is_file()}
    release = json.dumps({"chart": files, "manifest": render(values).text, "values": values.read_text()}).encode()
    # Templates and files are base64 inside, then all of it is compressed, and base64 again (twice, as a Secret's data).
    assert len(base64.b64encode(base64.b64encode(gzip.compress(release)))) < HELM_SECRET_BYTES


def _key(manifest: dict[str, object]) -> str:
    return json.dumps(manifest, sort_keys=True)
