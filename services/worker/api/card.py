"""The model card, from which gateways prepare prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.attention import AttentionMode
from services.worker.engine.state import AdapterFacts, EngineFacts, EngineModel


@dataclass(frozen=True, slots=True)
class SharedHost:
    """The memory that several workers share, and when this one may sleep; routers put workers to sleep."""

    host: str = ""  # workers with the same value share memory; empty: the worker shares none
    max_awake: int = 0  # workers of the host that are awake at a time; 0: no limit
    idle_sleep_s: int = 0  # time without requests after which the worker may sleep; 0: never
    pinned: bool = False  # the worker never sleeps to make room
    priority: int = 0  # idle workers of the host with the lowest one sleep first


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Identity of an engine on the wire."""

    worker_id: str
    incarnation: str  # a UUID of this start
    model: str  # the name that clients use
    created: int  # Unix time
    recommends: bool = True  # use the publisher's sampling defaults for requests
    shared: SharedHost = SharedHost()
    node: str = ""  # the worker's machine; empty: not known


def model_card(identity: EngineIdentity, model: EngineModel, facts: EngineFacts) -> pb.ModelCard:
    """The model card for gateways."""
    return pb.ModelCard(
        model=identity.model,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        max_model_len=facts.max_request_tokens,
        vocab_size=facts.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_json=model.tokenizer_json,
        chat_template=model.chat_template,
        special_tokens=model.special_tokens,
        add_bos_token=model.add_bos_token,
        hash_root=model.hash_root,
        hidden_size=facts.hidden_size,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        tensor_parallel=model.tensor_parallel,
        created=identity.created,
        architecture=model.architecture,
        startup=[pb.StartupPhase(name=name, ms=seconds * 1e3) for name, seconds in facts.startup_s.items()],
        sampling_defaults=_defaults(model) if identity.recommends else None,
        memory_bytes=facts.memory.parts(),
        only_embeds=not model.generates,
        classes=model.classes,
        prompts=model.prompts,
        default_prompt=model.default_prompt,
        engine=model.engine,
        resume=model.resume,
        pulls=model.pulls,
        weight_formats=facts.weight_formats,
        adapters=[adapter_message(adapter) for adapter in model.adapters],
        adapter_slots=model.adapter_slots,
        attention=pb.Attention(**asdict(model.attention)) if model.attention != AttentionMode() else None,
        attention_modes=model.attention_modes,
        images=model.images,
    )


def adapter_message(adapter: AdapterFacts) -> pb.Adapter:
    """The message about an adapter."""
    return pb.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        source=adapter.source,
        rank=adapter.rank,
        pinned=adapter.pinned,
    )


def _defaults(model: EngineModel) -> pb.SamplingDefaults:
    defaults = pb.SamplingDefaults()
    for name, value in model.sampling_defaults.items():
        setattr(defaults, name, value)
    return defaults
