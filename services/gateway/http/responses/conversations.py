"""Conversations: items that turns of several clients share, kept as responses are."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.kept import ChangedError, KeptObjects, digest_of, off_loop
from services.gateway.http.responses.store import Past

_ID = re.compile(r"conv_[0-9a-f]{48}")
_TRIES = 20  # changes by others that a change survives


class KeptConversation(msgspec.Struct, kw_only=True):
    """A conversation as it is kept."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: list[dict[str, Any]]

    def described(self) -> dict[str, Any]:
        """The object that clients get."""
        return {
            "id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata,
        }  # fmt: skip


def _missing(conversation_id: str) -> ApiError:
    message = (
        f"Conversation with id `{conversation_id[:100]}` not found: it was never made, has expired or was deleted."
    )
    return ApiError(404, message, "invalid_request_error", "conversation", "conversation_not_found")


def missing_item(item_id: str) -> ApiError:
    """404: the conversation does not have the item."""
    message = f"The conversation has no item `{item_id[:100]}`."
    return ApiError(404, message, "invalid_request_error", "item_id", "item_not_found")


class ConversationStore:
    """The conversations of all tenants. All methods raise :class:`ApiError` 503 while Redis is away."""

    def __init__(self, objects: KeptObjects) -> None:
        self._objects = objects

    async def create(self, tenant: str, metadata: dict[str, str], items: list[dict[str, Any]]) -> KeptConversation:
        """Make a conversation; raises 400 when it is too large."""
        name = f"conv_{secrets.token_hex(24)}"
        made = KeptConversation(id=name, created_at=int(time.time()), metadata=metadata, items=items)
        await self._write(tenant, made, "")
        return made

    async def get(self, tenant: str, conversation_id: str) -> KeptConversation:
        """A conversation; raises 404."""
        return (await self._read(tenant, conversation_id))[0]

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation with its items; raises 404."""
        if not _ID.fullmatch(conversation_id) or not await self._objects.forget(tenant, conversation_id):
            raise _missing(conversation_id)

    async def change(
        self, tenant: str, conversation_id: str, edit: Callable[[KeptConversation], None]
    ) -> KeptConversation:
        """Edit a conversation; raises 404, 409.

        `edit` is called again when others have changed the conversation meanwhile.
        """
        for _ in range(_TRIES):
            conversation, digest = await self._read(tenant, conversation_id)
            edit(conversation)
            try:
                await self._write(tenant, conversation, digest)
            except ChangedError:
                continue
            return conversation
        message = "Too many requests change this conversation at once. Send the request again."
        raise ApiError(409, message, "conflict_error", "conversation", "conversation_busy", retry_after_s=1)

    async def add(
        self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]], *, again: bool = False
    ) -> KeptConversation:
        """Add items at the end; raises 404 and 409.

        `again`: leave out items that the conversation has; else they raise 400.
        """

        def edit(conversation: KeptConversation) -> None:
            present = {item["id"] for item in conversation.items}
            for item in items:
                if item["id"] not in present:
                    conversation.items.append(item)
                elif not again:
                    message = f"The conversation has an item `{item['id'][:100]}` already."
                    raise invalid(message, "items", "duplicate_item")
                present.add(item["id"])

        return await self.change(tenant, conversation_id, edit)

    async def past(self, tenant: str, conversation_id: str) -> Past:
        """The conversation before a turn, which lives on; raises 404."""
        if not _ID.fullmatch(conversation_id):
            raise _missing(conversation_id)
        (data,) = await self._objects.use(tenant, [conversation_id])
        if data is None:
            raise _missing(conversation_id)
        items = (await _decoded(data)).items
        return Past(items, [], len(data), conversation_id, conversation=conversation_id)

    async def listed(self, tenant: str, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """The last used conversations, or those behind `after`, and whether there are more."""
        return await self._objects.listed(tenant, "conv_", after, limit, _brief)

    async def _read(self, tenant: str, conversation_id: str) -> tuple[KeptConversation, str]:
        data = await self._objects.get(tenant, conversation_id) if _ID.fullmatch(conversation_id) else None
        if data is None:
            raise _missing(conversation_id)
        return await _decoded(data), digest_of(data)

    async def _write(self, tenant: str, conversation: KeptConversation, digest: str) -> None:
        data, limit = msgspec.json.encode(conversation), self._objects.limits.conversation_bytes
        if len(data) > limit:
            message = f"A conversation may have at most {limit} bytes, this one would have {len(data)}."
            raise invalid(message, "items", "conversation_too_long")
        await self._objects.keep(tenant, conversation.id, data, digest)


async def _brief(data: bytes) -> dict[str, Any]:
    return (await _decoded(data)).described()


async def _decoded(data: bytes) -> KeptConversation:
    return await off_loop(len(data), lambda: msgspec.json.decode(data, type=KeptConversation))
