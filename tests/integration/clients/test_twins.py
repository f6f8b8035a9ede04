"""A call is the same in every client that has it: parameters, result, documentation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ryzanstein_client import AsyncClient, Client
from ryzanstein_client.grpc import AsyncGrpcClient, GrpcClient
from ryzanstein_client.websocket import WebSocketClient

_ENDS = ("close", "aclose")


def surface(client: type[Any]) -> dict[str, tuple[inspect.Signature, str | None]]:
    """Each call of a client but the one that ends it, in the words of one that blocks."""
    return {
        name: (_blocking(inspect.signature(method)), inspect.getdoc(method))
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_") and name not in _ENDS
    }


def _blocking(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(return_annotation=signature.return_annotation.removeprefix("Async"))


@pytest.mark.parametrize(("blocking", "other"), [(Client, AsyncClient), (GrpcClient, AsyncGrpcClient)])
def test_a_transports_two_clients_have_the_same_calls(blocking: type[Any], other: type[Any]) -> None:
    assert surface(blocking) == surface(other)


@pytest.mark.parametrize("other", [GrpcClient, WebSocketClient])
def test_other_transports_have_the_same_calls_as_rest(other: type[Any]) -> None:
    calls, rest = surface(other), surface(Client)
    assert calls == {name: rest[name] for name in calls}
    assert {"stream_completion", "stream_chat"} <= calls.keys()
