"""Small tokenizers of the two families, trained here so that no file is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. STOP here, and stop there.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Größe, naïve café, señor; 你好，世界。 こんにちは 🙂👍🏽 ∑∫√",
    "User: What is a list? Assistant: A list is a sequence.",
] * 8

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]


def _trained(
    tokenizer: Tokenizer, trainer: Any, vocab_size: int = 200, special: Sequence[str] = ("<unk>", *SPECIAL), **more: Any
) -> Tokenizer:
    settings = {"vocab_size": vocab_size, "special_tokens": [*special], "show_progress": False, **more}
    tokenizer.train_from_iterator(CORPUS, trainer(**settings))
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """GPT-2's family. Ids 0-3 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _trained(tokenizer, trainers.BpeTrainer, 420, SPECIAL, initial_alphabet=alphabet)
    tokenizer.add_tokens([AddedToken("plain added ü", special=False)])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """Llama 2's family: byte fallback, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    _trained(tokenizer, trainers.BpeTrainer, 420, special, limit_alphabet=40)
    # Byte tokens are ordinary tokens in real files, only the others are special.
    reread = Tokenizer.from_str(_without_added_bytes(tokenizer.to_str()))
    reread.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", reread.token_to_id("<|bos|>"))]
    )
    return reread


@cache
def metaspace() -> Tokenizer:
    """T5's family."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer, unk_token="<unk>")


@cache
def wordpiece() -> Tokenizer:
    """BERT's family, which the detokenizer only knows through windows."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _trained(tokenizer, trainers.WordPieceTrainer)


@cache
def suffixed() -> Tokenizer:
    """GPT-1's family: a word's last piece ends in </w>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    return _trained(tokenizer, trainers.BpeTrainer, 300, end_of_word_suffix="</w>")


@cache
def undecorated() -> Tokenizer:
    """No decoder at all: words, joined with blanks."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(tokenizer, trainers.WordLevelTrainer)


def _without_added_bytes(text: str) -> str:
    description = json.loads(text)
    description["added_tokens"] = [t for t in description["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(description)
