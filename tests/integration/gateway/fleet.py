"""Real gRPC workers in the test process, with faults on demand.

A worker's tokens are a function of (prompt, seed, position) only, as the engine's are: a resumed stream can be
compared with an undisturbed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import grpc
import grpc.aio
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc
from tokenizers import Tokenizer

from services.common.ports import free_port
from services.common.rpc import bind, new_server
from tests.unit.gateway.made_tokenizers import byte_level

MODEL = "test-model"
MAX_LEN = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 1
REFUSALS = {
    "refuse": worker_pb2.RequestError.CODE_TOO_LONG,
    "mistake": worker_pb2.RequestError.CODE_INTERNAL,
    "astray": worker_pb2.RequestError.CODE_GRAMMAR,
}

HANDOFFS = {
    "handoff": worker_pb2.Handoff.REASON_DRAIN,
    "ranks_lost": worker_pb2.Handoff.REASON_RANKS_LOST,
    "ranks_died": worker_pb2.Handoff.REASON_RANKS_LOST,
    "failed": worker_pb2.Handoff.REASON_FAILED,
}

TokenFunction = Callable[[Sequence[int], int, int], int]
Out = asyncio.Queue[worker_pb2.Output | worker_pb2.Progress | worker_pb2.StepOutputs | None]
BEAT_S = 0.2


def scripted_token(prompt: Sequence[int], seed: int, position: int) -> int:
    """An ordinary token that depends on everything it may depend on; never a special one."""
    key = f"{list(prompt)}|{seed}|{position}".encode()
    vocabulary = byte_level().get_vocab_size()
    return 4 + int.from_bytes(blake2b(key, digest_size=4).digest(), "little") % (vocabulary - 4)


def model_card(
    worker_id: str,
    incarnation: str,
    name: str = MODEL,
    tokenizer: Tokenizer | None = None,
    template: str = CHAT_TEMPLATE,
    sampling: worker_pb2.SamplingDefaults | None = None,
) -> worker_pb2.ModelCard:
    tokenizer = tokenizer or byte_level()
    return worker_pb2.ModelCard(
        model=name,
        worker_id=worker_id,
        incarnation=incarnation,
        max_model_len=MAX_LEN,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=[EOS],
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template,
        special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        hash_root=f"{name}-root",
        hidden_size=4,
        created=1_700_000_000,
        sampling_defaults=sampling,
    )


@dataclass
class Fault:
    """An action when a worker is about to send token `index`; used up by its first use."""

    # break (of the process, which is started again), cut (of its line), hush, stall, gap, repeat, wrong_attempt,
    # foreign_finish; one of HANDOFFS or REFUSALS
    kind: str
    index: int


class TcpLine:
    """A TCP connection's way to a worker, which can be cut."""

    def __init__(self) -> None:
        self.port = free_port()
        self.cuts = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def lay(self, port: int) -> None:
        """Carry connections to the worker's port."""

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            ends = {writer, far_writer}
            self._open |= ends
            await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
            self._open -= ends

        self._server = await asyncio.start_server(carry, "127.0.0.1", self.port)

    def cut(self) -> None:
        """Break all connections; later ones are carried again."""
        self.cuts += 1
        for end in self._open:
            end.transport.abort()

    def close(self) -> None:
        """Carry no more."""
        if self._server is not None:
            self._server.close()
        self.cut()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@dataclass
class Worker(worker_pb2_grpc.WorkerServicer):
    """One worker."""

    worker_id: str
    model: str = MODEL
    token: TokenFunction = scripted_token
    faults: list[Fault] = field(default_factory=list)
    step_s: float = 0.0
    prefill_s: float = 0.0  # before the first token, while the prompt moves on
    reports: bool = True  # False: a version that says nothing of requests that move on without outputs
    tokens_per_step: int = 1
    sizes: Sequence[int] = ()  # tokens of a request's steps, over and over; empty: tokens_per_step
    cached_tokens: int = 0
    end_at: int | None = None  # position whose token is EOS
    tokenizer: Tokenizer | None = None
    announce_trials: bool = True  # False: a suspect waits for another one when the worker dies
    template: str = CHAT_TEMPLATE
    sampling: worker_pb2.SamplingDefaults | None = None  # recommendations of its publisher
    loading: bool = False  # listed, but not serving yet
    abilities: worker_pb2.ModelCard | None = None  # fields of the card that say what the model can do
    no_adapter: str = ""  # why it takes none
    adapter_gate: asyncio.Event | None = None  # adapters are inspected once it is set
    steps: asyncio.Semaphore | None = None  # each step takes one
    line: TcpLine | None = None  # between gateways and the worker

    def __post_init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.submits: list[worker_pb2.Submit] = []
        self.cancelled: list[str] = []
        self.given = 0  # tokens, to all requests
        self.connections = 0
        self.hushed = False  # the process is stopped: no message any more
        self.inspections = 0
        self.port = free_port()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.line.port if self.line else self.port}"

    async def start(self) -> None:
        self._server = new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        bind(self._server, "127.0.0.1", self.port)
        await self._server.start()
        if self.line is not None:
            await self.line.lay(self.port)

    async def stop(self) -> None:
        if self.line is not None:
            self.line.close()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def restart(self) -> None:
        await self.stop()
        self.incarnation = uuid.uuid4().hex
        await self.start()

    async def GetModelCard(self, request, context):  # noqa: N802
        card = model_card(self.worker_id, self.incarnation, self.model, self.tokenizer, self.template, self.sampling)
        if self.abilities is not None:
            card.MergeFrom(self.abilities)
        return card

    async def InspectAdapter(self, request, context):  # noqa: N802
        self.inspections += 1
        if self.adapter_gate:
            await self.adapter_gate.wait()
        if self.no_adapter:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.no_adapter)
        return worker_pb2.Adapter(digest=request.source, source=request.source)

    async def Connect(self, request_iterator, context):  # noqa: N802
        self.connections += 1
        out: Out = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(request_iterator, running, out))
        heart = asyncio.create_task(self._beat(out))
        try:
            step = 0
            while True:
                parts = [await out.get()]
                while not out.empty():
                    parts.append(out.get_nowait())
                if self.hushed:
                    continue
                step += 1
                yield self._message(step, parts)
                if None in parts:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker died")
        finally:
            for task in [reader, heart, *running.values()]:
                task.cancel()

    @staticmethod
    def _message(step: int, parts: Sequence[object]) -> worker_pb2.StepOutputs:
        message = worker_pb2.StepOutputs(step=step)
        for part in parts:
            if isinstance(part, worker_pb2.Output):
                message.outputs.append(part)
            elif isinstance(part, worker_pb2.Progress):
                message.progress.append(part)
            elif isinstance(part, worker_pb2.StepOutputs):
                message.MergeFrom(part)
        return message

    async def _beat(self, out: Out) -> None:
        while True:
            out.put_nowait(worker_pb2.StepOutputs(heartbeat=True, reports_progress=self.reports))
            await asyncio.sleep(BEAT_S)

    async def _read(self, messages, running, out) -> None:
        async for frame in (frame async for message in messages for frame in message.frames):
            if frame.HasField("submit"):
                self.submits.append(frame.submit)
                running[frame.submit.request_id] = asyncio.create_task(self._run(frame.submit, out))
            elif frame.HasField("cancel"):
                self.cancelled.append(frame.cancel.request_id)
                task = running.pop(frame.cancel.request_id, None)
                if task is not None:
                    task.cancel()

    async def _run(self, submit: worker_pb2.Submit, out: Out) -> None:
        await self._prefill(submit, out)
        if submit.embed:
            values = [float(len(submit.prompt_ids)), float(sum(submit.prompt_ids) % 97), 0.5, -1.0]
            await out.put(self._output(submit, 0, [], finish=worker_pb2.FINISH_REASON_STOP, embedding=values))
            return
        end = submit.sampling.max_tokens or MAX_LEN - len(submit.prompt_ids)
        position = len(submit.generated_ids)
        first = True
        sizes = itertools.cycle(self.sizes or (self.tokens_per_step,))
        await self._announce(submit, out)
        while position < end:
            await self._wait_for_step()
            if await self._fault(submit, position, out):
                return
            count = min(next(sizes), end - position)
            output = self._tokens(submit, position, count)
            if first:
                output.cached_tokens = self.cached_tokens
                self._score_prompt(submit, output)
                first = False
            position += len(output.ids)
            self.given += len(output.ids)
            stopped = bool(output.ids) and self._stops(submit, position)
            if stopped:
                output.finish = worker_pb2.FINISH_REASON_STOP
            elif position >= end:
                output.finish = worker_pb2.FINISH_REASON_LENGTH
            await out.put(output)
            if stopped:
                return
            await asyncio.sleep(0)

    async def _wait_for_step(self) -> None:
        if self.step_s:
            await asyncio.sleep(self.step_s)
        if self.steps:
            await self.steps.acquire()

    async def _prefill(self, submit: worker_pb2.Submit, out: Out) -> None:
        loop = asyncio.get_running_loop()
        end, computed = loop.time() + self.prefill_s, 0
        while loop.time() < end:
            await asyncio.sleep(BEAT_S)
            computed += 1
            if self.reports:
                progress = {"request_id": submit.request_id, "attempt": submit.attempt, "computed_tokens": computed}
                out.put_nowait(worker_pb2.Progress(**progress))

    async def _announce(self, submit: worker_pb2.Submit, out: Out) -> None:
        if submit.trial_tokens and self.announce_trials:
            await out.put(self._output(submit, len(submit.generated_ids), [], on_trial=True))

    def _stops(self, submit: worker_pb2.Submit, position: int) -> bool:
        return self.end_at is not None and position > self.end_at and not submit.sampling.ignore_eos

    def _tokens(self, submit: worker_pb2.Submit, position: int, count: int) -> worker_pb2.Output:
        if self.end_at is not None and not submit.sampling.ignore_eos:
            count = min(count, self.end_at + 1 - position)
        ids = [self._id(submit, index) for index in range(position, position + count)]
        output = self._output(submit, position, ids)
        if submit.prediction_ids:  # all tokens of a step but its last one were drafted, and three more
            output.accepted_prediction_tokens, output.rejected_prediction_tokens = len(ids) - 1, 3
        if submit.sampling.HasField("logprobs"):
            for token_id in ids:
                output.logprobs.append(self._scored(token_id, submit.sampling.logprobs))
        return output

    def _id(self, submit: worker_pb2.Submit, index: int) -> int:
        if index == self.end_at and not submit.sampling.ignore_eos:
            return EOS
        return self.token(list(submit.prompt_ids), submit.sampling.seed, index)

    @staticmethod
    def _scored(token_id: int, top: int) -> worker_pb2.TokenLogprobs:
        alternatives = [token_id, *range(10, 10 + max(0, top - 1))][:top]
        return worker_pb2.TokenLogprobs(
            token_id=token_id,
            logprob=-token_id / 1000,
            rank=1,
            top_ids=alternatives,
            top_logprobs=[-token_id / 1000 - i for i in range(len(alternatives))],
        )

    def _score_prompt(self, submit: worker_pb2.Submit, output: worker_pb2.Output) -> None:
        if submit.sampling.HasField("prompt_logprobs"):
            for token_id in submit.prompt_ids[1:]:
                output.prompt_logprobs.append(self._scored(token_id, submit.sampling.prompt_logprobs))

    @staticmethod
    def _output(submit: worker_pb2.Submit, first_index: int, ids: Sequence[int], **fields) -> worker_pb2.Output:
        return worker_pb2.Output(
            request_id=submit.request_id, attempt=submit.attempt, first_index=first_index, ids=ids, **fields
        )

    async def _fault(self, submit, position: int, out: Out) -> bool:
        """Play the fault that is due; True when the request ends here."""
        fault = next((f for f in self.faults if f.index <= position), None)
        if fault is None:
            return False
        self.faults.remove(fault)
        if fault.kind == "hush":
            self.hushed = True
        if fault.kind in ("stall", "hush"):
            await asyncio.Event().wait()
        if fault.kind == "break":
            self.incarnation = uuid.uuid4().hex
            await out.put(None)
            return True
        if fault.kind == "cut":
            self.line.cut()
            return True
        played, ends = self._played(fault.kind, submit, position)
        await out.put(played)
        return ends

    def _played(self, kind: str, submit: worker_pb2.Submit, position: int) -> tuple[worker_pb2.Output, bool]:
        """The output of a fault, and whether it is the worker's last for the request."""
        if kind in HANDOFFS:
            handoff = worker_pb2.Handoff(reason=HANDOFFS[kind], in_flight=kind == "ranks_died", detail="as planted")
            return self._output(submit, position, [], handoff=handoff), True
        if kind in REFUSALS:
            code = REFUSALS[kind]
            error = worker_pb2.RequestError(code=code, field="sampling.max_tokens", message="does not fit")
            return self._output(submit, position, [], error=error), True
        if kind == "gap":
            return self._tokens(submit, position + 1, 1), True
        if kind == "repeat":
            return self._tokens(submit, max(0, position - 2), 2 if position >= 2 else 1), False
        if kind == "wrong_attempt":
            wrong = self._tokens(submit, position, 1)
            wrong.attempt = submit.attempt + 1
            wrong.ids[0] = 5
            return wrong, False
        assert kind == "foreign_finish"
        wrong = self._output(submit, position, [], finish=worker_pb2.FINISH_REASON_STOP)
        wrong.attempt = submit.attempt + 7
        return wrong, False
