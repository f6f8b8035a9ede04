"""The API server's objects of one release, as plain dicts with the API's field names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Object = dict[str, Any]

INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
CHART = "app.kubernetes.io/name=ryzanstein"  # selects the objects of all releases of the chart


@dataclass(frozen=True)
class ClusterSnapshot:
    """Objects by plural kind, e.g. `pods`. A kind that could not be read is in `unread`."""

    namespace: str
    release: str
    objects: dict[str, list[Object]]
    unread: frozenset[str] = frozenset()
    now: float = field(default=0.0)  # Unix time

    def all(self, kind: str) -> list[Object]:
        """All objects of a kind: of the namespace, or of the cluster."""
        return self.objects.get(kind, [])

    def own(self, kind: str, component: str = "") -> list[Object]:
        """The objects of the release, or of one component of it."""
        objects = [each for each in self.all(kind) if labels(each).get(INSTANCE) == self.release]
        return [each for each in objects if not component or labels(each).get(COMPONENT) == component]

    def events(self, kind: str, name: str) -> list[Object]:
        """The events of an object, newest last."""
        events = [
            event
            for event in self.all("events")
            if event["involvedObject"].get("kind") == kind and event["involvedObject"].get("name") == name
        ]
        return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def missing_class(self, kind: str, wanted: str | None) -> str:
        """Why there is no class `wanted`, or no default one, of a kind, e.g. `StorageClass`; empty if there is."""
        plural, default = f"{kind.lower()}es", f"{kind.lower()}.kubernetes.io/is-default-class"
        classes = self.all(plural)
        fitting = [
            each
            for each in classes
            if (name(each) == wanted if wanted else (each["metadata"].get("annotations") or {}).get(default) == "true")
        ]
        if fitting or plural in self.unread:
            return ""
        why = f"there is no {kind} {wanted}" if wanted else f"it names no {kind} and the cluster has no default one"
        return f"{why}; there are: {', '.join(map(name, classes)) or 'none'}"

    def seconds_since(self, timestamp: str) -> float:
        """Seconds since a timestamp of the API server."""
        return self.now - datetime.fromisoformat(timestamp).timestamp()

    def kubectl(self, command: str) -> str:
        """A kubectl command for this namespace."""
        return f"kubectl -n {self.namespace} {command}"

    def upgrade(self, values: str) -> str:
        """The Helm command that sets values of this release."""
        return f"helm -n {self.namespace} upgrade {self.release} CHART --reuse-values {values}"


def name(resource: Object) -> str:
    """The name of an object."""
    return str(resource["metadata"]["name"])


def labels(resource: Object) -> dict[str, str]:
    """The labels of an object."""
    return resource["metadata"].get("labels") or {}


def releases(objects: Iterable[Object]) -> list[str]:
    """The names of the releases of these objects."""
    key, _, value = CHART.partition("=")
    names = {labels(each).get(INSTANCE) for each in objects if labels(each).get(key) == value}
    return sorted(release for release in names if release)


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready for connections."""
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def selects(selector: Object | None, of: dict[str, str]) -> bool:
    """Whether a label selector matches labels. An empty selector matches all, None matches nothing."""
    if selector is None:
        return False
    equal = (selector.get("matchLabels") or {}).items() <= of.items()
    return equal and all(_holds(each, of) for each in selector.get("matchExpressions") or ())


def _holds(expression: Object, of: dict[str, str]) -> bool:
    value = of.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None
