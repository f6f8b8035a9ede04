"""Routes as data, and the choice of their targets."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.names.picking import Origin, pick
from services.gateway.names.route import ModelRoute, Target, read_route, read_routes

NAMES = ("a", "b", "c", "d")
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100), min_size=1).filter(lambda w: any(w.values()))


def targets(weights: dict[str, int]) -> list[Target]:
    return [Target(model=name, weight=weight) for name, weight in weights.items()]


@given(WEIGHTS, st.text())
def test_pick_depends_on_its_inputs_alone_and_never_has_weight_0(weights: dict[str, int], key: str) -> None:
    chosen = pick("route", targets(weights), key)
    assert chosen == pick("route", list(reversed(targets(weights))), key)
    assert chosen.weight > 0


@given(WEIGHTS, st.text())
def test_pick_of_a_key_moves_only_to_a_target_that_gains_weight(weights: dict[str, int], key: str) -> None:
    grown = weights | {"a": weights.get("a", 0) + 50}
    before, after = (pick("route", targets(each), key).model for each in (weights, grown))
    assert after in (before, "a")


def test_shares_of_keys_are_those_of_the_weights() -> None:
    weights = {"a": 90, "b": 9, "c": 1, "d": 0}
    counts = Counter(pick("route", targets(weights), f"session {n}").model for n in range(20_000))
    assert counts["d"] == 0
    for name, weight in weights.items():
        expected = 200 * weight
        assert abs(counts[name] - expected) <= 5 * expected**0.5, (name, counts[name])


def test_targets_of_two_routes_are_independent() -> None:
    even = targets({"a": 1, "b": 1})
    same = sum(pick("one", even, str(n)) == pick("two", even, str(n)) for n in range(1000))
    assert 400 < same < 600


@pytest.mark.parametrize(
    ("sticky", "other", "alike"),
    [
        ("session", Origin("t", "s", "2"), True),
        ("session", Origin("t", "", "2"), False),
        ("session", Origin("u", "s", "1"), False),
        ("tenant", Origin("t", "z", "2"), True),
        ("tenant", Origin("u", "s", "1"), False),
        ("none", Origin("t", "s", "2"), False),
    ],
)
def test_sticky_says_which_requests_have_one_target(sticky: str, other: Origin, alike: bool) -> None:
    route = ModelRoute(targets=(Target(model="a"),), sticky=sticky)
    assert (Origin("t", "s", "1").key(route) == other.key(route)) is alike


def test_tenant_stickiness_falls_to_the_session_where_there_are_no_tenants() -> None:
    route = ModelRoute(targets=(Target(model="a"),), sticky="tenant")
    assert Origin("", "s", "1").key(route) == Origin("", "s", "2").key(route) != Origin("", "", "1").key(route)


WRONG = [
    ({}, "missing required field `targets`"),
    ({"targets": []}, r"length >= 1 - at `\$.targets`"),
    ({"targets": [{"model": "a", "weight": 0}]}, "needs a `weight` above 0"),
    ({"targets": [{"model": "a", "weight": -1}]}, r">= 0 - at `\$.targets\[0\].weight`"),
    ({"targets": [{"model": "a", "weight": 0.5}]}, r"Expected `int`"),
    ({"targets": [{"model": "a"}, {"model": "a"}]}, "`targets` has the model `a` twice"),
    ({"targets": [{"model": " a"}]}, "a `model` of `targets`: expected 1 to 256 printable"),
    ({"targets": [{"model": "a", "wieght": 1}]}, r"unknown field `wieght` - at `\$.targets\[0\]`"),
    ({"targets": [{"model": "a"}], "stick": "none"}, "unknown field `stick`"),
    ({"targets": [{"model": "a"}], "sticky": "user"}, r"Invalid enum value 'user' - at `\$.sticky`"),
    ({"targets": [{"model": "a"}], "fallbacks": [{"model": "b", "when": ["busy"]}]}, "Invalid enum value 'busy'"),
    ({"targets": [{"model": "a"}], "fallbacks": [{"model": "b", "when": []}]}, "length >= 1"),
    ({"targets": [{"model": "a"}], "mirror": {"model": "b", "share": 0}}, r"at `\$.mirror.share`"),
    (
        {"targets": [{"model": "a"}], "mirror": {"model": "b", "share": 1, "n": 1}},
        r"unknown field `n` - at `\$.mirror`",
    ),
    ({"targets": [{"model": "a"}], "wait_s": 0}, r"at `\$.wait_s`"),
]


@pytest.mark.parametrize(("raw", "message"), WRONG)
def test_wrong_route_is_refused_with_its_field(raw: object, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        read_route(raw)
    with pytest.raises(ValueError, match="route `chat`: "):
        read_routes(json.dumps({"routes": {"chat": raw}}).encode())


def test_route_of_a_newer_gateway_is_read_without_its_new_fields() -> None:
    text = b'{"targets": [{"model": "a", "weight": 2, "colour": 1}], "sticky": "none", "moon": {}}'
    route = msgspec.json.decode(text, type=ModelRoute)
    assert route == ModelRoute(targets=(Target(model="a", weight=2),), sticky="none")


@pytest.mark.parametrize(
    ("external", "fallbacks", "message"),
    [
        ({"base_url": "ftp://a"}, [], r"at `\$.externals\[...\].base_url`"),
        ({"base_url": "https://user@a/v1"}, [], r"at `\$.externals\[...\].base_url`"),
        ({"base_url": "https://a/v1", "key_file": "f", "key_env": "e"}, [], "give one of them"),
        ({"base_url": "https://a/v1"}, [{"model": "m", "external": "other"}], "`other` is not configured; .*`api`"),
        ({"base_url": "https://a/v1"}, [{"model": "m", "external": "api"}, {"model": "b"}], "come after all others"),
    ],
)
def test_wrong_external_api_is_refused(external: object, fallbacks: object, message: str) -> None:
    routes = {"chat": {"targets": [{"model": "a"}], "fallbacks": fallbacks}}
    with pytest.raises(ValueError, match=message):
        read_routes(json.dumps({"routes": routes, "externals": {"api": external}}).encode())
