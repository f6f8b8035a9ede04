"""A model from its card: what makes a card unusable, and that long texts cost no more than what fits of them."""

from __future__ import annotations

import pytest
from ryzanstein.v1 import worker_pb2
from tokenizers import Tokenizer

from services.gateway.errors import ApiError
from services.gateway.text import codec
from services.gateway.text.codec import ModelCardError, ServedModel
from tests.unit.gateway.made_tokenizers import byte_level, wordpiece

ADDED = "plain added ü"  # a single token of 13 characters


def card(tokenizer: Tokenizer, max_len: int = 256) -> worker_pb2.ModelCard:
    text = tokenizer.to_str().encode()
    return worker_pb2.ModelCard(
        model="test-model", max_model_len=max_len, vocab_size=tokenizer.get_vocab_size(), tokenizer_json=text
    )


def served(tokenizer: Tokenizer, max_len: int = 256) -> ServedModel:
    return ServedModel.from_card(card(tokenizer, max_len))


@pytest.mark.parametrize(("field", "value"), [("tokenizer_json", b"{}"), ("chat_template", "{% if %}")])
def test_a_card_that_can_not_be_read_names_its_model(field: str, value: object) -> None:
    broken = card(byte_level())
    setattr(broken, field, value)
    with pytest.raises(ModelCardError, match="model test-model: "):
        ServedModel.from_card(broken)


def test_card_is_unusable_when_the_vocabulary_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of error would end the loop in which gateways follow the workers of all models."""

    def unreadable(tokenizer: Tokenizer) -> None:
        raise KeyError("replacement")

    monkeypatch.setattr(codec, "Vocabulary", unreadable)
    with pytest.raises(ModelCardError, match="model test-model: 'replacement'"):
        served(byte_level())


async def test_a_long_text_is_rejected_by_its_beginning_and_a_fitting_text_is_encoded() -> None:
    model = served(byte_level(), 4000)
    with pytest.raises(ApiError, match="at least") as refused:
        await model.encode("∂" * 40_000, "prompt", add_special_tokens=False)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert len(await model.encode(ADDED * 3000, "prompt", add_special_tokens=False)) == 3000


async def test_the_first_tokens_are_encoded_for_texts_of_any_length() -> None:
    first = byte_level().token_to_id(ADDED)
    assert await served(byte_level()).encode_start(ADDED * 2000, 1000) == [first] * 1000
    words = wordpiece().encode("The quick").ids
    assert await served(wordpiece()).encode_start(" " * 4070 + "The quick brown fox", 10) == words, (
        "blanks are no tokens"
    )


async def test_the_second_text_of_a_pair_is_cut() -> None:
    model = served(wordpiece())
    whole, _ = await model.encode_pair("The", "quick brown fox", None, None)
    for limit, second_limit, stored in ((3, None, 3), (None, 1, 2), (2, 3, 2), (1, None, 1)):
        ids, _ = await model.encode_pair("The", "quick brown fox", limit, second_limit)
        assert ids == whole[:stored]
