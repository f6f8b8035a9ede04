"""Asks gateways, and compares what the usage API says with what the answers said."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import httpx

from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MODEL
from tests.integration.gateway.gateways import GatewayStack

USAGE = "/v1/organization/usage/completions"
COSTS = "/v1/organization/costs"
EMBEDDED = "/v1/organization/usage/embeddings"
COUNTED = ("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
KEYS = [
    {"key_sha256": digest_of("root"), "name": "root", "admin": True},
    {"key_sha256": digest_of("a1"), "name": "acme"},
    {"key_sha256": digest_of("a2"), "name": "acme"},
    {"key_sha256": digest_of("b1"), "name": "bolt"},
]
CACHED = 2  # tokens of each prompt; Messages does not say how many
TENANCY = {"tenancy": True, "api_keys": json.dumps(KEYS)}


def authorized(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def read(http: httpx.AsyncClient, path: str = USAGE, key: str = "root", **query: Any) -> Any:
    """A report of the last two hours by minute, all pages."""
    fields = {"start_time": int(time.time()) - 7200, "bucket_width": "1m", "limit": 1440} | query
    answer = await http.get(path, params=fields, headers=authorized(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


def results(report: Any) -> list[dict[str, Any]]:
    return [result for bucket in report["data"] for result in bucket["results"]]


def sums(report: Any, *group: str) -> dict[Any, Counter[str]]:
    """The counters by what the report is grouped by."""
    summed: dict[Any, Counter[str]] = {}
    for result in results(report):
        of = tuple(result[name] for name in group)
        summed.setdefault(of, Counter()).update({name: result.get(name, 0) for name in COUNTED})
    return summed


def usage_of(usage: dict[str, Any]) -> dict[str, int]:
    """The counters of one answer, from its `usage` in any dialect."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return {
        "input_tokens": usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "input_cached_tokens": details.get("cached_tokens", 0),
        "num_model_requests": 1,
    }


class Bill:
    """The sums of the answers' `usage`, by key."""

    def __init__(self) -> None:
        self.of: dict[str, Counter[str]] = {}

    def add(self, key: str, usage: dict[str, Any]) -> None:
        self.of.setdefault(key, Counter()).update(usage_of(usage))


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The quick brown fox", "max_tokens": 5}),
    ("/v1/completions", {"prompt": ["one", "and two"], "n": 2, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ho"}], "max_tokens": 3, "n": 3}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 7}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 8, "model": MODEL}),
]


def last_usage(streamed: str) -> dict[str, Any]:
    """The usage that the last event with one has; Messages gives the prompt's part in its first event."""
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
    whole: dict[str, Any] = {}
    for event in events:
        for part in (event, event.get("response") or {}, event.get("message") or {}):
            whole |= {name: value for name, value in (part.get("usage") or {}).items() if value is not None}
    return whole


async def ask(http: httpx.AsyncClient, key: str, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    fields = body | ({"stream": True} | options if stream else {})
    answer = await http.post(path, json=fields, headers=authorized(key))
    assert answer.status_code == 200, answer.text
    usage = last_usage(answer.text) if stream else answer.json()["usage"]
    unsaid = {"prompt_tokens_details": {"cached_tokens": CACHED}} if path.endswith("/v1/messages") else {}
    return usage | unsaid


def waiting(stack: GatewayStack) -> float:
    """Tokens whose counts Redis does not have."""
    return stack.gateway.metrics.registry.get_sample_value("ryzanstein_gateway_usage_waiting_tokens") or 0
