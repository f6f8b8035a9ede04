"""Tokenizers of GGUF files give llama.cpp's ids, for every pre-tokenizer that we name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from services.compute.model.formats.gguf.container import read_container
from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.unit.compute.model.formats.gguf.hard_texts import TEXTS
from tests.unit.compute.model.formats.gguf.llama_cpp import LlamaCpp, write_tiny

NEXT = "<|next|>"  # a whole token between texts, so that one question asks for all of them
CONTROL, OWN, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6
SPECIAL = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "  ": OWN, "<td>": OWN, NEXT: OWN}
# One name of each split; the others of its group are the same object.
SPLITS = {split: name for name, split in reversed(PRE_TOKENIZERS.items())}


def train(spaces: bool) -> dict[str, Any]:
    """BPE whose merges join what every split separates: it is trained on whole texts."""
    tokenizer = Tokenizer(BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not spaces:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = [char for char in alphabet if char not in "ĄÿĔ"]  # bytes that get no token
    trainer = BpeTrainer(
        vocab_size=3000, min_frequency=1, initial_alphabet=[] if spaces else alphabet, show_progress=False
    )
    learned = [text for text in TEXTS if not any(special in text for special in SPECIAL if special.strip())]
    tokenizer.train_from_iterator([text.replace(" ", "▁") if spaces else text for text in learned], trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


@pytest.fixture(scope="module")
def bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary."""
    model = train(spaces=False)
    tokens = [token for token in sorted(model["vocab"], key=model["vocab"].get) if not set(token) & set("ĄÿĔ")]
    merges = [pair for pair in model["merges"] if not set("".join(pair)) & set("ĄÿĔ")]
    return tokens, [" ".join(pair) for pair in merges]


def assert_equal_ids(file: Path) -> Tokenizer:
    """Compare all texts with and without control tokens, and what a text begins and ends with."""
    tokenizer, oracle = hub_files(read_container(file).metadata).tokenizer, LlamaCpp(file)
    for special in (True, False):
        tokenizer.encode_special_tokens = not special
        joined = NEXT.join(TEXTS)
        wanted = oracle.tokenize(joined, special=special, ends=True)
        actual = tokenizer.encode(joined).ids
        for text, left, right in zip(TEXTS, parts(actual, tokenizer), parts(wanted, tokenizer), strict=True):
            assert left == right, (file.name, special, text)
    return tokenizer


def parts(ids: list[int], tokenizer: Tokenizer) -> list[list[str | None]]:
    cut: list[list[str | None]] = [[]]
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token == NEXT:
            cut.append([])
        else:
            cut[-1].append(token)
    return cut


@pytest.mark.parametrize("name", sorted(SPLITS.values()))
def test_byte_level_ids_equal_llama_cpp(name: str, bpe: tuple[list[str], list[str]], tmp_path: Path) -> None:
    tokens = [*SPECIAL, *bpe[0]]

    def describe(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([*SPECIAL.values(), *(NORMAL for _ in bpe[0])])
        writer.add_token_merges(bpe[1])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_eos_token(True)

    assert_equal_ids(write_tiny(tmp_path / f"{name}.gguf", len(tokens), describe))


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece_ids_equal_llama_cpp(prefixed: bool, tmp_path: Path) -> None:
    pieces = sorted(train(spaces=True)["vocab"].items(), key=lambda one: one[1])
    own = {"<unk>": UNKNOWN, **SPECIAL, **{f"<0x{byte:02X}>": BYTE for byte in range(256)}}
    stored = [piece for piece, _ in pieces if not set(piece) & set("日本é")]  # characters that become bytes
    tokens = [*own, *stored]

    def describe(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([*own.values(), *(NORMAL for _ in stored)])
        writer.add_token_scores([-1000.0] * len(own) + [-float(rank) for rank in range(len(stored))])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefixed)

    tokenizer = assert_equal_ids(write_tiny(tmp_path / "spm.gguf", len(tokens), describe))
    for text in ("Hello, world!", "日本語 é 👍🏽"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_word_piece_ids_equal_llama_cpp(tmp_path: Path) -> None:
    special = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL, "[MASK]": CONTROL, NEXT: OWN}
    words = sorted({word.lower() for text in TEXTS for word in text.split() if word.isascii() and word.isalpha()})
    signs = sorted({sign for text in TEXTS for sign in text if not sign.isspace() and not sign.isalpha()})
    begins = [*(f"▁{word[:4]}" for word in words), *(f"▁{sign}" for sign in signs), "▁日", "▁мир", "▁e"]
    inner = [*(word[4:] for word in words if word[4:]), *"aeioust0123456789"]
    tokens = list(dict.fromkeys([*special, *begins, *inner]))

    def describe(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(tokens)
        writer.add_token_types([*special.values(), *(NORMAL for _ in tokens[len(special) :])])
        writer.add_bos_token_id(2)
        writer.add_sep_token_id(3)
        writer.add_unk_token_id(1)
        writer.add_pad_token_id(0)
        writer.add_mask_token_id(4)

    assert_equal_ids(write_tiny(tmp_path / "bert.gguf", len(tokens), describe))
