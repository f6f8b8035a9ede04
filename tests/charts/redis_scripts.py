"""The bundled Redis as the chart's script starts it, with a real server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.charts.rendering import Rendered
from tests.programs import program


@contextmanager
def running(rendered: Rendered, folder: Path, ports: dict[str, int]) -> Iterator[None]:
    """Start it with its configuration; what pods mount under /etc/ryzanstein is in `folder`/etc.

    `ports`: what is listened on instead of the ports of the configuration.
    """
    (config,) = [each for each in rendered.of("ConfigMap") if "start.sh" in each["data"]]
    instead = {port: str(free) for port, free in ports.items()} | {
        "/etc/ryzanstein": f"{folder}/etc",
        "/etc/redis/": f"{folder}/",
        "/tmp/": f"{folder}/",
        "/data": str(folder),
        "sleep 5": "sleep 0.2",
    }
    places = re.compile("|".join(map(re.escape, instead)))
    for name, text in config["data"].items():
        (folder / name).write_text(places.sub(lambda match: instead[match[0]], text))
    folders = f"{Path(program('redis 7')).parent}:{os.environ['PATH']}"
    with subprocess.Popen(["sh", folder / "start.sh"], stdout=subprocess.DEVNULL, env={"PATH": folders}) as redis:
        try:
            yield
        finally:
            redis.kill()
