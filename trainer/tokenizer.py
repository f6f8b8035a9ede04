"""The byte-level BPE tokenizer: trained on the corpus, written in Hugging Face's file format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *ROLE_TOKENS)

# In order: a run of two or more blanks (an indentation is one token), newlines, a word with the one blank or mark
# before it, a single digit (numbers then have one spelling), a run of marks, any blank that is left.
WORDS = r"[ \t]{2,}|\n+|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] not in ('system', 'user', 'assistant') %}
{{- raise_exception("role must be 'system', 'user' or 'assistant', not '" + message['role'] + "'") }}
{%- endif %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of exactly `vocab_size` tokens; any text round-trips, as all 256 bytes are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus is too small: it gave {tokenizer.get_vocab_size()} of {vocab_size} tokens")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token.

    Raises `ValueError` when the tokenizer does not have it.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return found


def render_turn(role: str, content: str) -> str:
    """One message as the chat template renders it."""
    return f"<|{role}|>\n{content}{END_OF_TURN}\n"


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_positions: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(ROLE_TOKENS),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
