from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.models import BUNDLED_MODEL
from trainer.tokenizer import SPECIAL_TOKENS, render_turn, save_tokenizer, train_tokenizer

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("depth", [4, 8, 12, 16, 20])
def test_an_indentation_is_one_token(depth: int) -> None:
    tokens = TOKENIZER.encode("if x:\n" + " " * depth + "return\n").tokens
    assert "Ġ" * depth in tokens
    assert tokens[tokens.index("Ġ" * depth) + 1] == "return"


def test_digits_are_single_tokens() -> None:
    pieces = [TOKENIZER.decode([token]) for token in TOKENIZER.encode("x = 20481").ids]
    assert pieces[-5:] == [" 2", "0", "4", "8", "1"]


def test_special_tokens_are_one_id_each_and_not_text() -> None:
    for token in SPECIAL_TOKENS:
        ids = TOKENIZER.encode(token, add_special_tokens=False).ids
        assert len(ids) == 1
        assert TOKENIZER.decode(ids) == ""


def test_vocabulary_has_4096_tokens() -> None:
    assert TOKENIZER.get_vocab_size() == 4_096


def test_chat_template_renders_what_the_model_was_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    trained = render_turn("system", "Be brief.") + render_turn("user", "Hello") + "<|assistant|>\n"
    assert rendered == "<|endoftext|>" + trained


def test_chat_template_names_the_roles_it_knows() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    with pytest.raises(TemplateError, match="'system', 'user' or 'assistant'"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_transformers_agrees_with_the_tokenizer_file() -> None:
    text = "def f(x):\n        return x + 1  # größer\n"
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == TOKENIZER.encode(text).ids
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|endoftext|>"


def test_training_is_deterministic_and_saves_what_it_trained(tmp_path: Path) -> None:
    texts = ["def f(x):\n    return x\n", "class A:\n    pass\n"] * 20
    first, second = train_tokenizer(texts, 280), train_tokenizer(texts, 280)
    assert first.to_str() == second.to_str()
    save_tokenizer(first, tmp_path, max_positions=64)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 280


def test_a_corpus_too_small_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        train_tokenizer(["ab"], 4_096)
