"""`deploy/compose.yaml` and `skaffold.yaml` start what the chart starts: the same images in the same environment."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deploy.docker.build import IMAGES, ROOT
from tests.charts.rendering import expected_models, render
from tests.programs import CHART

SERVICES = {"gateway": "gateway", "router": "router", "coordinator": "coordinator", "worker": "worker"}
# Variables of a pod that a container of compose lacks: an own name that outlives a restart, an address to announce.
# Redis needs no password where only these containers reach it; drains are shorter without a load balancer.
OF_PODS = {
    "worker": {"RYZANSTEIN_WORKER_ID", "RYZANSTEIN_ADVERTISE_HOST", "RYZANSTEIN_NODE"},
    "gateway": {"RYZANSTEIN_ROUTES_FILE"},  # its routes are live ones
    "router": {"RYZANSTEIN_ROUTER_PEERS"},  # it is alone
}
# Nor certificates: its traffic stays on one machine.
OF_TLS = {"RYZANSTEIN_TLS_FOLDER", "RYZANSTEIN_TLS_PHASE", "RYZANSTEIN_REDIS_CA_FILE"}
OF_REDIS_AUTH = {"RYZANSTEIN_REDIS_USERNAME", "RYZANSTEIN_REDIS_PASSWORD", "RYZANSTEIN_REDIS_PASSWORD_FILE"}
OWN_VALUES = {
    "NAMESPACE",
    "REDIS_URL",
    "ADVERTISE_HOST",
    "ROUTER_ID",
    "DRAIN_DELAY_S",
    "DRAIN_SILENCE_S",
    "DRAIN_TIMEOUT_S",
}


def _compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    return services


def _default(value: str) -> str:
    """``${NAME:-default}`` as compose reads it without NAME."""
    return value.partition(":-")[2].removesuffix("}") if value.startswith("${") else value


@pytest.mark.parametrize("service", SERVICES)
def test_compose_sets_the_same_variables_as_the_chart(service: str) -> None:
    (pod, *_) = render().pods_of(SERVICES[service])
    of_chart = {entry["name"]: entry.get("value") for entry in pod.containers[0]["env"]}
    if of_chart.pop("RYZANSTEIN_EXPECTED_MODELS_CONFIG_MAP", None):  # one model, which does not change
        of_chart["RYZANSTEIN_EXPECTED_MODELS"] = ",".join(expected_models(render()))
    of_compose = {key: _default(value) for key, value in _compose()[service]["environment"].items()}
    assert of_compose.pop("OTEL_EXPORTER_OTLP_ENDPOINT") == ""  # jaeger's, with the profile `monitoring`
    ours = {name for name in of_chart if name.startswith("RYZANSTEIN_")} - OF_REDIS_AUTH - OF_TLS
    assert set(of_compose) == ours - OF_PODS.get(service, set())
    for name, value in of_compose.items():
        if name.removeprefix("RYZANSTEIN_") not in OWN_VALUES and not name.endswith("_ADDRESS"):
            assert name.endswith("_ADDRESSES") or of_chart[name] == value, name


def test_compose_lets_its_services_alone_reach_redis() -> None:
    """It has no password."""
    networks = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["networks"]
    services = _compose()
    assert networks["redis"] == {"internal": True}
    assert services["redis"]["networks"] == ["redis"]
    assert not services["redis"].get("ports")
    assert {name for name, service in services.items() if "redis" in service.get("networks", [])} == {
        "redis",
        *SERVICES,
    }
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_has_the_images_of_the_chart() -> None:
    # The command line makes secrets and runs `helm test`, and serves no request.
    of_chart = {image for pod in render().pods if ":cli-" not in (image := pod.containers[0]["image"])}
    of_compose = {service["image"].replace("${RYZANSTEIN_VERSION:-", "").rstrip("}") for service in _compose().values()}
    assert of_compose == of_chart


def test_compose_watches_with_the_rules_and_dashboards_of_the_chart() -> None:
    folder = ROOT / "deploy"
    mounted = {
        (folder / volume.split(":")[0]).resolve()
        for service in _compose().values()
        for volume in service.get("volumes", ())
    }
    files = CHART / "files"
    wanted = {
        files / "rules" / "recording.yaml",
        files / "rules" / "alerts.yaml",
        files / "dashboards",
        files / "jaeger.yaml",
    }
    assert wanted <= mounted
    assert [path for path in mounted if not path.exists()] == []


def test_skaffold_builds_every_image_of_the_chart_and_passes_its_tag_to_the_chart() -> None:
    config = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    targets = [artifact["custom"]["buildCommand"].split()[-1] for artifact in config["build"]["artifacts"]]
    assert sorted(targets) == sorted(set(IMAGES) - {"simulator"})
    (release,) = config["deploy"]["helm"]["releases"]
    given = {key.removeprefix("image.references."): value for key, value in release["setValueTemplates"].items()}
    artifacts = {artifact["image"].replace("-", "_") for artifact in config["build"]["artifacts"]}
    assert {value.removeprefix("{{.IMAGE_FULLY_QUALIFIED_").rstrip("}") for value in given.values()} == artifacts
    inline = f"image: {{references: {{{', '.join(f'{target}: built/{target}' for target in given)}}}}}"
    images = {container["image"] for pod in render(inline=inline).pods for container in pod.all_containers}
    assert {image for image in images if "ryzanstein" in image} == set()
