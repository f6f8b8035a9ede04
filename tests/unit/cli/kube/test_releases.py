"""Without `--release`, the commands for a cluster look after the one release that the namespace has."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from tests.kube_api import KubeApi, Object


def pods(*releases: str) -> list[Object]:
    """A pod that is not scheduled yet for each release, and one of somebody else."""
    of_chart = [("ryzanstein", release) for release in releases]
    return [
        {
            "metadata": {
                "name": f"{release}-router-0",
                "labels": {"app.kubernetes.io/name": chart, "app.kubernetes.io/instance": release},
            },
            "spec": {"containers": []},
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]},
        }
        for chart, release in [*of_chart, ("redis", "theirs")]
    ]


def kube(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kube", *arguments])


COMMANDS = (("doctor",), ("status",), ("drain-worker", "POD"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (COMMANDS[0], "pod/r-router-0 is Pending"),
        (COMMANDS[1], "no router of r in llm is ready"),
        (COMMANDS[2], "no router of r in llm is ready"),
    ],
)
def test_the_only_release_needs_no_name(api: KubeApi, command: tuple[str, ...], message: str) -> None:
    api.put("pods", *pods("r"))
    answer = kube(*command)
    assert answer.exit_code == 1
    assert message in answer.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_release_has_to_be_named_when_several_exist(api: KubeApi, command: tuple[str, ...]) -> None:
    api.put("pods", *pods("r", "q"))
    answer = kube(*command)
    assert answer.exit_code == 1
    assert answer.output == "ryzanstein: namespace llm has several releases, --release NAME takes one: q, r\n"
    assert "q in llm" in kube("status", "--release", "q").output


def test_an_empty_namespace_is_said(api: KubeApi) -> None:
    assert "namespace llm has nothing of a release ryzanstein" in kube("doctor").output
