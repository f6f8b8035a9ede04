"""The stores of the gateway for responses, their conversations, and the jobs that make them."""

from __future__ import annotations

from services.common.keys import RedisKeys
from services.gateway.http.responses.conversations import ConversationStore
from services.gateway.http.responses.kept import KeptObjects, StoreLimits
from services.gateway.http.responses.queue import BackgroundQueue
from services.gateway.http.responses.store import ResponseStore
from services.gateway.http.responses.turns import Turns
from services.gateway.tenants.redis_guard import RedisGuard


class KeptResponses:
    """The stores, over one Redis and under common limits."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, limits: StoreLimits) -> None:
        objects = KeptObjects(guard, keys, limits)
        self.store = ResponseStore(objects)
        self.conversations = ConversationStore(objects)
        self.queue = BackgroundQueue(self.store, guard, keys)
        self.turns = Turns(self.store, self.conversations)
