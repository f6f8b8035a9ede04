"""Canaries on two gateways with one Redis: a wrong model is rolled back, an equal one is promoted."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.gateway.names.canary import Canary, Tally
from services.gateway.names.registry import LiveRoute
from tests.integration.gateway.test_mirrors import scrape
from tests.integration.gateway.test_model_routes import (
    BIG,
    SMALL,
    TOKEN,
    RouteInstallation,
    installation,
    routes_file,
    to,
)


def token(prompt: Any, seed: int, position: int) -> int:
    return 10 + position


def wrong_token(prompt: Any, seed: int, position: int) -> int:
    """A model with wrong weights."""
    return 90 + position


async def canary(there: RouteInstallation, *arguments: str, fails: str = "") -> str:
    command = ["canary", *arguments, "--url", there.admin]
    ran = await asyncio.to_thread(CliRunner().invoke, app, command, env={"RYZANSTEIN_ADMIN_TOKEN": TOKEN})
    assert ran.exit_code == (1 if fails else 0), ran.output
    assert fails in ran.output
    return ran.output


async def until_shown(there: RouteInstallation, **expected: object) -> None:
    """Return once the only canary has these fields."""
    async with asyncio.timeout(60):
        while True:
            (state,) = json.loads(await canary(there, "status", "--json"))
            if {name: state[name] for name in expected} == expected:
                return


async def until_over(there: RouteInstallation, max_tokens: int) -> dict[str, Any]:
    """The canary after its end, under load. It is judged once a second, so that the rate has a limit."""
    while True:
        batch = [(there.first.http, there.second)[n % 2] for n in range(4)]
        body = {"model": "chat", "prompt": "hi", "temperature": 0, "max_tokens": max_tokens}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for http in batch))
        assert {answer.status_code for answer in answers} == {200}
        headers = {"authorization": f"Bearer {TOKEN}"}
        (state,) = (await there.second.get(f"{there.admin}/admin/canaries", headers=headers)).json()["canaries"]
        if state["state"] != "running":
            return dict(state)
        await asyncio.sleep(0.1)


async def test_wrong_model_is_rolled_back_within_its_first_mirrored_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with installation(tmp_path, routes_file=routes_file(tmp_path, chat=to(BIG))) as there:
        big, small = there.first.workers
        big.token, small.token = token, wrong_token
        before = await there.routes("list", "--json")
        await canary(there, "start", "chat", SMALL, "--share", "100%")
        await canary(there, "start", "chat", SMALL, fails="has a canary")
        state = await until_over(there, 4)
        assert (state["state"], state["step"]) == ("rolled_back", 0)
        assert "greedy answers differ after 0.0% of their tokens" in state["reason"]
        assert state["tally"]["sequences"] <= 200
        after = await there.routes("list", "--json")
        assert [route["route"] for route in json.loads(after)] == [route["route"] for route in json.loads(before)]
        assert "rolled_back" in await canary(there, "status")
        assert "canary small of chat: rolled_back" in caplog.text
        changes = json.loads(await there.routes("history", "chat", "--limit", "1", "--json"))
        assert changes[0]["by"] == "canary"
        assert not [s for s in small.submits if s.priority != 100], "no client got it"


async def test_equal_model_is_promoted_by_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "services.gateway.names.canaries")
    async with installation(tmp_path, routes_file=routes_file(tmp_path, chat=to(BIG))) as there:
        for worker in there.first.workers:
            worker.token = token
        await canary(there, "start", "chat", SMALL, "--share", "100%", "--sequences", "20")
        state = await until_over(there, 1)
        assert (state["state"], state["weight"]) == ("promoted", 1), state
        await there.answered_everywhere("chat", SMALL)
        changes = json.loads(await there.routes("history", "chat", "--json"))
        assert [change["by"] for change in changes] == ["canary", "canary", "canary", "token"]
        assert [change["route"]["targets"] for change in changes] == [
            [{"model": SMALL, "weight": 1}],
            [{"model": BIG, "weight": 50_000}, {"model": SMALL, "weight": 50_000}],
            [{"model": BIG, "weight": 75_000}, {"model": SMALL, "weight": 25_000}],
            [{"model": BIG, "weight": 100_000}],
        ]
        assert "canary small of chat: promoted" in caplog.text
        await canary(there, "stop", "chat", fails="no running canary")
        await canary(there, "start", "chat", SMALL, fails="is the target of")
        await canary(there, "start", "chat", BIG)
        await canary(there, "stop", "chat")
        await there.answered_everywhere("chat", SMALL)
        decided = [key for key in await scrape(there.first) if key[0] == "canary_decisions_total"]
        assert ("canary_decisions_total", "stopped", "chat") in decided


async def test_step_of_a_judge_that_died_is_taken_over_and_another_change_stops_the_canary(tmp_path: Path) -> None:
    async with installation(tmp_path, routes_file=routes_file(tmp_path, chat=to(BIG))) as there:
        await canary(there, "start", "chat", SMALL)
        redis = there.redis.client
        begun = msgspec.json.decode(redis.hget("rz:default:routes-canaries", "chat"), type=Canary)
        step = LiveRoute(route=msgspec.structs.replace(begun, step=1).route, version=2, by="canary", at=1)
        redis.set("rz:default:routes-version", 2)
        redis.hset("rz:default:routes", "chat", msgspec.json.encode(step))
        await until_shown(there, state="running", step=1, version=2)
        await there.routes("set", "chat", "--target", SMALL)
        await until_shown(there, state="stopped", step=1, reason="the route was changed meanwhile")


async def test_unreadable_canary_is_left_out_and_a_readable_one_is_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version may have more states."""
    async with installation(tmp_path, routes_file=routes_file(tmp_path, chat=to(BIG))) as there:
        there.redis.client.hset("rz:default:routes-canaries", "code", '{"state": "paused"}')
        await canary(there, "start", "chat", SMALL)
        await there.routes("set", "chat", "--target", SMALL)
        await until_shown(there, state="stopped", reason="the route was changed meanwhile")
        assert "'code' of rz:default:routes-canaries cannot be read and is left out" in caplog.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"failed": 5, "target_failed": 0}, "errors: 5.0% against 0.0%"),
        ({"failed": 5, "target_failed": 5}, ""),
        ({"refused": 9, "target_refused": 1}, "refusals by grammar: 9.0% against 1.0%"),
        ({"greedy": 50, "agreement": 10}, "greedy answers differ after 20.0% of their tokens"),
        ({"greedy": 50, "agreement": 30}, ""),
        ({"greedy": 10, "agreement": 0}, ""),
        ({"timed": 50, "pace_s": 1.0, "target_pace_s": 0.5}, "time between tokens: 20.0 ms against 10.0 ms"),
        ({"timed": 50, "pace_s": 0.6, "target_pace_s": 0.5}, ""),
        ({"timed": 50, "first_s": 250.0, "target_first_s": 50.0}, "first token: 5000.0 ms against 1000.0 ms"),
        ({"timed": 50, "first_s": 5.0, "target_first_s": 0.5}, ""),
    ],
)
def test_tally_names_the_comparison_that_is_worse(fields: dict[str, float], reason: str) -> None:
    assert Tally(sequences=100, **fields).worse() == reason
    assert Tally(sequences=19, **fields).worse() == ""
