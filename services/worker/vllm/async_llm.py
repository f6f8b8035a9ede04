"""Runs vLLM's AsyncLLM: processes, outputs, statistics and KV events. It and `inputs.py` import vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio
from vllm import SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from services.common.tasks import end_tasks
from services.worker.engine.errors import InvalidRequestError
from services.worker.vllm.arguments import DEFAULT_CPU_KV_TOKENS, check_device
from services.worker.vllm.core import (
    CoreError,
    CoreLoss,
    CoreRequest,
    CoreStarted,
    CoreStep,
    RequestFailedError,
)
from services.worker.vllm.family import families, kill, reap
from services.worker.vllm.inputs import input_of
from services.worker.vllm.kv_mirror import KvMirror
from services.worker.vllm.nodes import NodeRendezvous
from services.worker.vllm.orphan_reaper import OrphanReaper
from services.worker.vllm.outputs import n_blocks, vector_size
from services.worker.vllm.progress import StartClock
from services.worker.vllm.stall import CPU_LIMITS, LIMITS, wait_stalled

_LOOK_S = 0.2  # how often a start looks for new processes
_STATUS_LOOKS = 5
_CACHE_SIZES = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
_WIDEST = 4  # bytes of a float32, the widest number of a KV cache
_WITHOUT_COPIES = 2  # level of sleep after which weights are read again
_STOP_S = 2.0  # seconds for vLLM's processes to end by themselves

log = logging.getLogger(__name__)


def configure(arguments: Mapping[str, Any], kv_tokens: int, *, headless: bool = False) -> Any:
    """vLLM's configuration. Raises ValueError or TypeError in vLLM's own words."""
    check_device(arguments, current_platform.device_type)
    config = AsyncEngineArgs(**arguments).create_engine_config(headless=headless)
    on_cpu = config.device_config.device_type == "cpu"
    if on_cpu and not kv_tokens and not _CACHE_SIZES & arguments.keys():
        kv_tokens = DEFAULT_CPU_KV_TOKENS
    if kv_tokens:
        cache, served, ranks = config.cache_config, config.model_config, config.parallel_config
        cache.num_gpu_blocks_override = -(-kv_tokens // cache.block_size)
        if on_cpu:  # without it, vLLM takes a share of the machine's memory
            numbers = 2 * served.get_num_layers(ranks) * served.get_num_kv_heads(ranks) * served.get_head_size()
            cache.kv_cache_memory_bytes = cache.num_gpu_blocks_override * cache.block_size * numbers * _WIDEST
    return config


def run_follower(arguments: Mapping[str, Any], kv_tokens: int) -> None:
    """Run the ranks of a machine that follows a leader, as `vllm serve --headless` does, until one of them ends."""
    executor = MultiprocExecutor(configure(arguments, kv_tokens, headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


class AsyncCore:
    """Implements Core."""

    def __init__(
        self, arguments: Mapping[str, Any], kv_tokens: int, clock: StartClock, rendezvous: NodeRendezvous | None = None
    ) -> None:
        """`rendezvous`: of the machines that follow this one."""
        self.on_step: Callable[[CoreStep], None] = lambda _: None
        self.on_phase: Callable[[str], None] = lambda _: None
        self._arguments, self._kv_tokens, self._clock = arguments, kv_tokens, clock
        self._rendezvous = rendezvous
        self._llm: AsyncLLM | None = None
        self._events: asyncio.Task[None] | None = None
        self._processes: list[BaseProcess] = []  # our children: the process that schedules
        self._family: list[psutil.Process] = []  # they and theirs: its ranks
        self._n_steps = self._n_open = 0  # steps done, requests that vLLM has
        self._n_signs = 0  # signs of life, seen from outside while requests run
        self._n_images = 0  # prepared for vLLM
        self._reaper: OrphanReaper | None = None
        self._sleep_level = 0  # level of the last sleep
        self._loras: dict[str, LoRARequest] = {}  # loaded adapters by digest
        self._lora_ids = itertools.count(1)

    @property
    def signs(self) -> int:
        """Grows with every step and image, and within a step while the processes use CPU time."""
        return self._n_steps + self._n_signs + self._n_images

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self, mirror: KvMirror) -> CoreStarted:
        """Start the processes, whose cache `mirror` follows. Raises CoreError."""
        if self._rendezvous is not None:
            await self._rendezvous.gather(self.on_phase)
        self._reaper = OrphanReaper()
        folder = tempfile.TemporaryDirectory(prefix="vllm-")
        endpoint = f"ipc://{Path(folder.name) / 'kv-events'}"
        self._events = asyncio.create_task(_follow_events(endpoint, mirror, folder), name="kv events")
        before = set(multiprocessing.active_children())
        with self._clock.following(self.on_phase):
            opening = asyncio.create_task(asyncio.to_thread(self._open, endpoint))
            try:
                while not opening.done():
                    await asyncio.wait([opening], timeout=_LOOK_S)
                    self._processes = [
                        process for process in multiprocessing.active_children() if process not in before
                    ]
                    self._reaper.watch(process.ident or 0 for process in self._processes)
                llm = self._llm = opening.result()
            except asyncio.CancelledError:
                await _abandon(opening, before)
                raise
            except Exception as error:  # vLLM raises any kind
                await self.stop()
                raise CoreError(f"{error}" or type(error).__name__) from error
            self._family = families(self._processes)
            self._reaper.watch(process.pid for process in self._family)
            tasks = await llm.get_supported_tasks()  # also begins to read outputs
        config = llm.vllm_config
        return CoreStarted(
            vocab_size=config.model_config.get_vocab_size(),
            hidden_size=vector_size(config.model_config),
            max_model_len=config.model_config.max_model_len,
            block_tokens=config.cache_config.block_size,
            n_blocks=n_blocks(config),
            phases=self._clock.phases(),
            tasks=frozenset(tasks),
            sleeps=config.model_config.enable_sleep_mode,
        )

    def _open(self, endpoint: str) -> AsyncLLM:
        """Runs in a thread, because it waits for the weights."""
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        config = configure({**self._arguments, "kv_events_config": events}, self._kv_tokens)
        # vLLM's own loggers would count once more what our metrics count.
        return AsyncLLM.from_vllm_config(config, stat_loggers=[self._observer], disable_log_stats=True)

    def _observer(self, config: Any, index: int) -> StatLoggerBase:
        return _StepObserver(config, self._stepped)

    def _stepped(self, step: CoreStep) -> None:
        self._n_steps += 1
        self.on_step(step)

    async def load_adapter(self, digest: str, folder: str) -> None:
        """Load an adapter into all ranks. Raises RequestFailedError if it cannot be, CoreError."""
        assert self._llm is not None, "an engine that loads adapters has started"
        if digest in self._loras:  # since before a sleep, which may have emptied it
            await self.unload_adapter(digest)
        lora = LoRARequest(digest, next(self._lora_ids), folder)  # named by the digest: versions and their KV differ
        with self._working():
            try:
                await self._llm.add_lora(lora)
            except EngineDeadError as error:
                raise CoreError(str(error)) from error
            except Exception as error:  # vLLM raises any kind
                raise RequestFailedError(f"{folder}: vLLM cannot load it: {error}") from error
        self._loras[digest] = lora

    async def unload_adapter(self, digest: str) -> None:
        """Remove an adapter that no request uses from all ranks. Raises CoreError."""
        assert self._llm is not None, "an engine that unloads adapters has started"
        with self._watched():
            await self._llm.remove_lora(self._loras.pop(digest).lora_int_id)

    async def sleep(self, level: int) -> None:
        """Give weights and KV back; level 2 without copies of the weights. Raises CoreError."""
        assert self._llm is not None, "an engine that sleeps has started"
        self._sleep_level = level
        with self._watched():
            await self._llm.sleep(level)

    async def wake(self) -> None:
        """Bring weights and KV back. Raises CoreError."""
        assert self._llm is not None, "an engine that wakes has started"
        with self._watched():
            if self._sleep_level == _WITHOUT_COPIES:
                await self._llm.wake_up(tags=["weights"])
                await self._llm.collective_rpc("reload_weights")
                await self._llm.wake_up(tags=["kv_cache"])
            else:
                await self._llm.wake_up()

    def kill(self) -> None:
        """End all processes at once; `wait_lost` returns."""
        kill(self._processes, self._family)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Work for which the processes have to show progress, with our errors."""
        with self._working():
            try:
                yield
            except Exception as error:  # vLLM raises any kind
                raise CoreError(f"{error}" or type(error).__name__) from error

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Work for which the processes have to show progress."""
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1

    async def wait_lost(self) -> CoreLoss:
        """Wait until a process has ended, or hangs."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for process in self._processes:
            loop.add_reader(process.sentinel, ended.set)
        ending = asyncio.create_task(ended.wait())
        pids = [process.pid for process in self._family]
        assert self._llm is not None
        limits = CPU_LIMITS if self._llm.vllm_config.device_config.device_type == "cpu" else LIMITS
        working = wait_stalled(pids, lambda: self._n_steps, lambda: self._n_open > 0, self._saw, limits)
        stalling = asyncio.create_task(working)
        parting = [asyncio.create_task(self._rendezvous.wait_lost())] if self._rendezvous else []
        try:
            await asyncio.wait([ending, stalling, *parting], return_when=asyncio.FIRST_COMPLETED)
            if ended.is_set():
                return CoreLoss("exited", await _ends(self._processes))
            kill(self._processes, self._family)  # stopped or waiting processes do not end by themselves
            return (
                CoreLoss("stalled", stalling.result()) if stalling.done() else CoreLoss("exited", parting[0].result())
            )
        finally:
            for process in self._processes:
                loop.remove_reader(process.sentinel)
            await end_tasks([ending, stalling, *parting])

    def _saw(self, n_signs: int) -> None:
        self._n_signs = n_signs

    async def stop(self) -> None:
        """End all processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, _STOP_S)
        kill(self._processes, self._family)
        await asyncio.to_thread(reap, self._processes, self._family, _STOP_S)
        self._processes, self._family = [], []
        self._loras.clear()
        if self._rendezvous is not None:
            self._rendezvous.dismiss()
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None
        if self._events is not None:
            await end_tasks([self._events])
            self._events = None

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, request: CoreRequest) -> AsyncGenerator[Any, None]:
        """Check a request and return its outputs. Raises InvalidRequestError."""
        assert self._llm is not None, "an engine that takes requests has started"
        if request.task != "generate":
            return self._outputs(request, partial(self._llm.encode, pooling_params=self._pooling(request)))
        params = self._params(self._llm, request.arguments)
        return self._outputs(request, partial(self._llm.generate, sampling_params=params))

    async def _outputs(
        self, request: CoreRequest, begin: Callable[..., AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs with our errors. The request begins with the first read, once its adapter is loaded."""
        stream = begin(
            await input_of(self._llm, request, self._prepared),
            request_id=request.request_id,
            lora_request=self._loras[request.adapter.digest] if request.adapter else None,
            priority=request.priority,
        )
        with self._working():
            try:
                async for output in stream:
                    yield output
            except EngineDeadError as error:
                raise CoreError(str(error)) from error
            except VLLMError as error:
                raise RequestFailedError(str(error) or type(error).__name__) from error

    def _prepared(self) -> None:
        self._n_images += 1

    def _pooling(self, request: CoreRequest) -> PoolingParams:
        """Gateways make scores of a classifier's numbers; models that distinguish texts get the second one's place."""
        assert self._llm is not None, "an engine that takes requests has started"
        kinds = getattr(self._llm.vllm_config.model_config.hf_config, "type_vocab_size", 1)
        second = {"compressed_token_type_ids": request.second_from} if request.second_from and kinds > 1 else None
        activation = False if request.task == "classify" else None
        return PoolingParams(task=request.task, use_activation=activation, extra_kwargs=second)

    def _params(self, llm: AsyncLLM, arguments: Mapping[str, Any]) -> SamplingParams:
        structured = arguments["structured_outputs"]
        chosen = {**arguments, "structured_outputs": StructuredOutputsParams(**structured) if structured else None}
        try:
            params = SamplingParams(**chosen, detokenize=False, output_kind=RequestOutputKind.DELTA)
            config = llm.vllm_config
            # `generate` checks again, but only once its caller has gone on.
            params.verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, llm.tokenizer
            )
        except (VLLMError, ValueError) as error:
            field = "grammar" if structured else getattr(error, "parameter", None)
            raise InvalidRequestError(f"sampling.{field}" if field else "sampling", str(error)) from error
        return params


class _StepObserver(StatLoggerBase):  # type: ignore[misc]
    """Receives vLLM's statistics after each step's outputs are with their requests."""

    def __init__(self, config: Any, on_step: Callable[[CoreStep], None]) -> None:
        self._on_step = on_step

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        preemptions = iteration_stats.num_preempted_reqs if iteration_stats else 0
        running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        self._on_step(CoreStep(time.monotonic(), running, waiting, scheduler_stats.kv_cache_usage, preemptions))

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


async def _follow_events(endpoint: str, mirror: KvMirror, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Apply KV events to `mirror`. A lost message makes everything before it unknown."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder)
        context = stack.enter_context(zmq.asyncio.Context())
        socket = stack.enter_context(context.socket(zmq.SUB))
        socket.linger = 0
        socket.set_hwm(0)
        socket.subscribe(b"")
        socket.connect(endpoint)
        expected = 0
        while True:
            _, number, payload = await socket.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq != expected:
                log.warning("%d messages of KV events were lost", seq - expected)
                mirror.clear()
            expected = seq + 1
            mirror.apply(msgspec.msgpack.decode(payload)[1])


async def _abandon(opening: asyncio.Task[AsyncLLM], before: set[BaseProcess]) -> None:
    """End a start: it waits for its processes, so they are killed until it gives up."""
    while not opening.done():
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        await asyncio.wait([opening], timeout=_LOOK_S)
    if opening.exception() is None:
        await asyncio.to_thread(opening.result().shutdown)


async def _ends(processes: list[BaseProcess]) -> str:
    """Which processes have ended, and how. A thread of vLLM may have waited for one and not stored its status yet."""
    for _ in range(_STATUS_LOOKS):
        if ends := [_how(process) for process in processes if process.exitcode is not None]:
            return ", ".join(ends)
        await asyncio.sleep(_LOOK_S)
    return "one of its processes ended"


def _how(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"{process.name} ended by {signal.Signals(-code).name}" if code < 0 else f"{process.name} ended ({code})"
