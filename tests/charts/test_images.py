"""Every image is mirrored, pinned and pulled by the same values."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.charts.rendering import ALL_VALUES, Rendered, environment, render
from tests.programs import CHART

MIRROR = "mirror.example:5000/team"
DIGEST = "sha256:" + "a" * 64


def _images(rendered: Rendered) -> set[str]:
    """Of containers, and of image volumes."""
    of_containers = {container["image"] for pod in rendered.pods for container in pod.all_containers}
    volumes = [volume for pod in rendered.pods for volume in pod.spec.get("volumes", ())]
    return of_containers | {volume["image"]["reference"] for volume in volumes if "image" in volume}


def _our_tag(target: str) -> str:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return f"ghcr.io/ryzanstein/ryzanstein:{target}-{version}"


def test_each_component_has_its_target() -> None:
    images = {pod.component: pod.containers[0]["image"] for pod in render().pods}
    targets = {"coordinator": "kv-coordinator", "worker": "worker-cpu", "secrets": "cli"}
    expected = {component: _our_tag(targets.get(component, component)) for component in ("gateway", "router", *targets)}
    assert {component: images[component] for component in expected} == expected


def test_gpus_take_the_image_with_cuda() -> None:
    for values in ("{gpu: {count: 1}}", "{device: cuda, gpu: {count: 1}}"):
        (pod,) = render(inline=f"workers: {{pools: {{default: {values}}}}}").pods_of("worker")
        assert pod.containers[0]["image"] == _our_tag("worker-cuda")


def test_compiled_gpu_kernels_are_kept_in_a_volume_since_the_root_is_read_only() -> None:
    pools = "{default: null, gpu: {device: cuda, compiledKernels: {sizeLimit: 3Gi}}, cpu: {}}"
    pods = render(inline=f"workers: {{pools: {pools}}}").pods_of("worker")
    of_gpu, of_cpu = sorted(pods, key=lambda pod: str(pod).endswith("cpu"))
    folder = environment(of_gpu.containers[0])["TRITON_CACHE_DIR"]
    (name,) = (mount["name"] for mount in of_gpu.containers[0]["volumeMounts"] if mount["mountPath"] == folder)
    assert {"name": name, "emptyDir": {"sizeLimit": "3Gi"}} in of_gpu.spec["volumes"]
    assert "TRITON_CACHE_DIR" not in environment(of_cpu.containers[0])
    assert name not in {volume["name"] for volume in of_cpu.spec["volumes"]}


def test_the_list_of_images_is_complete() -> None:
    """images.txt is what somebody mirrors for an installation without internet."""
    listed = (CHART / "images.txt").read_text().split()
    assert listed == sorted(set(listed))
    used = set().union(*(_images(render(values)) for values in (None, *ALL_VALUES)))
    of_users = {image for image in used if image.startswith("registry.example")}
    assert set(listed) == used - of_users


def test_values_of_parent_charts_mirror_every_image_and_add_the_pull_secret_to_every_pod(values: Path) -> None:
    rendered = render(
        values, major=4, inline=f"global: {{imageRegistry: '{MIRROR}', imagePullSecrets: [{{name: pull}}]}}"
    )
    for image in _images(rendered):
        assert image.startswith(f"{MIRROR}/"), image
    for pod in rendered.pods:
        assert {"name": "pull"} in pod.spec["imagePullSecrets"], pod


def test_a_digest_wins_over_the_tag() -> None:
    rendered = render(
        inline=f"{{image: {{digests: {{gateway: '{DIGEST}'}}}}, redis: {{image: {{digest: '{DIGEST}'}}}}}}"
    )
    for component in ("gateway", "redis"):
        (pod,) = rendered.pods_of(component)
        assert re.fullmatch(rf"[^@:]+@{DIGEST}", pod.containers[0]["image"])


def test_a_whole_reference_replaces_one_image() -> None:
    own = "localhost:5000/ryzanstein-gateway:abc"
    rendered = render(inline=f"image: {{references: {{gateway: '{own}'}}}}")
    images = {pod.component: pod.containers[0]["image"] for pod in rendered.pods}
    assert images["gateway"] == own
    assert images["router"] == _our_tag("router")


def test_no_tag_moves(rendered: Rendered) -> None:
    for image in _images(rendered):
        assert not image.endswith(":latest"), image
        assert "@sha256:" in image or ":" in image.rsplit("/", 1)[-1], image
