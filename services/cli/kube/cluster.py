"""Reads the objects of a release from the API server. It changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from services.cli.errors import CommandError
from services.cli.kube.diagnosis.snapshot import (
    CHART,
    COMPONENT,
    INSTANCE,
    ClusterSnapshot,
    Object,
    is_ready,
    labels,
    releases,
)

_TIMEOUT_S = 15
_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": _TIMEOUT_S}  # the answer as JSON
_DEFAULT_RELEASE = "ryzanstein"  # the name in the documents; assumed if nothing is installed
TLS_VOLUME = "tls"  # volume of every service in a release with mutual TLS
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # in a pod
_NOT_FOUND = 404
_UNREADABLE = (401, 403, _NOT_FOUND, 405)  # no permission, or the cluster has no such kind
# Custom resources as (group, version): of the namespace, and of the whole cluster.
_OF_OTHERS = {
    "podmonitors": ("monitoring.coreos.com", "v1"),
    "httproutes": ("gateway.networking.k8s.io", "v1"),
}
_OF_OTHERS_ANYWHERE = {"prometheuses": ("monitoring.coreos.com", "v1")}


def connect(context: str = "") -> None:
    """Use the cluster of the kubeconfig, else of this pod; raises CommandError if there is neither."""
    try:
        config.load_config(**({"context": context} if context else {}))  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise CommandError(f"no Kubernetes cluster: {error}") from error


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Raise CommandError if the API server refuses a call of the block, naming `what`, or does not answer it."""
    try:
        yield
    except client.ApiException as error:
        raise CommandError(f"{what}: {error.reason} ({error.status})") from error
    except HTTPError as error:
        raise CommandError(f"the API server does not answer: {error}") from error


def secret(namespace: str, name: str) -> client.V1Secret | None:
    """A secret, if it is there; raises CommandError if the API server refuses."""
    with asking(f"secret {namespace}/{name}"):
        try:
            return client.CoreV1Api().read_namespaced_secret(name, namespace, _request_timeout=_TIMEOUT_S)
        except client.ApiException as error:
            if error.status != _NOT_FOUND:
                raise
    return None


def current_namespace(context: str = "") -> str:
    """The namespace of the kubeconfig's context; without a kubeconfig, that of this pod."""
    try:
        contexts, active = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        return _OWN_NAMESPACE.read_text().strip()
    chosen = next((each for each in contexts if each["name"] == context), active)
    return str(chosen["context"].get("namespace", "default"))


def read(namespace: str, release: str) -> ClusterSnapshot:
    """Read all objects that a diagnosis needs, with one request per kind.

    An empty `release` means the only one. Raises CommandError if the API server does not answer, or if there are
    several releases and none is named.
    """
    unread: set[str] = set()
    objects = {"pods": _pods(namespace, "")}
    objects |= {kind: _listed(kind, listing, unread) for kind, listing in _listings(namespace).items()}
    made = [each for kind in ("pods", "deployments", "statefulsets") for each in objects[kind]]
    chosen = release or _only(releases(made), namespace)
    of_release = [pod for pod in objects["pods"] if labels(pod).get(INSTANCE) == chosen]
    objects["certificates"] = _certificates(namespace, of_release, unread)
    return ClusterSnapshot(namespace, chosen, objects, frozenset(unread), time.time())


def certificates(namespace: str, release: str) -> list[Object]:
    """The secrets with the certificates that a release's pods have mounted, without keys; none that can't be read."""
    return _certificates(namespace, _pods(namespace, f"{INSTANCE}={release}"), set())


def _certificates(namespace: str, pods: list[Object], unread: set[str]) -> list[Object]:
    volumes = [volume for pod in pods for volume in pod["spec"].get("volumes") or () if volume["name"] == TLS_VOLUME]
    certificates = []
    for secret in sorted({volume["secret"]["secretName"] for volume in volumes if "secret" in volume}):
        with asking(f"secret {namespace}/{secret}"):
            try:
                read = client.CoreV1Api().read_namespaced_secret(secret, namespace, _request_timeout=_TIMEOUT_S)
            except client.ApiException as error:
                if error.status not in _UNREADABLE:
                    raise
                unread |= {"secrets"} if error.status != _NOT_FOUND else set()
                continue
        data = {key: value for key, value in (read.data or {}).items() if key.endswith(".crt")}
        certificates.append({"metadata": {"name": secret}, "data": data})
    return certificates


def only_release(namespace: str) -> str:
    """The release in the namespace; raises CommandError if there are several."""
    return _only(releases(_pods(namespace, CHART)), namespace)


def _only(names: list[str], namespace: str) -> str:
    if len(names) > 1:
        raise CommandError(f"namespace {namespace} has several releases, --release NAME takes one: {', '.join(names)}")
    return names[0] if names else _DEFAULT_RELEASE


def ready_pods(namespace: str, release: str, component: str) -> list[Object]:
    """A component's ready pods."""
    return [pod for pod in _pods(namespace, f"{INSTANCE}={release},{COMPONENT}={component}") if is_ready(pod)]


def _pods(namespace: str, selector: str) -> list[Object]:
    unread: set[str] = set()
    listing = client.CoreV1Api().list_namespaced_pod
    pods = _listed("pods", lambda: listing(namespace, label_selector=selector, **_RAW), unread)
    if unread:
        raise CommandError(f"pods of namespace {namespace} can't be listed: does it exist, and may you read it?")
    return pods


def _listings(namespace: str) -> dict[str, Callable[[], Any]]:
    core, apps, batch = client.CoreV1Api(), client.AppsV1Api(), client.BatchV1Api()
    network, custom = client.NetworkingV1Api(), client.CustomObjectsApi()
    scaling, storage = client.AutoscalingV2Api(), client.StorageV1Api()

    def here(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: call(namespace, **_RAW)

    def anywhere(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: call(**_RAW)

    def of_others(kind: str, group: str, version: str) -> Callable[[], Any]:
        return lambda: custom.list_namespaced_custom_object(group, version, namespace, kind, **_RAW)

    def of_others_anywhere(kind: str, group: str, version: str) -> Callable[[], Any]:
        return lambda: custom.list_cluster_custom_object(group, version, kind, **_RAW)

    return {
        "events": here(core.list_namespaced_event),
        "services": here(core.list_namespaced_service),
        "persistentvolumeclaims": here(core.list_namespaced_persistent_volume_claim),
        "deployments": here(apps.list_namespaced_deployment),
        "replicasets": here(apps.list_namespaced_replica_set),
        "statefulsets": here(apps.list_namespaced_stateful_set),
        "jobs": here(batch.list_namespaced_job),
        "cronjobs": here(batch.list_namespaced_cron_job),
        "networkpolicies": here(network.list_namespaced_network_policy),
        "ingresses": here(network.list_namespaced_ingress),
        "horizontalpodautoscalers": here(scaling.list_namespaced_horizontal_pod_autoscaler),
        "nodes": anywhere(core.list_node),
        "ingresses anywhere": anywhere(network.list_ingress_for_all_namespaces),
        "ingressclasses": anywhere(network.list_ingress_class),
        "storageclasses": anywhere(storage.list_storage_class),
        **{kind: of_others(kind, *version) for kind, version in _OF_OTHERS.items()},
        **{kind: of_others_anywhere(kind, *version) for kind, version in _OF_OTHERS_ANYWHERE.items()},
    }


def _listed(kind: str, listing: Callable[[], Any], unread: set[str]) -> list[Object]:
    """The objects of a kind, with the API's field names; a kind that cannot be read is added to `unread`."""
    with asking(f"{kind} can't be listed"):
        try:
            objects: dict[str, Any] = json.loads(listing().data)
        except client.ApiException as error:
            if error.status not in _UNREADABLE:
                raise
            unread.add(kind)
            return []
    return list(objects["items"])
