"""Kubernetes' API server, called by the pod's service account. Every call blocks."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"


class KubernetesError(Exception):
    """The API server cannot be reached or refuses; `status`: that of its answer, 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


CONFLICT, NOT_FOUND = 409, 404


@dataclass(frozen=True, slots=True)
class ApiServer:
    """`account`: the folder in which kubelet keeps the service account's token."""

    account: Path

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Object | None = None, *, timeout_s: float, content_type: str = ""
    ) -> Iterator[HTTPResponse]:
        """The answer to a request for ``{namespace}`` in `path`, to be read in the block. Raises KubernetesError."""
        try:
            trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            server, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
            connection = HTTPSConnection(server, int(port or 443), timeout=timeout_s, context=trusted)
            with contextlib.closing(connection):
                content = json.dumps(body).encode() if body is not None else None
                connection.request(method, path.format(namespace=self.namespace), content, self._head(content_type))
                response = connection.getresponse()
                if response.status >= 300:
                    text = response.read(1000).decode(errors="replace")
                    raise KubernetesError(f"the API server answers {response.status}: {text}", response.status)
                yield response
        except (OSError, HTTPException, ValueError) as error:
            raise KubernetesError(str(error)) from error

    def call(
        self, method: str, path: str, body: Object | None = None, *, timeout_s: float, content_type: str = ""
    ) -> Object:
        """The object that the API server answers with. Raises KubernetesError."""
        with self.open(method, path, body, timeout_s=timeout_s, content_type=content_type) as response:
            answer = json.loads(response.read())
        if not isinstance(answer, dict):
            raise KubernetesError(f"the API server answers {str(answer)[:100]}, which is no object")
        return answer

    @property
    def namespace(self) -> str:
        """The pod's own. Raises OSError."""
        return (self.account / "namespace").read_text("utf-8").strip()

    def _head(self, content_type: str) -> Mapping[str, str]:
        token = (self.account / "token").read_text("utf-8").strip()  # renewed by kubelet
        return {"Authorization": f"Bearer {token}", "Content-Type": content_type or "application/json"}
