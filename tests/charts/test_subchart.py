"""The chart as a part of a bigger one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import HELMS, Rendered, render
from tests.programs import CHART


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A chart that takes ours in under a condition, and has a value in `global` of its own."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    ours = {"name": "ryzanstein", "version": version, "condition": "ryzanstein.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [ours]}
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "ryzanstein").symlink_to(CHART)
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"global": {"team": {"name": "blue"}}}))
    return tmp_path


def _rendered(parent: Path, values: str, major: int) -> Rendered:
    return render(inline=values, chart=parent, release="umbrella", major=major)


@pytest.mark.parametrize("major", HELMS)
def test_the_chart_renders_inside_a_parent_chart(parent: Path, major: int) -> None:
    values = "{global: {imageRegistry: mirror.example}, ryzanstein: {gateway: {replicas: 2}}}"
    rendered = _rendered(parent, values, major)
    (gateway,) = rendered.pods_of("gateway")
    assert gateway.owner["metadata"]["name"] == "umbrella-ryzanstein-gateway"
    assert gateway.owner["spec"]["replicas"] == 2
    images = {container["image"] for pod in rendered.pods for container in pod.all_containers}
    assert all(image.startswith("mirror.example/") for image in images), images


@pytest.mark.parametrize("major", HELMS)
def test_a_false_condition_leaves_the_subchart_out(parent: Path, major: int) -> None:
    assert _rendered(parent, "ryzanstein: {enabled: false}", major).objects == []
