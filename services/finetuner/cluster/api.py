"""The calls to Kubernetes' API server that trainings need. Each blocks; objects are as JSON has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

Object = dict[str, Any]

_TIMEOUT_S = 15
_NOT_FOUND, _ALREADY_EXISTS = 404, 409
_TRANSIENT = (401, 429, 500, 502, 503, 504)  # 401: the token was renewed meanwhile
_JOB_NAME = "batch.kubernetes.io/job-name"


class ClusterAwayError(Exception):
    """The API server does not answer; trying again may help."""


class ClusterError(Exception):
    """The API server refuses; the message says why."""


class Cluster:
    """One namespace, as the pod's service account, or else the kubeconfig, may see it.

    All methods raise :class:`ClusterAwayError` and :class:`ClusterError`.
    """

    def __init__(self, namespace: str) -> None:
        """Raises :class:`ClusterError` if this is neither a pod with a token nor a machine with a kubeconfig."""
        configuration = client.Configuration()
        try:
            config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            raise ClusterError(f"no Kubernetes cluster: {error}") from error
        api = client.ApiClient(configuration)
        self._batch, self._core, self._apps = client.BatchV1Api(api), client.CoreV1Api(api), client.AppsV1Api(api)
        self._namespace = namespace

    def create_job(self, job: Any) -> Object | None:
        """Create a Job; returns it as it is now, or None if there is one of that name."""
        return _result(lambda: self._batch.create_namespaced_job(self._namespace, job, **_RAW), _ALREADY_EXISTS)

    def job(self, name: str) -> Object | None:
        """A Job, if it is there."""
        return _result(lambda: self._batch.read_namespaced_job(name, self._namespace, **_RAW), _NOT_FOUND)

    def delete_job(self, name: str) -> None:
        """Delete a Job; it is there until its pods have ended."""
        how = {"propagation_policy": "Foreground", **_RAW}
        _result(lambda: self._batch.delete_namespaced_job(name, self._namespace, **how), _NOT_FOUND)

    def jobs(self, labels: dict[str, str]) -> list[Object]:
        """The Jobs with these labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        return _items(lambda: self._batch.list_namespaced_job(self._namespace, label_selector=selector, **_RAW))

    def pods(self, job: str) -> list[Object]:
        """A Job's pods, the newest last."""
        selector = f"{_JOB_NAME}={job}"
        pods = _items(lambda: self._core.list_namespaced_pod(self._namespace, label_selector=selector, **_RAW))
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def deployment_uid(self, name: str) -> str:
        """The UID of a Deployment."""
        deployment = _result(lambda: self._apps.read_namespaced_deployment(name, self._namespace, **_RAW), _NOT_FOUND)
        if deployment is None:
            raise ClusterError(f"there is no Deployment {self._namespace}/{name}")
        return str(deployment["metadata"]["uid"])


_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": _TIMEOUT_S}


def _result(call: Callable[[], Any], none_for: int = 0) -> Object | None:
    """Return a call's result; None for the status `none_for`."""
    try:
        answer: Object = json.loads(call().data)
    except client.ApiException as error:
        if error.status == none_for:
            return None
        refusal = f"the API server refuses with {error.status} {error.reason}: {_message(error)}"
        raise (ClusterAwayError if error.status in _TRANSIENT else ClusterError)(refusal) from error
    except HTTPError as error:
        raise ClusterAwayError(f"the API server does not answer: {error}") from error
    return answer


def _items(call: Callable[[], Any]) -> list[Object]:
    answer = _result(call)
    return list(answer["items"]) if answer else []


def _message(error: client.ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.body)
