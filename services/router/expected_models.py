"""The pools that a ConfigMap names: a watch of it sees a new pool as soon as Helm has written the release."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from services.router.api_server import ApiServer, KubernetesError

KEY = "expected"
# A cut connection is noticed after twice this time. Each watch begins with the ConfigMap as it is.
_WATCH_S = 30
_PAUSE_S = 0.5

log = logging.getLogger(__name__)

Names = frozenset[str]
Data = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConfigMap:
    """A ConfigMap of this pod's namespace."""

    name: str
    api: ApiServer

    def watch(self) -> Iterator[Data]:
        """Yield the data, with the key `expected`, now and after each change, for half a minute.

        Raises KubernetesError and ValueError, whose texts say what is wrong.
        """
        options = {"watch": "true", "fieldSelector": f"metadata.name={self.name}", "timeoutSeconds": _WATCH_S}
        path = f"/api/v1/namespaces/{{namespace}}/configmaps?{urlencode(options)}"
        empty = True
        with self.api.open("GET", path, timeout_s=2 * _WATCH_S) as response:
            for line in response:
                yield _data(json.loads(line))
                empty = False
        if empty:
            raise ValueError(f"there is no ConfigMap {self.api.namespace}/{self.name}")


def _data(event: object) -> Data:
    match event:
        case {"type": "ADDED" | "MODIFIED", "object": {"data": {"expected": str()} as data}}:
            return {key: str(value) for key, value in data.items()}
    raise ValueError(f"it has no key {KEY!r} any more, or cannot be watched: {str(event)[:1000]}")


def names_of(data: Data) -> Names:
    """The expected models, one a line of the key `expected`."""
    return frozenset(name for line in data[KEY].splitlines() if (name := line.strip()))


class ConfigMapWatch:
    """Calls `changed` in the event loop with the data of a ConfigMap, now and whenever they change.

    While they cannot be read, the last data stay.
    """

    def __init__(self, config_map: ConfigMap, changed: Callable[[Data], None]) -> None:
        self._config_map = config_map
        self._changed = changed
        self._data: Data | None = None
        self._trouble = ""

    def start(self) -> None:
        """Begin; to be called in the event loop."""
        loop = asyncio.get_running_loop()
        # A thread, since its reads block; a daemon, so that no read holds up the end of the process.
        threading.Thread(target=self._follow, args=(loop,), name="expected models", daemon=True).start()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            try:
                for data in self._config_map.watch():
                    self._set(data, loop)
            except (KubernetesError, ValueError) as error:
                self._complain(str(error))
            time.sleep(_PAUSE_S)

    def _set(self, data: Data, loop: asyncio.AbstractEventLoop) -> None:
        self._trouble = ""
        if data != self._data:
            self._data = data
            log.info("expected models: %s", ", ".join(sorted(names_of(data))) or "none")
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._changed, data)

    def _complain(self, trouble: str) -> None:
        """Log a trouble once, not at each try."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("ConfigMap %s cannot be read, the expected models stay: %s", self._config_map.name, trouble)
