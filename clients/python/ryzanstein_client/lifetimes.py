"""Resources that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End what still runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing(ABC):
    """:class:`Closing` for asyncio."""

    @abstractmethod
    async def aclose(self) -> None:
        """End what still runs."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
