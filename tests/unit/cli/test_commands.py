"""Errors of the commands, and their reading of the wire."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.errors import CommandError
from services.cli.finetune import curve
from services.cli.gateway import error_message
from services.cli.main import app
from services.cli.stack.default_model import TINY_MODEL
from services.cli.stack.options import StackOptions, check
from services.cli.stack.state import StackState, read_state, run_dir, write_state
from services.cli.up import StartProgress
from services.common.ports import free_port
from services.compute.model.loading.hub import local_model
from services.compute.model.spec import ModelError


@pytest.fixture(autouse=True)
def _own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def state_of(pid: int, created: float) -> StackState:
    return StackState(
        pid, created, "http://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", {"gateway": pid}, supervised=True
    )


def test_a_reused_pid_is_not_taken_for_the_supervisor() -> None:
    me = psutil.Process(os.getpid())
    write_state(run_dir(8123), state_of(me.pid, me.create_time() - 100))
    with pytest.raises(CommandError, match="nothing runs on port 8123"):
        read_state(8123)


def test_the_run_directory_is_private() -> None:
    assert run_dir(8123).stat().st_mode & 0o077 == 0


def test_the_run_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, me = run_dir(8123), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(CommandError, match=f"{folder} belongs to another user"):
        run_dir(8123)


def test_an_installation_that_does_not_stop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.main._DOWN_S", 0.1)
    command = ("bash", "-c", "trap '' TERM; echo ready; exec sleep 60")  # ignored signals stay ignored
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        write_state(run_dir(8123), state_of(process.pid, psutil.Process(process.pid).create_time()))
        answer = CliRunner().invoke(app, ["down", "--port", "8123"])
        process.kill()
    reason = f"the installation on port 8123 (pid {process.pid}) did not stop in 0 s"
    assert (answer.exit_code, answer.stderr) == (1, f"ryzanstein: {reason}\n")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": ["/no/such"]}, "no such folder"),
        ({"model": [" "]}, "' ': empty; allowed: a folder"),
        ({"model": ["not a hub id"]}, "not a hub id"),
        ({"model": [str(TINY_MODEL)], "redis": "http://x"}, "redis://"),
        ({"model": [str(TINY_MODEL)], "engine_arg": ["seed=1"]}, "--engine-arg: is for --engine vllm or simulated"),
        (
            {"model": [str(TINY_MODEL)], "engine": "vllm", "engine_python": "/no/python"},
            "--engine-python /no/python: No such",
        ),
        ({"model": [str(TINY_MODEL)], "engine": "vllm"}, r"has no vLLM.* install -e '.*\[vllm\]'"),
        ({"model": ["owner/name"], "fine_tuning": "/x"}, "--fine-tuning: --model must be a folder or a GGUF file"),
        (
            {"model": [str(TINY_MODEL)], "fine_tuning": "/x", "engine": "vllm", "engine_python": "true"},
            "--fine-tuning: trains for our own engine, not for --engine vllm",
        ),
        ({"model": [str(TINY_MODEL)], "adapter": ["a=/no"]}, "--adapter a=/no: no adapter_config.json there"),
        ({"model": [str(TINY_MODEL)], "adapter_source": "/no"}, "--adapter-source /no: no such folder"),
        ({"model": [f"{TINY_MODEL}:int9"]}, r"a quantization \(auto, int8, int4, none\), or the end of a GGUF file's"),
        ({"model": [str(TINY_MODEL), f"{TINY_MODEL}:int8"]}, "ryzanstein-tiny is the name of several models"),
        ({"model": ["a/b", "a/c"], "served_model_name": ["b"]}, "one for each of 2 models, found 1"),
        ({"model": ["a/b", "a/c"], "adapter": ["a=/no"]}, "--adapter: with several models"),
        ({"model": ["a/b", "a/c"], "pin": ["a/b"]}, "--pin a/b: expected the name of a model: b, c"),
        (
            {"model": ["a/b", "a/c"], "pin": ["b"], "max_awake": 1},
            "--pin: with --max-awake 1 .* other models never wake",
        ),
        (
            {"model": ["a/b"], "pin": ["b"], "workers": 2, "max_awake": 1},
            "--pin: more pinned workers than --max-awake 1",
        ),
        ({"model": ["a/b", "a/c"], "priority": ["a/b=1"]}, "--priority a/b: expected the name of a model: b, c"),
        ({"model": ["a/b"], "priority": ["b=high"]}, "--priority b=high: expected MODEL=N, with a whole number N from"),
        ({"model": ["a/b"], "priority": ["b=1001"]}, "--priority b=1001: expected MODEL=N, .* from -1000 to 1000"),
        ({"model": ["a/b"], "priority": ["b"]}, "--priority b: expected MODEL=N"),
        ({"model": ["a/b"], "idle_sleep": "5 min"}, "--idle-sleep: expected seconds, or numbers with units"),
        ({"model": ["a/b"], "idle_sleep": "-1"}, "--idle-sleep -1: expected 0, or from 1s to 10000d"),
        ({"model": ["a/b"], "idle_sleep": "100ms"}, "--idle-sleep 100ms: expected 0, or from 1s to 10000d"),
        ({"model": [str(TINY_MODEL)], "host": "192.0.2.1"}, "--host 192.0.2.1: not an address of this machine"),
        ({"model": [str(TINY_MODEL)], "host": "no.such.host.invalid"}, "--host no.such.host.invalid"),
    ],
)
def test_wrong_options_name_the_option(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        check(StackOptions(**{"port": free_port(), **options}))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--adapter", text) for text in ("a\nb=/a", "a\u202eb=/a", " a=/a", "a=/a\n")),
        *(("--served-model-name", text) for text in ("a\nb", "a\u202eb", " a", "a" * 257)),
    ],
)
def test_name_or_folder_with_hidden_characters_is_rejected(option: str, text: str) -> None:
    answer = CliRunner().invoke(app, ["up", "--model", str(TINY_MODEL), option, text])
    assert answer.exit_code == 1
    assert f"{option}{' NAME=DIR' if option == '--adapter' else ''}: expected 1 to " in answer.stderr
    assert answer.stderr.rstrip("\n").isprintable()


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"neither config.json nor a GGUF file"):
        check(StackOptions(model=[str(tmp_path)], port=free_port()))


def test_a_gguf_file_must_be_named_when_there_are_several(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CommandError, match=f"--model {tmp_path}: 2 GGUF models fit"):
        check(StackOptions(model=[str(tmp_path)], port=free_port()))
    check(StackOptions(model=[f"{tmp_path}:Q8_0"], port=free_port(), grpc_port=free_port()))


def test_the_last_colon_of_a_model_begins_its_quantization_unless_the_whole_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "half:int8"
    folder.mkdir()
    (folder / "a-Q8_0.gguf").touch()
    given = [str(folder), f"{folder}:int4", f"{folder}:Q8_0:none", "owner/name:Q4_K_M", "owner/other:int8"]
    options = StackOptions(model=given, quantization="int8", served_model_name=list("abcde"), port=free_port())
    assert [(model.source, model.quantization) for model in options.models] == [
        (str(folder), "int8"),
        (str(folder), "int4"),
        (f"{folder}:Q8_0", "none"),
        ("owner/name:Q4_K_M", "int8"),
        ("owner/other", "int8"),
    ]
    check(options)


def test_keys_are_given_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_API_KEYS", "[]")
    with pytest.raises(CommandError, match="--api-key and RYZANSTEIN_API_KEYS: give one of them"):
        check(StackOptions(model=["owner/name"], port=free_port(), api_key="k"))


def test_fine_tuning_names_its_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CommandError, match=r"\(peft missing\): .* pip install -e '/.*\[finetune\]'"):
        check(StackOptions(model=[str(TINY_MODEL)], port=free_port(), fine_tuning="/x"))


@pytest.mark.parametrize(
    "command",
    [
        "keys create t --budget-per-month inf",
        "keys create t --budget-per-month nan",
        "keys limit i --max-concurrent 99999999999999999999",
        "finetune create --learning-rate-multiplier inf",
        "kube drain-worker w --grace inf",
        "routes set a --wait-s inf",
        "routes set a --patience-s -1",
    ],
)
def test_a_number_beyond_its_range_is_refused_by_its_option(command: str) -> None:
    answer = CliRunner().invoke(app, command.split())
    assert answer.exit_code == 2
    assert command.split()[-2] in answer.stderr
    assert "Invalid value" in answer.stderr


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("up a/b --engine-arg seed", "--engine-arg seed: expected KEY=VALUE"),
        ("keys create t --days mon", "--days needs --hours, such as --hours 08:00-18:00"),
        ("keys limit i --timezone Europe/Berlin", "--timezone needs --hours, such as --hours 08:00-18:00"),
        ("keys create t --hours=", "--hours : expected two times of a day, such as 08:00-18:00 or 22:00-06:00"),
        ("keys limit i --hours 08:00-18:00 --days=", "--days : expected some of mon,tue,wed"),
        ("keys create t --expires-in=", "--expires-in"),
        ("keys create t --model=", "--model: expected the name of a model; without the option all are allowed"),
        ("keys create t --hours 8-18", "--hours 8-18: expected two times of a day, such as 08:00-18:00 or 22:00-06:00"),
        ("keys limit i --hours 08:00-24:00", "--hours 08:00-24:00: expected two times of a day"),
        (
            "keys create t --hours 08:00-18:00 --days monday",
            "--days monday: expected some of mon,tue,wed,thu,fri,sat,sun",
        ),
        ("keys create t --hours 08:00-18:00 --timezone Berlin", "--timezone Berlin: no time zone; a name such as "),
        ("keys rotate i --overlap 1", "--overlap 1: expected a number and a unit, such as 90s, 30m, 12h or 30d"),
        ("keys list --token-file /no/file", "--token-file /no/file: cannot be read: "),
        ("chat --port 9", "http://127.0.0.1:9 does not answer: "),
        ("finetune pyproject.toml --model m --port 9", "http://127.0.0.1:9 does not answer: "),
        (
            "keys create t --expires-in 0d",
            "--expires-in 0d: expected at least 1s; without the option it is valid for ever",
        ),
        (
            "keys create t --expires-in 5x",
            "--expires-in 5x: expected a number and a unit, such as 90s",
        ),
        ("keys list --url http://127.0.0.1:9", "http://127.0.0.1:9 does not answer: "),
        ("chat --model m --url http://127.0.0.1:9", "http://127.0.0.1:9 does not answer: "),
        ("status --router 127.0.0.1:9", "the router at 127.0.0.1:9 does not answer: "),
        ("fetch a/b --to . --as c/d", "--as c/d: a name in DIR, without slashes"),
        ("fetch a/b --to /dev/null/x", "--to /dev/null/x: Not a directory"),
    ],
)
def test_an_error_is_printed_in_one_line(command: str, reason: str) -> None:
    answer = CliRunner().invoke(app, command.split(), input="a question")
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr.startswith(f"ryzanstein: {reason}")
    assert answer.stderr.count("\n") == 1


def test_in_a_terminal_the_start_is_a_table_that_is_gone_afterwards() -> None:
    shown = io.StringIO()
    with StartProgress(Console(file=shown, force_terminal=True, color_system=None)) as progress:
        progress.report("gateway", "starting")
        progress.report("router", "ready after 1 s")
    assert "gateway  starting … " in shown.getvalue()
    assert "router   ready after 1 s" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K"), "the last lines are erased"


def test_a_curve_has_the_highest_loss_above_and_the_lowest_below() -> None:
    assert curve([(1, 2.0)]) == []
    lines = curve([(1, 4.0), (2, 3.0), (3, 1.0)])
    assert lines[0].startswith("   4.000 ┤•")
    assert lines[-2].startswith("   1.000 ┤")
    assert lines[-2].endswith("•")
    assert lines[-1].endswith("step 3")
    assert "".join(lines).count("•") == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
        (b"", "http://x/y answered 502"),
    ],
)
def test_error_bodies_of_any_form_are_read(body: bytes, reason: str) -> None:
    answer = httpx.Response(502, content=body, request=httpx.Request("GET", "http://x/y"))
    assert error_message(answer) == reason


@pytest.mark.parametrize(
    "command", [["doctor"], ["status"], ["drain-worker", "POD"], ["ensure-secrets", "--name", "s"]]
)
def test_a_missing_package_is_named_in_one_line(command: list[str]) -> None:
    without = "import sys; sys.modules['kubernetes'] = None; from services.cli.main import app; app()"
    run = [sys.executable, "-c", without, "kube", *command]
    reason = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert reason.returncode == 1
    needed = f"this needs the Python package kubernetes: {sys.executable} -m pip install kubernetes"
    assert reason.stderr == f"ryzanstein: {needed}\n"


def test_the_version_is_that_of_the_package() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"ryzanstein {version('ryzanstein')}\n")


def test_serve_is_up_and_the_model_needs_no_option() -> None:
    for command in (["serve", "/no/such"], ["up", "/no/such"], ["up", "--model", "/no/such"]):
        answer = CliRunner().invoke(app, command)
        assert (answer.exit_code, answer.stderr) == (
            1, "ryzanstein: --model /no/such: no such folder or GGUF file, and not a hub id like owner/name\n",
        )  # fmt: skip
    two = CliRunner().invoke(app, ["up", "a/b", "--model", "a/c"])
    assert two.stderr == "ryzanstein: MODEL a/b and --model a/c: give one of them\n"


@pytest.mark.parametrize("model", ["/no/such", "./no.gguf", "no such id", "gpt2"])
def test_a_missing_model_has_the_same_words_in_every_command(model: str) -> None:
    reason = f"{model}: no such folder or GGUF file, and not a hub id like owner/name"
    with pytest.raises(ModelError, match=re.escape(reason)):
        local_model(model)
    with pytest.raises(CommandError, match=re.escape(f"--model {reason}")):
        check(StackOptions(model=[model], port=free_port()))
