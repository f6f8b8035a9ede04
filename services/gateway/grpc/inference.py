"""The public gRPC service, over the same pipeline as REST."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc, routing_pb2

from services.common.logs import request_id_var
from services.gateway.api.ignored import IGNORED_HEADER, Ignored
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.asgi import authorization, header
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error, invalid
from services.gateway.generation.abilities import require_embedding
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.embedding import Embedder
from services.gateway.generation.entrance import Entrance
from services.gateway.generation.pipeline import check_prompt
from services.gateway.generation.prepared import Preparer
from services.gateway.generation.waiting import EVENTS_HEADER, PATIENCE_HEADER, waiting_json, wants_events
from services.gateway.grpc.answers import ResponseWriter, model_message, usage_message
from services.gateway.grpc.bodies import chat_body, check_known, completion_body
from services.gateway.observation import CLIENT_GONE, Observer, request_id_of
from services.gateway.tenants.tenant import Tenant
from services.gateway.text.codec import ServedModel

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_Naming = inference_pb2.EmbedRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest

SERVICE = "ryzanstein.v1.Inference"
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Bytes that are no valid request."""

    reason: str


@dataclass(slots=True)
class _Call:
    """The state of a running call."""

    context: Context
    headers: Mapping[bytes, bytes]
    traceparent: str
    ignored: Ignored  # an admitted request has its own
    model: str = ""
    answering: bool = False  # true from the first response on
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    saying: asyncio.Task[None] | None = None

    def header(self, name: str) -> str:
        """A value of the call's metadata, or the empty string."""
        return header(self.headers, name.encode())

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        """Write a message; tasks may write at the same time."""
        async with self.writing:
            await self.context.write(message)

    def say(self, start: routing_pb2.ModelStart) -> None:
        """Write how far a model's start is; left out while the client does not read."""
        if self.saying is None or self.saying.done():
            fields = waiting_json(start)
            waiting = inference_pb2.Waiting(stage=fields["stage"], estimate_s=fields["estimate_s"] or 0)
            self.saying = asyncio.create_task(self.write(inference_pb2.GenerateResponse(waiting=waiting)))

    def follow(self, request: AdmittedRequest) -> None:
        """Count the call for the model that answers, and say how far its start is if the client wants to know."""

        def started(request: AdmittedRequest) -> None:
            self.model = request.model.name

        request.on_start = started
        wanted = wants_events(self.header(EVENTS_HEADER))
        request.tell(self.say if wanted else lambda start: None)

    async def begin_answer(self, request: AdmittedRequest) -> None:
        """Begin to answer, with the answering model's name if the client gave another one."""
        await self._name_model(request)
        self.answering = True

    async def _name_model(self, request: AdmittedRequest) -> None:
        if self.saying is None and (named := request.answered_by()):  # the first message has sent the metadata
            await self.context.send_initial_metadata(tuple(named))

    async def find(self, admitted: AdmittedRequest, request: _Naming) -> ServedModel:
        """Find the model of a call, and count the call for it; raises :class:`ApiError`."""
        check_known(request, admitted.ignored)
        model = await admitted.find_model(request.model)
        self.model = model.name
        await self._name_model(admitted)
        return model


@dataclass(frozen=True)
class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`ryzanstein.v1.Inference`. An error is a status code with the REST error's message as details."""

    entrance: Entrance
    completions: Preparer[CompletionBody]
    chat: Preparer[ChatBody]
    embedder: Embedder
    observer: Observer
    drain: Drain

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Continue a text or token ids."""
        async with self._call("Generate", request, context) as call, self._admitted(call) as admitted:
            call.follow(admitted)
            body = completion_body(request, await _prompt(request, admitted), admitted.ignored)
            await admitted.start(self.completions, body, request.options.session_id, call.traceparent)
            await _answer(admitted, body, call)

    async def Chat(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> None:
        """Continue a conversation."""
        async with self._call("Chat", request, context) as call, self._admitted(call) as admitted:
            call.follow(admitted)
            model = await admitted.find_model(request.model, request.options.session_id)
            _check_count(model, len(request.messages), "messages")
            body = chat_body(request, admitted.ignored)
            await admitted.start(self.chat, body, request.options.session_id, call.traceparent)
            await _answer(admitted, body, call)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:  # noqa: N802
        """Embed texts."""
        async with self._call("Embed", request, context) as call, self._admitted(call) as admitted:
            model = await call.find(admitted, request)
            require_embedding(model)
            prompt = model.card.prompts.get(model.card.default_prompt, "")
            inputs = await self.embedder.inputs(request.input, model, prompt=prompt)
            caller = admitted.caller("", None, call.traceparent)
            vectors = await self.embedder.embed(admitted, model, inputs, caller)
        data = [inference_pb2.Embedding(values=vector) for vector in vectors]
        return inference_pb2.EmbedResponse(data=data, usage=usage_message(admitted.used))

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Convert a text to token ids."""
        async with self._call("Tokenize", request, context) as call, self._admitted(call) as admitted:
            model = await call.find(admitted, request)
            ids = await model.encode(request.text, "text", add_special_tokens=request.add_special_tokens)
        return inference_pb2.TokenizeResponse(ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        async with self._call("Detokenize", request, context) as call, self._admitted(call) as admitted:
            model = await call.find(admitted, request)
            _check_count(model, len(request.ids), "ids")
            if request.ids:
                check_prompt(model, list(request.ids), "ids")
            text = await model.text_of(list(request.ids), skip_special_tokens=False)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """List the models that requests may name."""
        async with self._call("ListModels", request, context) as call:
            check_known(request, call.ignored)
            tenant = await self._tenant(call)
            models = [model_message(listed.name, listed.served) for listed in self.entrance.models.listed(tenant)]
        return inference_pb2.ListModelsResponse(models=models)

    @asynccontextmanager
    async def _call(self, name: str, request: Message | Undecodable, context: Context) -> AsyncIterator[_Call]:
        headers = _headers(context)
        request_id = request_id_of(header(headers, b"x-request-id"))
        observed = self.observer.begin(name, name, header(headers, b"traceparent"), request_id)
        request_id_var.set(request_id)
        ids = (("x-request-id", request_id), *((("x-trace-id", observed.trace_id),) if observed.trace_id else ()))
        context.set_trailing_metadata(ids)
        observed.attach()  # gRPC runs every call in its own task
        call = _Call(context, headers, observed.traceparent, Ignored(self.entrance.refuse_fields))
        status = CLIENT_GONE
        try:
            if isinstance(request, Undecodable):
                raise invalid(f"The request cannot be read, its texts must be UTF-8: {request.reason}")
            async with self.drain.limit():
                yield call
            if call.ignored.names:
                context.set_trailing_metadata((*ids, (IGNORED_HEADER, call.ignored.header)))
            status = 200
        except ApiError as error:
            status = error.status
            if call.answering:
                observed.broken(error)
            await _abort(context, error, ids)
        except asyncio.CancelledError:
            raise
        except Exception:  # a bug ends only this call
            log.exception("call failed")
            status = 500
            await _abort(context, internal_error(), ids)
        finally:
            if call.saying is not None:
                call.saying.cancel()
            observed.end(status, call.model)

    async def _tenant(self, call: _Call) -> Tenant:
        return await self.entrance.gate.identify(authorization(call.headers))

    @asynccontextmanager
    async def _admitted(self, call: _Call) -> AsyncIterator[AdmittedRequest]:
        tenant = await self._tenant(call)
        async with self.entrance.admit(tenant, call.header(PATIENCE_HEADER)) as admitted:
            call.ignored = admitted.ignored
            yield admitted


def _check_count(model: ServedModel, count: int, param: str) -> None:
    """Refuse more ids or messages than a prompt may have; raises :class:`ApiError`."""
    if count > model.max_len:
        raise invalid(f"`{param}` may hold at most {model.max_len} entries for this model, got {count}.", param)


async def _prompt(request: inference_pb2.GenerateRequest, admitted: AdmittedRequest) -> str | list[int]:
    if not request.HasField("prompt_ids"):
        return request.prompt
    model = await admitted.find_model(request.model, request.options.session_id)
    _check_count(model, len(request.prompt_ids.ids), "prompt")
    return list(request.prompt_ids.ids)


async def _answer(request: AdmittedRequest, body: ChatBody | CompletionBody, call: _Call) -> None:
    """Write the responses in this coroutine, so that the drain's end can interrupt a pending write."""
    async with aclosing(request.chunks()) as chunks:
        async for choice, chunk in chunks:
            if not call.answering:
                await call.begin_answer(request)
                writer = ResponseWriter(request, body)
            await call.write(writer.response(choice, chunk))


def _headers(context: Context) -> Mapping[bytes, bytes]:
    """The call's metadata as the headers of a request."""
    texts = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
    return {name.encode(): value.encode("latin-1", "replace") for name, value in reversed(texts)}


async def _abort(context: Context, error: ApiError, ids: tuple[tuple[str, str], ...]) -> None:
    """Abort the call with the error's status; always raises."""
    retry_after = None if error.retry_after_s is None else str(max(1, round(error.retry_after_s)))
    facts = (("retry-after", retry_after), ("param", error.param), ("code", error.code))
    trailing = tuple((key, value) for key, value in facts if value is not None)
    code = _STATUS.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, error.message, trailing_metadata=(*ids, *trailing))
