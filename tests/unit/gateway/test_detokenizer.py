"""Pieces joined are the full decoding, whatever the ids."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders

from services.gateway.text.detokenizer import Vocabulary
from tests.unit.gateway.made_tokenizers import byte_level, metaspace, sentencepiece, suffixed, undecorated, wordpiece

EXACT = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}
WINDOWED = {"wordpiece": wordpiece, "suffixed": suffixed, "undecorated": undecorated}


vocabulary = functools.cache(Vocabulary)


def pieces(tokenizer: Tokenizer, ids: list[int], *, after: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = vocabulary(tokenizer, skip_special_tokens=skip).new_detokenizer(after or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", EXACT)
@given(data=st.data())
def test_any_ids_give_the_full_decoding(family: str, data: st.DataObject) -> None:
    tokenizer = EXACT[family]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)
    cut = data.draw(st.integers(0, len(ids)))
    several = vocabulary(tokenizer, skip_special_tokens=skip).new_detokenizer()
    parts = [several.push_all(ids[:cut]), several.push_all(ids[cut:]), several.flush()]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", [*EXACT, *WINDOWED])
@given(text=st.text(max_size=60))
def test_any_text_comes_back_in_pieces(family: str, text: str) -> None:
    tokenizer = (EXACT | WINDOWED)[family]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_unfinished_character_is_held_back() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(char) for char in ("ð", "Ł", "¦", "Ħ")]  # the bytes of a unicorn
    assert pieces(tokenizer, ids) == ["", "", "", "🦄", ""]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "a")]
    assert pieces(tokenizer, ids) == ["", "", "éa", ""]


@pytest.mark.parametrize("family", ["sentencepiece", "metaspace", *WINDOWED])
@given(data=st.data())
def test_a_continuation_equals_the_text_added_to_the_prompt(family: str, data: st.DataObject) -> None:
    tokenizer = (EXACT | WINDOWED)[family]()
    text_ids = st.sampled_from(sorted(number for token, number in tokenizer.get_vocab().items() if token[0] != "<"))
    prompt = data.draw(st.lists(text_ids, min_size=1, max_size=10))
    ids = data.draw(st.lists(text_ids, max_size=10))
    assert tokenizer.decode(prompt) + "".join(pieces(tokenizer, ids, after=prompt)) == tokenizer.decode(prompt + ids)


def test_a_word_piece_joins_the_word_of_the_prompt() -> None:
    tokenizer = wordpiece()
    prompt, ids = [tokenizer.token_to_id("f")], [tokenizer.token_to_id("##o"), tokenizer.token_to_id("the")]
    assert pieces(tokenizer, ids, after=prompt) == ["o", " the", ""]
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.token_bytes(token_id) for token_id in ids] == [b"o", b" the"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 1, 0)]),
        decoders.Sequence([decoders.Replace(Regex("o+"), "0"), decoders.Fuse()]),
    ],
)
def test_a_decoder_that_no_scheme_describes_is_followed_as_well(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer.from_str(undecorated().to_str())
    tokenizer.decoder = decoder
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_bytes_of_a_token_equal_its_added_text() -> None:
    words, bytes_ = undecorated(), sentencepiece()
    assert Vocabulary(words).token_bytes(words.token_to_id("quick")) == b" quick"
    assert Vocabulary(bytes_).token_bytes(bytes_.token_to_id("<0xC3>")) == b"\xc3"
    assert Vocabulary(bytes_).token_bytes(bytes_.token_to_id("<|bos|>")) == b"<|bos|>"
    assert Vocabulary(bytes_).token_bytes(10**6) == b"", "no token of the vocabulary"
