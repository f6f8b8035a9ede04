"""Names fit, never collide, and selectors stay as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import NAMESPACE, Object, Rendered, RenderError, render

# Selectors and claim templates of every workload of the default and the pools' values. A difference means that no
# installation can be upgraded: it must not be adapted to the chart, except by a new workload.
GOLDEN = Path(__file__).parent / "golden" / "selectors.json"
LONGEST_RELEASE = "r" * 53  # Helm's own limit
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# A pod of a set is named SET-ORDINAL, and its revision label SET-HASH with a hash of 10.
REVISION = len("-0123456789")
WORKLOADS = ("Deployment", "StatefulSet")
TWO_POOLS = "workers: {pools: {small: {servedName: small}, large: {servedName: large}}}"
CLAIMS = """
redis: {persistence: {enabled: true}}
workers: {pools: {claims: {model: 'hf://org/name', storage: {type: perPod}}}}
"""


def test_selectors_and_claim_templates_are_frozen() -> None:
    values = {"default": "", "two pools": TWO_POOLS, "claims": CLAIMS}
    frozen = {name: _frozen(render(inline=inline)) for name, inline in values.items()}
    assert frozen == json.loads(GOLDEN.read_text())


def _frozen(rendered: Rendered) -> dict[str, Object]:
    frozen = {}
    for manifest in rendered.of(*WORKLOADS):
        spec = manifest["spec"]
        frozen[f"{manifest['kind']} {manifest['metadata']['name']}"] = {
            key: spec[key]
            for key in ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
            if key in spec
        }
    return frozen


def test_selectors_match_their_own_pods_only(rendered: Rendered) -> None:
    pods = rendered.pods
    for pod in pods:
        selector = pod.owner["spec"].get("selector", {}).get("matchLabels")
        if selector:
            selected = [str(other) for other in pods if selector.items() <= other.labels.items()]
            assert selected == [str(pod)]


def test_services_and_budgets_select_pods(rendered: Rendered) -> None:
    for manifest in rendered.of("Service", "PodDisruptionBudget"):
        selector = manifest["spec"].get("selector") or {}
        labels = selector.get("matchLabels", selector)
        assert labels, manifest["metadata"]["name"]
        assert any(labels.items() <= pod.labels.items() for pod in rendered.pods), manifest["metadata"]["name"]


def test_services_lead_to_ports_that_exist(rendered: Rendered) -> None:
    for service in rendered.of("Service"):
        selector = service["spec"]["selector"]
        for pod in (pod for pod in rendered.pods if selector.items() <= pod.labels.items()):
            ports = [port for container in pod.containers for port in container.get("ports", ())]
            known = {port["containerPort"] for port in ports} | {port.get("name") for port in ports}
            for port in service["spec"]["ports"]:
                assert port.get("targetPort", port["port"]) in known, service["metadata"]["name"]


def test_sets_have_their_service(rendered: Rendered) -> None:
    services = {manifest["metadata"]["name"] for manifest in rendered.of("Service")}
    assert {manifest["spec"]["serviceName"] for manifest in rendered.of("StatefulSet")} <= services


def test_common_labels_reach_objects_and_pods() -> None:
    rendered = render(inline="commonLabels: {team: blue}")
    assert {manifest["metadata"]["labels"].get("team") for manifest in rendered.objects} == {"blue"}
    assert {pod.labels.get("team") for pod in rendered.pods} == {"blue"}


def test_a_release_named_like_the_chart_has_the_name_once() -> None:
    names = {manifest["metadata"]["name"] for manifest in render().objects}
    assert "ryzanstein-gateway" in names
    assert not [name for name in names if name.count("ryzanstein") > 1]


def test_two_releases_share_a_namespace() -> None:
    one, two = (
        {
            (manifest["kind"], manifest["metadata"]["name"])
            for manifest in render(inline=f"{TWO_POOLS}\n{CLAIMS}", release=release).objects
        }
        for release in ("ryzanstein", "other")
    )
    assert one
    assert not one & two


def test_two_releases_share_a_redis() -> None:
    """Leases, sessions and keys are kept apart by a prefix."""
    prefixes = {_prefix("a", "one"), _prefix("b", "one"), _prefix("a", "two")}
    assert len(prefixes) == 3


def _prefix(namespace: str, release: str) -> str:
    (pod,) = render(namespace=namespace, release=release).pods_of("gateway")
    (value,) = [each["value"] for each in pod.containers[0]["env"] if each["name"] == "RYZANSTEIN_NAMESPACE"]
    return str(value)


def test_a_long_release_is_refused_with_the_way_out() -> None:
    """Cut silently, two releases could get one name."""
    with pytest.raises(RenderError, match="fullnameOverride"):
        render(release=LONGEST_RELEASE)
    for manifest in render(release=LONGEST_RELEASE, inline="fullnameOverride: short").objects:
        assert manifest["metadata"]["name"].startswith("short")
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values()), manifest["metadata"]["name"]


def test_the_longest_names_fit() -> None:
    pool = "p" * 16
    values = f"{{fullnameOverride: {'f' * 27}, workers: {{pools: {{{pool}: {{servedName: m}}}}}}}}"
    for manifest in render(inline=values, namespace="n" * 63).objects:
        name = manifest["metadata"]["name"]
        assert LABEL.fullmatch(name), name
        assert len(name) + (REVISION if manifest["kind"] == "StatefulSet" else 0) <= 63, name


def test_a_pool_name_that_does_not_fit_is_refused() -> None:
    wrong = ("p" * 17, "Large", "a_b", "-a", "a-")
    with pytest.raises(RenderError) as refused:
        render(inline=yaml.safe_dump({"workers": {"pools": {pool: {"servedName": "m"} for pool in wrong}}}))
    assert [pool for pool in wrong if f"workers.pools.{pool}: a pool's name has" not in str(refused.value)] == []


@pytest.mark.parametrize("key", ["servedName", "model"])
def test_models_with_hidden_characters_are_rejected(key: str) -> None:
    """Each line of the models' ConfigMap would be a model of its own."""

    def values(text: str) -> str:
        return yaml.safe_dump({"workers": {"pools": {"default": {key: text}}}})

    good = {"servedName": "名前/m:v2 (x)", "model": "pvc://claim/a b"}[key]
    render(inline=values(good))
    for text in (good.replace("m", "\n", 1), f"{good}\n", f"{good}\u202e", f"\u200b{good}"):
        with pytest.raises(RenderError, match=rf"workers.pools.default.{key}: it should be .*printable characters"):
            render(inline=values(text))


def test_adapter_names_with_hidden_characters_are_rejected() -> None:
    def values(adapters: dict[str, str]) -> str:
        return yaml.safe_dump({"workers": {"pools": {"default": {"settings": {"adapters": adapters}}}}})

    render(inline=values({"ft:m:ns/名前 (v2)": "/adapters/日本 語"}))
    for name, folder in (("a\nb", "/a"), ("a\u202eb", "/a"), (" a", "/a"), ("", "/a"), ("a", "/a\u200b"), ("a", "")):
        with pytest.raises(RenderError, match=r"workers.pools.default.settings.adapters: .* printable characters"):
            render(inline=values({name: folder}))


def test_names_are_dns_labels(rendered: Rendered) -> None:
    for manifest in rendered.objects:
        assert LABEL.fullmatch(manifest["metadata"]["name"].replace(".", "")), manifest["metadata"]["name"]
        assert manifest["metadata"]["namespace"] == NAMESPACE
