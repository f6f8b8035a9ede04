"""The text form of an attention, and what gateways make of it."""

from __future__ import annotations

import pytest
from ryzanstein.v1 import inference_pb2, worker_pb2

from services.common.attention import AttentionMode
from services.gateway.api.ignored import Ignored
from services.gateway.errors import ApiError
from services.gateway.generation.sampling import sampling_options
from services.gateway.grpc.bodies import completion_body
from services.gateway.text.codec import ServedModel
from services.worker.settings import WorkerSettings
from tests.unit.gateway.made_tokenizers import byte_level

FORMS = [
    ("dense", AttentionMode()),
    ("window(0, 1)", AttentionMode(0, 1)),
    (" window( 64,4096 ) ", AttentionMode(64, 4096)),
    ("top_k(128)", AttentionMode(pages=128)),
    ("window", AttentionMode(64, 4096)),
    (" top_k ", AttentionMode(pages=256)),
]
WRONG = [
    "",
    "Dense",
    "window()",
    "window(4096)",
    "top_k()",
    "window(64, 0)",
    "window(-1, 5)",
    "top_k(3)",
    "top_k(1e3)",
    "top_k(4, 5)",
    "window(1, 999999999)",
    "top_k(99999999999)",
]


def served(modes: list[str], default: worker_pb2.Attention | None = None) -> ServedModel:
    tokenizer = byte_level()
    card = worker_pb2.ModelCard(
        model="m", max_model_len=256, vocab_size=tokenizer.get_vocab_size(), attention=default, attention_modes=modes
    )
    card.tokenizer_json = tokenizer.to_str().encode()
    return ServedModel.from_card(card)


def attention(text: str | None, model: ServedModel) -> worker_pb2.Attention | None:
    """A worker's value of a gRPC option, which becomes the field of a REST body."""
    options = inference_pb2.GenerationOptions(attention=text)
    body = completion_body(inference_pb2.GenerateRequest(model="m", options=options), "x", Ignored())
    sampling = sampling_options(body, model, max_tokens=5, logprobs=None).to_proto()
    return sampling.attention if sampling.HasField("attention") else None


@pytest.mark.parametrize(("text", "mode"), FORMS)
def test_a_form_is_read_and_written(text: str, mode: AttentionMode) -> None:
    assert AttentionMode.parse(text) == mode == AttentionMode.parse(str(mode))


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_form_is_refused_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not dense, window\(sinks, window\)|must be"):
        AttentionMode.parse(text)
    with pytest.raises(ValueError, match="attention"):
        WorkerSettings(model="m", attention=text)
    with pytest.raises(ApiError) as refused:
        attention(text, served(["window", "top_k"]))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "attention", "invalid_value")


def test_a_request_gets_its_own_attention_else_that_of_the_workers() -> None:
    narrow, pages = worker_pb2.Attention(sinks=16, window=64), worker_pb2.Attention(pages=9)
    assert attention(None, served(["window"], narrow)) == narrow
    assert attention("dense", served(["window"], narrow)) is None
    assert attention("top_k(9)", served(["window", "top_k"], narrow)) == pages
    assert attention(None, served(["window"])) is None


@pytest.mark.parametrize(("text", "modes"), [("window(1, 5)", []), ("top_k(9)", ["window"])])
def test_an_attention_that_the_workers_do_not_compute_is_refused(text: str, modes: list[str]) -> None:
    """Such as those of an older version, whose cards name no modes."""
    with pytest.raises(ApiError, match=f"compute {', '.join(('dense', *modes))}") as refused:
        attention(text, served(modes))
    assert (refused.value.status, refused.value.param) == (400, "attention")
