"""Interface of vLLM's processes to the engine; `async_llm.py` implements it, and needs vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from services.worker.engine.request import AdapterRef
from services.worker.vllm.images import CoreImage
from services.worker.vllm.kv_mirror import KvMirror
from services.worker.vllm.tasks import Task


class CoreError(Exception):
    """vLLM's processes did not start, or one of them has ended; the message is for the operator."""


class RequestFailedError(Exception):
    """vLLM could not compute one request, and continues with the others."""


@dataclass(frozen=True, slots=True)
class CoreLoss:
    """vLLM's processes cannot go on."""

    cause: Literal["exited", "stalled"]  # as for ranks of our own
    detail: str  # for people


@dataclass(frozen=True, slots=True)
class CoreStarted:
    """Facts about vLLM that are known after its start."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_tokens: int
    n_blocks: int  # 0: an encoder, which keeps no KV
    phases: Mapping[str, float]  # seconds, in order
    tasks: frozenset[str]  # vLLM's tasks of the model: generate, embed, classify, token_embed, ...
    sleeps: bool = False  # vLLM's sleep mode is on


@dataclass(frozen=True, slots=True)
class CoreStep:
    """Statistics of one step."""

    at: float  # `time.monotonic` when its outputs were made
    running: int
    waiting: int
    kv_usage: float  # share of the blocks that running requests hold
    preemptions: int


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request in vLLM's terms."""

    request_id: str
    token_ids: Sequence[int]
    arguments: Mapping[str, Any]  # arguments of SamplingParams; empty unless it generates
    priority: int
    cache_salt: str
    task: Task
    second_from: int  # position of the second of two texts; 0: one text
    adapter: AdapterRef | None = None  # loaded before the first output is read
    images: Sequence[CoreImage] = ()  # images of the prompt, in order


class Core(Protocol):
    """vLLM's processes: one that schedules, and its ranks."""

    on_step: Callable[[CoreStep], None]
    on_phase: Callable[[str], None]  # gets the phase of the start, for people

    @property
    def signs(self) -> int:
        """Grows with every step and image, and within a step while the processes use CPU time."""

    async def start(self, mirror: KvMirror) -> CoreStarted:
        """Start the processes, whose cache `mirror` follows. Raises CoreError."""

    def add(self, request: CoreRequest) -> AsyncGenerator[Any, None]:
        """Check a request and return its outputs, which cancel it when they are closed. Raises InvalidRequestError.

        The outputs raise RequestFailedError, and CoreError once the processes are lost.
        """

    async def load_adapter(self, digest: str, folder: str) -> None:
        """Load an adapter into all ranks. Raises RequestFailedError if it cannot be, CoreError."""

    async def unload_adapter(self, digest: str) -> None:
        """Remove an adapter that no request uses from all ranks. Raises CoreError."""

    async def sleep(self, level: int) -> None:
        """Give weights and KV back; level 2 without copies of the weights. Raises CoreError."""

    async def wake(self) -> None:
        """Bring weights and KV back. Raises CoreError."""

    def kill(self) -> None:
        """End all processes at once; `wait_lost` returns."""

    async def wait_lost(self) -> CoreLoss:
        """Wait until a process has ended, or hangs."""

    async def stop(self) -> None:
        """End all processes."""
