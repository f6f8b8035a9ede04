"""A checkpoint with a SentencePiece model alone is tokenized as SentencePiece tokenizes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from services.compute.model.loading.tokenizer import read_tokenizer
from services.compute.model.spec import ModelError
from services.gateway.text.detokenizer import Vocabulary

LIKE_LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"} | {
    "remove_extra_whitespaces": False
}
LIKE_T5 = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"}
TEXTS = (
    "Hello world", "what is a list", " two  spaces ", "words, words; and (words)", "naïve café", "你好，世界",
    "🙂 snow ☃", "12345 67", "def f(x):\n\treturn x  # y", "ﬁne ①", "The end.",
)  # fmt: skip


def trained(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    source = [
        line for file in sorted(Path(__file__).parents[5].glob("docs/*.md")) for line in file.read_text().split("\n")
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(source), model_writer=model, vocab_size=1200, minloglevel=2,
        user_defined_symbols=["<tool>"], control_symbols=["<turn>"], **options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("options", [LIKE_LLAMA, LIKE_T5], ids=["bpe", "unigram"])
def test_tokens_equal_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    oracle = trained(tmp_path, **options)
    files = read_tokenizer(tmp_path, {}, oracle.vocab_size())
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files.eos_token_id == oracle.eos_id()
    tokenizer = Tokenizer.from_buffer(files.json)
    assert tokenizer.get_vocab_size() == oracle.vocab_size()
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text).ids == [oracle.bos_id(), *ids], text
        if oracle.unk_id() not in ids:
            assert tokenizer.decode(ids).strip() == oracle.decode(ids).strip(), text
    turn = tokenizer.token_to_id("<turn>")
    assert turn in tokenizer.encode("a<turn>b<tool>", add_special_tokens=False).ids
    assert tokenizer.decode([turn]) == ""


def test_configured_ends_and_spaces_are_used(tmp_path: Path) -> None:
    oracle = trained(tmp_path, **LIKE_LLAMA)
    ends = read_tokenizer(tmp_path, {"add_bos_token": False, "add_eos_token": True}, oracle.vocab_size())
    assert Tokenizer.from_buffer(ends.json).encode("a list").ids == [*oracle.encode("a list"), oracle.eos_id()]
    bare = read_tokenizer(tmp_path, {"add_bos_token": False, "add_eos_token": False}, oracle.vocab_size())
    assert Tokenizer.from_buffer(bare.json).encode("a list").ids == oracle.encode("a list")
    spaces = []
    for legacy in (None, False):
        files = read_tokenizer(tmp_path, {"legacy": legacy}, oracle.vocab_size())
        tokens = Tokenizer.from_buffer(files.json).encode("a<turn>b", add_special_tokens=False).tokens
        spaces.append([token.startswith("▁") for token in tokens if token != "<turn>"])
    assert spaces == [[True, True], [True, False]]


def test_a_stream_of_its_tokens_is_its_text(tmp_path: Path) -> None:
    oracle = trained(tmp_path, **LIKE_LLAMA)
    tokenizer = Tokenizer.from_buffer(read_tokenizer(tmp_path, {}, oracle.vocab_size()).json)
    for text in TEXTS:
        ids = oracle.encode(text)
        stream = Vocabulary(tokenizer).new_detokenizer(())
        assert "".join([stream.push(token_id) for token_id in ids]) + stream.flush() == tokenizer.decode(ids)


def test_another_format_under_the_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # tiktoken's, as of the first Llama 3
    with pytest.raises(ModelError, match=r"tokenizer\.model: no SentencePiece model"):
        read_tokenizer(tmp_path, {}, 100)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(ModelError, match=r"tokenizer\.model: no SentencePiece model: "):
        read_tokenizer(tmp_path, {}, 100)
    trained(tmp_path, model_type="char")
    with pytest.raises(ModelError, match="of type CHAR are not implemented"):
        read_tokenizer(tmp_path, {}, 1200)
