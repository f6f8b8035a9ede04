"""The public gRPC service, over the same pipeline as REST."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from services.common.logs import request_id_var
from services.gateway.api.embeddings import Embedder
from services.gateway.api.generate import FALLBACK_HEADER, Ask, JobMaker, Made, permitted_model
from services.gateway.api.run import chunks_of
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error, invalid
from services.gateway.generation.output import Usage
from services.gateway.generation.pipeline import check_prompt
from services.gateway.grpc_answers import ResponseWriter, usage_message
from services.gateway.grpc_bodies import chat_body, completion_body
from services.gateway.observation import CLIENT_GONE, Observer, new_request_id
from services.gateway.tenants.tenant import Admission, Gate, Tenant
from services.gateway.upstream.catalog import Catalog

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
B = TypeVar("B", ChatBody, CompletionBody)

SERVICE = "ryzanstein.v1.Inference"
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What came instead of a request."""

    reason: str


@dataclass(slots=True)
class _Call:
    """What is known of a call while it runs."""

    context: Context
    traceparent: str
    model: str = ""
    answering: bool = False  # from the first response on

    async def begin_answer(self, made: Made) -> None:
        """Say which model answers, if it is not the one asked for."""
        if made.fell_back:
            await self.context.send_initial_metadata(((FALLBACK_HEADER, made.model.name),))
        self.answering = True


@dataclass(slots=True)
class _Admitted:
    """A call that was let in, and what it has used."""

    admission: Admission
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`ryzanstein.v1.Inference`. Errors are status codes whose details are the message of the REST error."""

    catalog: Catalog
    gate: Gate
    completions: JobMaker[CompletionBody]
    chat: JobMaker[ChatBody]
    embedder: Embedder
    observer: Observer
    drain: Drain

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue a text or token ids."""
        async with self._call("Generate", request, context) as call:
            tenant = await self._tenant(context)
            async with self._admitted(tenant) as admitted:
                prompt = await self._prompt(request, tenant)
                body = completion_body(request, prompt)
                ask = Ask(body, tenant, request.options.session_id, call.traceparent)
                async for response in self._answer(self.completions, ask, call, admitted):
                    yield response

    async def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue a conversation."""
        async with self._call("Chat", request, context) as call:
            tenant = await self._tenant(context)
            async with self._admitted(tenant) as admitted:
                await self._check_count(request.model, tenant, len(request.messages), "messages")
                body = chat_body(request)
                ask = Ask(body, tenant, request.options.session_id, call.traceparent)
                async for response in self._answer(self.chat, ask, call, admitted):
                    yield response

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:  # noqa: N802
        """Vectors of texts."""
        async with self._call("Embed", request, context) as call:
            tenant = await self._tenant(context)
            model = await permitted_model(self.catalog, request.model, tenant)
            call.model = model.name
            async with self._admitted(tenant) as admitted:
                inputs = await self.embedder.inputs(request.input, model)
                usage = admitted.usage = Usage(sum(map(len, inputs)))
                vectors = await self.embedder.embed_for(
                    tenant, admitted.admission, model, inputs, traceparent=call.traceparent
                )
                data = [inference_pb2.Embedding(values=vector) for vector in vectors]
                return inference_pb2.EmbedResponse(data=data, usage=usage_message(usage))
        raise AssertionError("unreachable: errors abort the call")

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Ids of a text."""
        async with self._call("Tokenize", request, context) as call:
            tenant = await self._tenant(context)
            model = await permitted_model(self.catalog, request.model, tenant)
            call.model = model.name
            async with self._admitted(tenant):
                ids = await model.encode(request.text, "text", add_special_tokens=request.add_special_tokens)
                return inference_pb2.TokenizeResponse(ids=ids)
        raise AssertionError("unreachable: errors abort the call")

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of ids."""
        async with self._call("Detokenize", request, context) as call:
            tenant = await self._tenant(context)
            model = await permitted_model(self.catalog, request.model, tenant)
            call.model = model.name
            async with self._admitted(tenant):
                await self._check_count(request.model, tenant, len(request.ids), "ids")
                if request.ids:
                    check_prompt(model, list(request.ids), "ids")
                text = await model.text_of(list(request.ids), skip_special_tokens=False)
                return inference_pb2.DetokenizeResponse(text=text)
        raise AssertionError("unreachable: errors abort the call")

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The models that requests may name."""
        async with self._call("ListModels", request, context):
            tenant = await self._tenant(context)
            models = [
                inference_pb2.Model(id=name, **({"created": m.card.created, "max_model_len": m.max_len} if m else {}))
                for name, m in self.catalog.listed().items()
                if not tenant.models or name in tenant.models
            ]
            return inference_pb2.ListModelsResponse(models=models)
        raise AssertionError("unreachable: errors abort the call")

    @asynccontextmanager
    async def _call(self, name: str, request: Message | Undecodable, context: Context) -> AsyncIterator[_Call]:
        request_id = _metadata(context, "x-request-id")[:128] or new_request_id()
        observed = self.observer.begin(name, name, _metadata(context, "traceparent"), request_id)
        request_id_var.set(request_id)
        ids = (("x-request-id", request_id), *((("x-trace-id", observed.trace_id),) if observed.trace_id else ()))
        context.set_trailing_metadata(ids)
        observed.attach()  # gRPC gives every call a task of its own
        call, status = _Call(context, observed.traceparent), CLIENT_GONE
        try:
            if isinstance(request, Undecodable):
                raise invalid(f"The request cannot be read, its texts must be UTF-8: {request.reason}")
            async with self.drain.limit():
                yield call
            status = 200
        except ApiError as error:
            status = error.status
            if call.answering:
                observed.broken(error)
            await _abort(context, error, ids)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("call failed")
            status = 500
            await _abort(context, internal_error(), ids)
        finally:
            observed.end(status, call.model)

    async def _tenant(self, context: Context) -> Tenant:
        return await self.gate.identify(_metadata(context, "authorization"))

    @asynccontextmanager
    async def _admitted(self, tenant: Tenant) -> AsyncIterator[_Admitted]:
        """Let a call in before anything is done that grows with its size."""
        admitted = _Admitted(await self.gate.enter(tenant))
        try:
            yield admitted
        finally:
            await admitted.admission.settle(admitted.usage)

    async def _check_count(self, model: str, tenant: Tenant, count: int, param: str) -> None:
        """Refuse more ids or messages than any prompt has; raises :class:`ApiError`."""
        limit = (await permitted_model(self.catalog, model, tenant)).max_len
        if count > limit:
            raise invalid(f"`{param}` may hold at most {limit} entries for this model, got {count}.", param)

    async def _prompt(self, request: inference_pb2.GenerateRequest, tenant: Tenant) -> str | list[int]:
        if not request.HasField("prompt_ids"):
            return request.prompt
        await self._check_count(request.model, tenant, len(request.prompt_ids.ids), "prompt")
        return list(request.prompt_ids.ids)

    async def _answer(
        self, maker: JobMaker[B], ask: Ask[B], call: _Call, admitted: _Admitted
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        made = await maker.make(ask)
        try:
            async for response in self._stream(admitted, made, ask.body, call):
                yield response
        except ApiError as error:
            if call.answering:
                raise
            made = await maker.fall_back(ask, made, error)
            async for response in self._stream(admitted, made, ask.body, call):
                yield response

    async def _stream(
        self, admitted: _Admitted, made: Made, body: ChatBody | CompletionBody, call: _Call
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        job, call.model = made.job, made.model.name
        try:
            await admitted.admission.reserve(job.reserved_tokens())
            writer = ResponseWriter(made, body)
            async with aclosing(chunks_of(job.generations)) as chunks:
                async for index, chunk in chunks:
                    if not call.answering:
                        await call.begin_answer(made)
                    yield writer.response(index, chunk)
        finally:
            job.close()
            admitted.usage = job.usage()


def _metadata(context: Context, name: str) -> str:
    value = dict(context.invocation_metadata() or ()).get(name, "")
    return value if isinstance(value, str) else ""


async def _abort(context: Context, error: ApiError, ids: tuple[tuple[str, str], ...]) -> None:
    """End the call with the error's status; always raises."""
    retry_after = None if error.retry_after_s is None else str(max(1, round(error.retry_after_s)))
    facts = (("retry-after", retry_after), ("param", error.param), ("code", error.code))
    trailing = tuple((key, value) for key, value in facts if value is not None)
    code = _STATUS.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, error.message, trailing_metadata=(*ids, *trailing))
