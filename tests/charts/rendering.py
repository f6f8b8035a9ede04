"""The chart rendered by Helm, once per values file and version of Helm, as plain objects."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.programs import CHART, program

Object = dict[str, Any]

HELMS = (3, 4)
OLDEST, NEWEST = "1.30.0", "1.36.0"
RELEASE, NAMESPACE = "ryzanstein", "serving"
CI_VALUES = sorted(CHART.glob("ci/*-values.yaml"))
PROFILES = sorted(CHART.glob("profiles/*.yaml"))
ALL_VALUES = CI_VALUES + PROFILES

# libyaml's loader: the pure one takes ten times as long.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RenderError(Exception):
    """Helm refused to render; the text is what it said."""


@dataclass(frozen=True)
class Pod:
    """A pod or pod template, and whose it is."""

    owner: Object
    metadata: Object
    spec: Object

    def __str__(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.metadata["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        """The main containers."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Object]:
        """Init containers, then the main ones."""
        return list(self.spec.get("initContainers", ())) + self.containers

    @property
    def runs_to_completion(self) -> bool:
        """Whether it ends by itself: a Job's or CronJob's pod, or one of `helm test`."""
        return self.owner["kind"] in ("Job", "CronJob", "Pod")


@dataclass(frozen=True)
class Rendered:
    """The output of one `helm template`."""

    text: str

    @cached_property
    def objects(self) -> list[Object]:
        return [manifest for manifest in yaml.load_all(self.text, _LOADER) if manifest]

    def of(self, *kinds: str) -> list[Object]:
        return [manifest for manifest in self.objects if manifest["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        (manifest,) = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name]
        return manifest

    @cached_property
    def pods(self) -> list[Pod]:
        return list(_pods(self.objects))

    def pods_of(self, *components: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component in components]


def _pods(objects: list[Object]) -> Iterator[Pod]:
    for owner in objects:
        spec = owner.get("spec")
        if owner["kind"] == "Pod":
            yield Pod(owner, owner["metadata"], owner["spec"])
        elif owner["kind"] == "CronJob":
            template = owner["spec"]["jobTemplate"]["spec"]["template"]
            yield Pod(owner, template["metadata"], template["spec"])
        elif "job.json" in owner.get("data", {}):  # the fine-tuner makes Jobs from it
            yield from _pods([json.loads(owner["data"]["job.json"])])
        elif isinstance(spec, dict) and "containers" in spec.get("template", {}).get("spec", {}):
            yield Pod(owner, spec["template"]["metadata"], spec["template"]["spec"])


def run_helm(*args: str, major: int = 3, stdin: str = "") -> str:
    """Helm's output; raises RenderError with its complaint."""
    command = [program(f"helm {major}"), *args]
    alone = os.environ | {"GOGC": "off", "GOMAXPROCS": "1"}  # it ends before a collection or a second core pays
    done = subprocess.run(command, input=stdin, env=alone, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


@cache
def render(
    values: Path | None = None,
    inline: str = "",
    *,
    major: int = 3,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    kubernetes: str = NEWEST,
    chart: Path = CHART,
) -> Rendered:
    """Render the chart with a values file and, over it, inline YAML values; raises RenderError."""
    chosen = ("--values", str(values)) if values else ()
    args = ("--namespace", namespace, "--kube-version", kubernetes, *chosen, "--values", "-")
    return Rendered(run_helm("template", release, str(chart), *args, major=major, stdin=inline))


def environment(container: Object) -> dict[str, Any]:
    """A container's variables by name: a string, or the `valueFrom` object."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom", "")) for entry in container.get("env", ())}


def expected_models(rendered: Rendered) -> list[str]:
    """The names in the ConfigMap that routers watch."""
    (pod,) = rendered.pods_of("router")
    watched = environment(pod.containers[0])["RYZANSTEIN_EXPECTED_MODELS_CONFIG_MAP"]
    names: str = rendered.named("ConfigMap", watched)["data"]["expected"]
    return names.splitlines()


def quantity(text: str | float) -> float:
    """A Kubernetes quantity as a number: cores or bytes."""
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    suffix = str(text).lstrip("0123456789.")
    return float(str(text).removesuffix(suffix)) * units.get(suffix, 1)
