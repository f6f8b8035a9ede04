"""A service may hold as many connections as the machine allows, whatever a shell's limit is."""

from __future__ import annotations

import resource
import subprocess
import sys

PROGRAM = """
import asyncio, resource
from services.common.lifecycle import run_service
from services.common.settings import ServiceSettings

async def main(settings: ServiceSettings, stop: asyncio.Event) -> None:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

run_service("test", ServiceSettings, main)
"""


def test_service_raises_its_limit_of_descriptors_to_the_hard_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = ["bash", "-c", 'ulimit -Sn 256 && exec "$0" -c "$1"', sys.executable, PROGRAM]
    done = subprocess.run(limited, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(hard), str(hard)]
