"""`ryzanstein models` and `check`: options that are refused; tests/integration/cli/test_check.py has the answer."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from services.cli import check
from services.cli.errors import CommandError
from services.cli.main import app
from services.cli.stack.default_model import TINY_MODEL


@pytest.mark.parametrize(("text", "counts"), [("1", "1"), ("1,2,4", "1,2,4"), (" 1, 8 ", "1,8"), ("999", "999")])
def test_numbers_of_ranks(text: str, counts: str) -> None:
    assert check.parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1;2", "1000", "two", "1,2,"])
def test_wrong_numbers_of_ranks_are_named(text: str) -> None:
    with pytest.raises(CommandError, match=r"^--ranks .*: expected numbers from 1 to 999, such as 1,2,4$"):
        check.parse_counts(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--device", "tpu"], "'tpu' is not one of"), (["--ranks", "none"], "expected numbers from 1 to 999")],
)
def test_a_wrong_option_is_no_answer_about_the_model(options: list[str], message: str) -> None:
    answered = CliRunner().invoke(app, ["check", str(TINY_MODEL), *options])
    assert answered.exit_code == 2, answered.output
    assert message in " ".join(answered.output.split())


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(CommandError, match=r"models needs the extra worker \(torch missing\): .* install") as raised:
        check.run(["models"])
    assert raised.value.status == 2
