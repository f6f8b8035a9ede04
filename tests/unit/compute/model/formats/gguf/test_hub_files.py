"""The metadata of a GGUF file become the files of a hub repository, or a refusal that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.metadata import GgufMetadata, Value
from services.compute.model.formats.gguf.vocabulary import read_vocabulary
from services.compute.model.spec import ModelError

SPM: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.context_length": 2048,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ("<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "<|im_end|>", "<|eot|>", "<|pad|>"),
    "tokenizer.ggml.token_type": (2, 3, 3, 1, 1, 1, 1, 4, 3, 3),
    "tokenizer.ggml.scores": (0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -1.0, 0.0, 0.0, 0.0),
    "tokenizer.ggml.padding_token_id": 9,
    "tokenizer.ggml.eot_token_id": 8,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_templates": ("tool_use",),
    "tokenizer.chat_template.tool_use": "{{ tools }}",
    "general.sampling.temp": 0.6000000238418579,  # as a 32-bit number
    "general.sampling.top_k": 20,
}
BPE: dict[str, Value] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ("a", "b", "ab", "<|eos|>"),
    "tokenizer.ggml.token_type": (1, 1, 1, 3),
    "tokenizer.ggml.merges": ("a b",),
    "tokenizer.ggml.eos_token_id": 3,
}


def metadata(values: dict[str, Value], **changes: Value | None) -> GgufMetadata:
    """Values with some keys of the tokenizer changed, or removed by None."""
    changed = {**values, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return GgufMetadata(Path("m.gguf"), {key: value for key, value in changed.items() if value is not None})


def test_settings_of_the_tokenizer_and_of_generation() -> None:
    files = hub_files(metadata(SPM))
    assert files.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",  # a default of the format
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<|pad|>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": [
            {"name": "default", "template": "{{ messages }}"},
            {"name": "tool_use", "template": "{{ tools }}"},
        ],
    }
    assert files.generation_config == {
        "bos_token_id": 1,
        "pad_token_id": 9,
        "eos_token_id": [2, 8, 7],  # by its key, the turn's by its key, and one that is known by its spelling
        "temperature": 0.6,
        "top_k": 20,
    }
    special = {token.content for token in files.tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == {"<unk>", "<s>", "</s>", "<|im_end|>", "<|eot|>", "<|pad|>"}


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    files = hub_files(metadata(SPM, add_bos_token=False, add_eos_token=True))
    assert files.tokenizer.encode("a").tokens == ["▁a", "</s>"]
    assert (files.tokenizer_config["add_bos_token"], files.tokenizer_config["add_eos_token"]) == (False, True)
    plain = hub_files(metadata(BPE))
    assert plain.tokenizer.encode("ab<|eos|>").ids == [2, 3]
    assert plain.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }


def test_markup_is_no_end_token_except_a_control_token() -> None:
    tokens = ("<unk>", "<s>", "</s>", "a", "<eos>")
    for kind, ends in ((4, [4]), (3, [4, 2])):
        changed = metadata(
            SPM, tokens=tokens, token_type=(2, 3, kind, 1, 3), scores=(0.0,) * 5, eos_token_id=4,
            eot_token_id=None, padding_token_id=None,
        )  # fmt: skip
        assert hub_files(changed).generation_config["eos_token_id"] == ends


def test_the_end_of_a_message_is_no_end_of_a_turn_where_calls_end_turns() -> None:
    for tokens, ends in (
        (("<|end|>", "<|return|>", "<|call|>", "<|eos|>"), [3, 1, 2]),
        (("<|end|>", "b", "ab", "<|eos|>"), [3, 0]),
    ):
        changed = metadata(BPE, tokens=tokens, token_type=(3, 3, 3, 3), merges=("a b",) if "ab" in tokens else ("x",))
        assert read_vocabulary(changed).ends == tuple(ends)


def test_a_special_token_outside_the_vocabulary_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    assert "pad_token" not in hub_files(metadata(SPM, padding_token_id=99)).tokenizer_config
    assert "padding_token_id: 99 is no token; the vocabulary has 10; the file has no pad_token then" in caplog.text


BERT: dict[str, Value] = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": ("[CLS]", "[UNK]", "[SEP]", "a"),
    "tokenizer.ggml.token_type": (3, 2, 3, 1),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 1,
    "tokenizer.ggml.seperator_token_id": 2,
}


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (BPE, {"model": "rwkv"}, "tokenizer.ggml.model: tokenizer 'rwkv' is not implemented; known: bert, gpt2, llama"),
        (BPE, {"model": None}, "tokenizer.ggml.model: missing: expected a text"),
        (BPE, {"pre": "klingon"}, "tokenizer.ggml.pre: pre-tokenizer 'klingon' is not implemented; known: a.x-4.0, "),
        (BPE, {"tokens": None}, "tokenizer.ggml.tokens: missing or empty: the file holds no tokenizer"),
        (BPE, {"tokens": ("a", "b", "ab", "a")}, "tokenizer.ggml.tokens: 'a' is in the list twice"),
        (BPE, {"token_type": (1,)}, "tokenizer.ggml.token_type: 1 values for 4 tokens"),
        (BPE, {"merges": None}, "tokenizer.ggml.merges: missing or empty"),
        (BPE, {"merges": ("a b", "b a")}, "tokenizer.ggml.merges: 'b a': expected two tokens whose join is a token"),
        (BPE, {"eos_token_id": 4}, "tokenizer.ggml.eos_token_id: 4 is no token; the vocabulary has 4"),
        (
            BPE,
            {"add_bos_token": True},
            "tokenizer.ggml.add_bos_token: true, but tokenizer.ggml.bos_token_id is",
        ),
        (BERT, {"seperator_token_id": None}, "tokenizer.ggml.tokens: 4 tokens without a sep_token"),
        (
            BERT,
            {"tokens": ("[CLS]", "[UNK]", "##a", "▁##a"), "token_type": (3, 2, 3, 1)},
            "tokenizer.ggml.tokens: two tokens differ only by a mark of BERT's pieces",
        ),
        (SPM, {"scores": None}, "tokenizer.ggml.scores: missing: the order of merges is unknown"),
        (SPM, {"scores": (0.0, 1.0)}, "tokenizer.ggml.scores: 2 values for 10 tokens"),
    ],
)
def test_refusals_name_the_key(values: dict[str, Value], changes: dict[str, Value | None], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        hub_files(metadata(values, **changes))
    assert str(refused.value).startswith(f"m.gguf: {message}")
