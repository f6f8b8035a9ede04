"""Runs a module and counts its gRPC messages in a file: `python -m bench.fleet.counted FILE MODULE`."""

from __future__ import annotations

import mmap
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

_SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages sent and received, and their bytes, which are counted before compression and encryption."""

    count: int = 0
    size: int = 0

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.count + other.count, self.size + other.size)

    def __sub__(self, other: Messages) -> Messages:
        return Messages(self.count - other.count, self.size - other.size)

    def write(self, file: Path) -> None:
        """Start a file of counts."""
        file.write_bytes(b"".join(number.to_bytes(8, sys.byteorder) for number in (self.count, self.size)))

    @classmethod
    def read(cls, file: Path) -> Messages:
        """The counts of a file."""
        return cls(*memoryview(file.read_bytes()).cast("Q"))


class MessageCounter:
    """Counts into a file, which a killed process leaves behind and its successor continues."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._numbers = memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")

    def install(self) -> None:
        """Count the messages of all asyncio channels and servers that the process makes from now on."""
        for name in ("insecure_channel", "secure_channel"):
            setattr(grpc.aio, name, self._channels(getattr(grpc.aio, name)))
        for name in (f"{shape}_rpc_method_handler" for shape in _SHAPES):
            setattr(grpc, name, self._methods(getattr(grpc, name)))

    def _channels(self, opened: Callable[..., grpc.aio.Channel]) -> Callable[..., grpc.aio.Channel]:
        def counting(*arguments: Any, **options: Any) -> grpc.aio.Channel:
            channel = opened(*arguments, **options)
            for shape in _SHAPES:
                setattr(channel, shape, self._methods(getattr(channel, shape)))
            return channel

        return counting

    def _methods(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A client's or a server's methods are made with their converters by name: request_serializer and so on."""

        def counting(*arguments: Any, **options: Any) -> Any:
            converters = {name: self._converter(of) for name, of in options.items() if name.endswith("serializer")}
            return method(*arguments, **(options | converters))

        return counting

    def _converter(self, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Of a message to bytes, or of bytes to a message."""
        numbers = self._numbers

        def counting(value: Any) -> Any:
            converted = convert(value)
            numbers[0] += 1
            numbers[1] += len(value if isinstance(value, bytes) else converted)
            return converted

        return counting


if __name__ == "__main__":
    _, counts, module = sys.argv
    MessageCounter(Path(counts)).install()
    sys.argv[1:] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)
