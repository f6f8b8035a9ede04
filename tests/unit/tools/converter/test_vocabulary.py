"""Tokenizers of other kinds than that of `test_convert.py`: what GGUF holds of them, and what it cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.compute.model.formats.gguf.vocabulary import TokenType
from services.compute.model.loading.tokenizer import read_tokenizer
from services.compute.model.spec import ModelError
from services.tools.converter.vocabulary_keys import FolderTokenizer, vocabulary_keys
from tests.unit.compute.model.formats.gguf.hard_texts import TEXTS
from tests.unit.compute.model.loading.test_sentencepiece import LIKE_LLAMA, trained


def folder(tokenizer: Tokenizer, **special: str) -> FolderTokenizer:
    return FolderTokenizer(Path("model"), tokenizer, special, "", (), tokenizer.get_vocab_size())


def byte_level(split: str) -> Tokenizer:
    """A tokenizer of bytes whose words are those of a pre-tokenizer that GGUF names."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[split].patterns[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def test_sentencepieces_merges_and_bytes_survive(tmp_path: Path) -> None:
    size = trained(tmp_path, **LIKE_LLAMA).vocab_size()
    files = read_tokenizer(tmp_path, {}, size)
    before = Tokenizer.from_buffer(files.json)
    keys = vocabulary_keys(folder(before, **files.special_tokens))
    assert keys["tokenizer.ggml.model"] == "llama"
    types = keys["tokenizer.ggml.token_type"]
    assert isinstance(types, tuple)
    assert (types.count(TokenType.BYTE), types[before.token_to_id("<unk>")]) == (256, TokenType.UNKNOWN)
    after = hub_files(GgufMetadata(tmp_path, keys)).tokenizer
    for text in (*TEXTS, "a<turn>b<tool>"):
        assert after.encode(text).ids == before.encode(text).ids, text


def test_the_pre_tokenizer_gives_the_same_ids() -> None:
    keys = vocabulary_keys(folder(byte_level("llama-bpe")))
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "llama-bpe")
    assert "tokenizer.chat_template" not in keys


def lowered() -> Tokenizer:
    tokenizer = byte_level("qwen2")
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tokenizer(models.Unigram([("a", 0.0)])), "a tokenizer of type Unigram is not written; allowed: BPE"),
        (lowered, "no pre-tokenizer that GGUF names gives this tokenizer's ids"),
    ],
)
def test_a_vocabulary_beyond_gguf_is_rejected(make: Callable[[], Tokenizer], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        vocabulary_keys(folder(make()))
