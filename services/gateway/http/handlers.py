"""The hot routes, which take JSON, each with its handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.chat_body import ChatBodyPreparer
from services.gateway.generation.completions import CompletionPreparer
from services.gateway.generation.embedding import Embedder
from services.gateway.generation.entrance import Entrance
from services.gateway.http import chat, classify, comparison, completions, embeddings, tokens
from services.gateway.http.adapters import LOAD, UNLOAD, AdapterAdmin, AdapterHandler, LoadBody, UnloadBody
from services.gateway.http.documentation import Documentation
from services.gateway.http.endpoint import Endpoint, Handler, JsonEndpoint
from services.gateway.http.exchange import OPENAI_DIALECT, ApiDialect, BodyLimits
from services.gateway.http.generate import GenerateHandler
from services.gateway.http.messages import endpoint as messages
from services.gateway.http.messages.schema import MessagesBody
from services.gateway.http.messages.serializer import MessagesSerializer
from services.gateway.http.outside import ExternalClient, OutsideAnswer
from services.gateway.http.responses import compaction, conversation_routes, counting
from services.gateway.http.responses import endpoint as responses
from services.gateway.http.responses.handler import Credential, ResponsesHandler
from services.gateway.http.responses.module import KeptResponses
from services.gateway.http.responses.serializer import DIALECT as RESPONSES_DIALECT
from services.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Route:
    """A path and its handlers."""

    path: str
    handler: Handler[Any]
    documented: Documentation
    dialect: ApiDialect = OPENAI_DIALECT
    aliases: tuple[str, ...] = ()

    def endpoints(self, entrance: Entrance, limits: BodyLimits) -> dict[str, Endpoint]:
        """The route's endpoints by path; `entrance` admits their requests."""
        return dict.fromkeys((self.path, *self.aliases), JsonEndpoint(entrance, limits, self.handler))


def hot_routes(
    settings: GatewaySettings,
    chats: ChatPreparer,
    completing: CompletionPreparer,
    embedder: Embedder,
    stores: KeptResponses,
    credential: Credential,
    adapters: AdapterAdmin,
    external: ExternalClient,
) -> list[Route]:
    """All hot routes that no setting disables."""
    beat_s = settings.sse_heartbeat_s
    score, rerank = comparison.ScoreForm(), comparison.RerankForm()
    return [
        Route(
            "/v1/chat/completions",
            GenerateHandler(
                BodyDecoder(ChatBody).decode,
                lambda _: chat.ChatSerializer(ChatBodyPreparer(chats)),
                beat_s,
                OutsideAnswer(external, "/chat/completions"),
            ),
            chat.DOCUMENTED,
        ),
        Route(
            "/v1/responses",
            ResponsesHandler(
                chats,
                stores.queue,
                stores.conversations,
                credential,
                beat_s,
                background=settings.responses_background > 0,
            ),
            responses.DOCUMENTED,
            RESPONSES_DIALECT,
        ),
        Route(
            "/v1/responses/input_tokens",
            counting.InputTokensHandler(chats, stores.turns),
            counting.DOCUMENTED,
            RESPONSES_DIALECT,
        ),
        Route(
            "/v1/responses/compact",
            GenerateHandler(
                BodyDecoder(compaction.CompactBody).decode,
                lambda _: compaction.CompactSerializer(chats, stores.turns),
                beat_s,
            ),
            compaction.DOCUMENTED,
            RESPONSES_DIALECT,
        ),
        Route(
            "/v1/conversations",
            conversation_routes.ConversationHandler(stores.conversations),
            conversation_routes.DOCUMENTED,
        ),
        Route(
            "/v1/completions",
            GenerateHandler(
                BodyDecoder(CompletionBody).decode,
                lambda _: completions.CompletionSerializer(completing),
                beat_s,
                OutsideAnswer(external, "/completions"),
            ),
            completions.DOCUMENTED,
        ),
        Route(
            "/v1/messages",
            GenerateHandler(messages.MessagesDecoder(MessagesBody).decode, lambda _: MessagesSerializer(chats), beat_s),
            messages.MESSAGES,
            messages.DIALECT,
        ),
        Route("/v1/messages/count_tokens", messages.CountHandler(chats), messages.COUNT, messages.DIALECT),
        Route("/v1/embeddings", embeddings.EmbeddingHandler(embedder), embeddings.DOCUMENTED),
        Route(
            "/v1/score",
            comparison.ComparisonHandler(score, embedder),
            comparison.SCORE,
            aliases=("/score",),
        ),
        Route(
            "/v1/rerank",
            comparison.ComparisonHandler(rerank, embedder),
            comparison.RERANK,
            aliases=("/v2/rerank", "/rerank"),
        ),
        Route("/v1/classify", classify.ClassifyHandler(embedder), classify.DOCUMENTED, aliases=("/classify",)),
        Route("/tokenize", tokens.TokenizeHandler(chats), tokens.TOKENIZE),
        Route("/detokenize", tokens.DetokenizeHandler(), tokens.DETOKENIZE),
        Route("/v1/load_lora_adapter", AdapterHandler(LoadBody, adapters, AdapterAdmin.load), LOAD),
        Route("/v1/unload_lora_adapter", AdapterHandler(UnloadBody, adapters, AdapterAdmin.unload), UNLOAD),
    ]
