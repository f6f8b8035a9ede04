"""Canaries in Redis: gateways add what they compare, and the one with the lock judges."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

import msgspec

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.names.canary import Canary, CanaryOrder, Tally
from services.gateway.names.registry import LiveRoute
from services.gateway.names.route import ModelRoute, Target
from services.gateway.names.table import RouteTable
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_LOCK_S = 30
_KEPT_S = 7 * 24 * 3600  # life of a step's sums
_JUDGE = "canary"  # author of its changes of routes


class Canaries:
    """Starts, judges and stops canaries. Its methods for administrators raise :class:`RedisAwayError`."""

    def __init__(
        self,
        guard: RedisGuard,
        keys: RedisKeys,
        table: RouteTable,
        gateway_id: str,
        metrics: GatewayMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._keys, self._table = guard, keys, table
        self._id, self._metrics, self._now = gateway_id, metrics, now
        self._new: dict[tuple[str, str], Tally] = {}  # by route and model: sums that Redis does not have yet

    def compared(self, route: str, model: str, tally: Tally) -> None:
        """Add compared sequences of a route's mirror."""
        self._new.setdefault((route, model), Tally()).add(tally)

    async def all(self) -> dict[str, tuple[Canary, Tally]]:
        """All canaries by route, with the sums of their step."""
        canaries = await self._table.registry.read(self._keys.canaries, Canary)
        return {name: (canary, await self._tally(canary)) for name, canary in canaries.items()}

    async def start(self, name: str, order: CanaryOrder, by: str) -> Canary:
        """Mirror a route's requests to a model; raises :class:`ApiError` 409 while the route has another canary."""
        present = (await self.all()).get(name)
        if present and present[0].state == "running":
            message = f"The route `{name}` has a canary: `{present[0].model}`. Stop it first."
            raise ApiError(409, message, "invalid_request_error", "name", "conflict")
        live = (await self._table.registry.all()).get(name)
        base = live.route if live else self._table.routes.get(name) or ModelRoute(targets=(Target(model=name),))
        if [target.model for target in base.targets] == [order.model]:
            raise ApiError(400, f"`{order.model}` is the target of `{name}` already.", "invalid_request_error", "model")
        fields = msgspec.structs.asdict(order)
        canary = Canary(**fields, base=base, live_before=live is not None, version=0, by=by, at=self._now())
        made = await self._table.set(name, canary.route, by, live.version if live else 0)
        canary = msgspec.structs.replace(canary, version=made.version)
        await self._store(name, canary)
        return canary

    async def stop(self, name: str, by: str) -> Canary:
        """Give the route back its form before the canary; raises :class:`ApiError` 404 when none runs."""
        present = (await self.all()).get(name)
        if present is None or present[0].state != "running":
            message = f"The route `{name}` has no running canary."
            raise ApiError(404, message, "invalid_request_error", "name", "no_canary")
        return await self._end(name, present[0], "stopped", f"stopped by {by}", by)

    async def run(self) -> None:
        """Send sums and judge, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self._look()
            except RedisAwayError:
                continue  # the next look has the sums as well
            except ApiError as error:  # somebody changes the route at the same time
                log.info("canary: %s", error)

    async def _look(self) -> None:
        canaries = await self.all()
        running = {name: canary for name, (canary, _) in canaries.items() if canary.state == "running"}
        await self._send(running)
        client, lock = self._guard.client, self._keys.canary_lock
        if not running or not await self._guard.run(lambda: client.set(lock, self._id, nx=True, ex=_LOCK_S)):
            return
        try:
            live = await self._table.registry.all()
            for name, (canary, tally) in (await self.all()).items():  # read under the lock: another one has judged
                if canary.state == "running":
                    await self._judge(name, canary, tally, live.get(name))
        finally:
            await self._guard.run(lambda: client.delete(lock))

    async def _send(self, running: dict[str, Canary]) -> None:
        """Add the new sums to those in Redis; what no canary compares is dropped."""
        client = self._guard.client
        for (name, model), tally in list(self._new.items()):
            canary = running.get(name)
            if canary is not None and canary.model == model:
                key = self._keys.canary_tally(canary.version)

                async def add(key: str = key, tally: Tally = tally) -> None:
                    async with client.pipeline() as pipe:
                        for field, value in msgspec.structs.asdict(tally).items():
                            if value:
                                pipe.hincrbyfloat(key, field, value)
                        pipe.expire(key, _KEPT_S)
                        await pipe.execute()

                await self._guard.run(add)
            del self._new[name, model]

    async def _tally(self, canary: Canary) -> Tally:
        client, key = self._guard.client, self._keys.canary_tally(canary.version)
        sums = cast("dict[bytes, bytes]", await self._guard.run(lambda: client.hgetall(key)))
        known = {name.decode(): float(value) for name, value in sums.items()}
        return Tally(**{name: known[name] for name in Tally.__struct_fields__ if name in known})

    async def _judge(self, name: str, canary: Canary, tally: Tally, live: LiveRoute | None) -> None:
        further = msgspec.structs.replace(canary, step=canary.step + 1)
        if live and live.version > canary.version and live.by == _JUDGE and live.route == further.route:
            await self._promoted(name, further, live)  # the gateway that made this step has died over it
        elif live is None or live.version != canary.version:
            ended = msgspec.structs.replace(
                canary, state="stopped", reason="the route was changed meanwhile", at=self._now()
            )
            await self._store(name, ended)
        elif reason := tally.worse():
            await self._end(name, canary, "rolled_back", reason, _JUDGE)
        elif tally.sequences >= canary.sequences:
            await self._promoted(name, further, await self._table.set(name, further.route, _JUDGE, canary.version))

    async def _promoted(self, name: str, canary: Canary, live: LiveRoute) -> None:
        """Keep a step that the route has made."""
        state, reason = "promoted" if canary.weight == 1 else "running", f"{canary.sequences} sequences were no worse"
        fields = {"version": live.version, "state": state, "reason": reason, "at": self._now()}
        await self._store(name, msgspec.structs.replace(canary, **fields))
        self._decided(name, canary, "promoted" if state == "promoted" else "step", f"{canary.weight:.0%}: {reason}")

    async def _end(self, name: str, canary: Canary, state: str, reason: str, by: str) -> Canary:
        if canary.live_before:
            await self._table.set(name, canary.base, by, canary.version)
        else:
            await self._table.delete(name, by, canary.version)
        fields = {"state": state, "reason": reason, "at": self._now()}
        ended = msgspec.structs.replace(canary, **fields)
        await self._store(name, ended)
        self._decided(name, canary, state, reason)
        return ended

    async def _store(self, name: str, canary: Canary) -> None:
        client, text = self._guard.client, msgspec.json.encode(canary)
        await self._guard.run(lambda: client.hset(self._keys.canaries, name, text))

    def _decided(self, name: str, canary: Canary, decision: str, reason: str) -> None:
        self._metrics.canary_decisions.labels(name, decision).inc()
        level = logging.WARNING if decision == "rolled_back" else logging.INFO
        log.log(level, "canary %s of %s: %s, %s", canary.model, name, decision, reason, extra={"route": name})
