"""The models that a ConfigMap names: a watch of it sees a new pool as soon as Helm has written the release."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlencode

KEY = "expected"
# A cut connection is noticed after twice this time. Each watch begins with the ConfigMap as it is.
_WATCH_S = 30
_PAUSE_S = 0.5

log = logging.getLogger(__name__)

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class ConfigMap:
    """A ConfigMap of this pod's namespace; `account`: the folder in which kubelet keeps the service account's token."""

    name: str
    account: Path

    def watch(self) -> Iterator[Names]:
        """Yield the names, one a line of the key `expected`, now and after each change, for half a minute.

        Raises OSError, HTTPException and ValueError, whose texts say what is wrong.
        """
        options = {"watch": "true", "fieldSelector": f"metadata.name={self.name}", "timeoutSeconds": _WATCH_S}
        namespace = (self.account / "namespace").read_text("utf-8").strip()
        server, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        connection = HTTPSConnection(server, int(port or 443), timeout=2 * _WATCH_S, context=trusted)
        with contextlib.closing(connection):
            token = (self.account / "token").read_text("utf-8").strip()
            path = f"/api/v1/namespaces/{namespace}/configmaps?{urlencode(options)}"
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"the API server answers {response.status}: {response.read(1000).decode()}")
            empty = True
            for line in response:
                yield _names(json.loads(line))
                empty = False
        if empty:
            raise ValueError(f"there is no ConfigMap {namespace}/{self.name}")


def _names(event: object) -> Names:
    match event:
        case {"type": "ADDED" | "MODIFIED", "object": {"data": {"expected": str(lines)}}}:
            return frozenset(name for line in lines.splitlines() if (name := line.strip()))
    raise ValueError(f"it has no key {KEY!r} any more, or cannot be watched: {str(event)[:1000]}")


class ModelWatch:
    """Calls `expect` in the event loop with the names of a ConfigMap, now and whenever they change.

    While they cannot be read, the last names stay.
    """

    def __init__(self, config_map: ConfigMap, expect: Callable[[Names], None]) -> None:
        self._config_map = config_map
        self._expect = expect
        self._names: Names | None = None
        self._trouble = ""

    def start(self) -> None:
        """Begin; to be called in the event loop."""
        loop = asyncio.get_running_loop()
        # A thread, since its reads block; a daemon, so that no read holds up the end of the process.
        threading.Thread(target=self._follow, args=(loop,), name="expected models", daemon=True).start()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            try:
                for names in self._config_map.watch():
                    self._set(names, loop)
            except (OSError, HTTPException, ValueError) as error:
                self._complain(str(error))
            time.sleep(_PAUSE_S)

    def _set(self, names: Names, loop: asyncio.AbstractEventLoop) -> None:
        self._trouble = ""
        if names != self._names:
            self._names = names
            log.info("expected models: %s", ", ".join(sorted(names)) or "none")
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._expect, names)

    def _complain(self, trouble: str) -> None:
        """Log a trouble once, not at each try."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("ConfigMap %s cannot be read, the expected models stay: %s", self._config_map.name, trouble)
