"""Builds the tokenizer of a GGUF file with the tokenizers library, which gateways use. Free of torch.

Ids equal those of llama.cpp, with one exception on purpose: text that only spells a control token never becomes one
where control tokens are off, whereas llama.cpp's SentencePiece merges pieces into it.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from services.compute.model.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.compute.model.formats.gguf.vocabulary import PREFIX, GgufVocabulary, TokenType
from services.compute.model.formats.piece_merges import piece_merges

_SPACE = "▁"
_BYTE_TOKEN = "<0x{:02X}>"
_WORD_LIMIT = 1_000_000  # characters of a word; longer ones are unknown, which llama.cpp does not limit


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary. Raises ModelError naming the file and the key."""
    build = _BUILDERS.get(vocabulary.model)
    if build is None:
        known = ", ".join(sorted(_BUILDERS))
        problem = f"tokenizer {vocabulary.model!r} is not implemented; known: {known}"
        raise vocabulary.metadata.error(f"{PREFIX}model", problem)
    tokenizer = build(vocabulary)
    _add_special(tokenizer, vocabulary)
    return tokenizer


def _add_special(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Split texts at control tokens and at the file's own whole tokens before anything else."""
    for special, types in ((True, (TokenType.CONTROL, TokenType.UNKNOWN)), (False, (TokenType.USER_DEFINED,))):
        texts = [vocabulary.tokens[token_id] for token_id in vocabulary.of_type(*types)]
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _set_ends(tokenizer: Tokenizer, vocabulary: GgufVocabulary, first: str | None, last: str | None) -> None:
    """Let texts begin and end with these tokens."""
    if first is None and last is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([first] if first else []), "$A", *([last] if last else [])],
        special_tokens=[(text, vocabulary.ids[text]) for text in {first, last} if text],
    )


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE over bytes, which GPT-2's stand-in characters spell."""
    metadata = vocabulary.metadata
    name = metadata.text(f"{PREFIX}pre", "default") or "default"
    split = PRE_TOKENIZERS.get(name)
    if split is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata.error(f"{PREFIX}pre", f"pre-tokenizer {name!r} is not implemented; known: {known}")
    model = BPE(dict(vocabulary.ids), _listed_merges(vocabulary), ignore_merges=split.ignore_merges)
    tokenizer = Tokenizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if missing := sorted(char for char in pre_tokenizers.ByteLevel.alphabet() if char not in vocabulary.ids):
        # Bytes without a token are left out. What is around them must not be merged.
        absent = "".join(rf"\x{{{ord(char):X}}}" for char in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{absent}]"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    first, last = vocabulary.adds("bos_token", split.add_bos), vocabulary.adds("eos_token", False)
    _set_ends(tokenizer, vocabulary, first, last)
    return tokenizer


def _listed_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    key, ids = f"{PREFIX}merges", vocabulary.ids
    merges: dict[tuple[str, str], None] = {}  # the first of equal ones counts
    for merge in vocabulary.metadata.texts(key):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.metadata.error(key, f"{merge!r}: expected two tokens whose join is a token")
        merges[left, right] = None
    if not merges:
        raise vocabulary.metadata.error(key, "missing or empty: byte-level BPE needs it")
    return list(merges)


def _sentence_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE over characters with the scores of pieces; characters without a token are bytes or unknown."""
    metadata, ids = vocabulary.metadata, vocabulary.ids
    if not vocabulary.scores:
        raise metadata.error(f"{PREFIX}scores", "missing: the order of merges is unknown")
    mergeable = vocabulary.of_type(TokenType.NORMAL, TokenType.UNUSED)
    scores = {vocabulary.tokens[token_id]: vocabulary.scores[token_id] for token_id in mergeable}
    unknown = vocabulary.special.get("unk_token")
    has_bytes = all(_BYTE_TOKEN.format(byte) in ids for byte in range(256))
    unk = None if unknown is None else vocabulary.tokens[unknown]
    tokenizer = Tokenizer(BPE(dict(ids), piece_merges(scores), unk_token=unk, fuse_unk=True, byte_fallback=has_bytes))
    prefixed = metadata.flag(f"{PREFIX}add_space_prefix", True)
    # A space is added at the start of a text and after every special token.
    before = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    _set_ends(tokenizer, vocabulary, vocabulary.adds("bos_token", True), vocabulary.adds("eos_token", False))
    return tokenizer


def _word_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    """BERT's longest pieces of words. The file marks pieces that begin a word, the library those that do not."""
    metadata, special = vocabulary.metadata, vocabulary.special
    missing = [name for name in ("bos_token", "unk_token", "sep_token") if name not in special]
    if missing:
        raise metadata.error(f"{PREFIX}tokens", f"{len(vocabulary.tokens)} tokens without a {missing[0]}")
    pieces = [_as_piece(text, kind) for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise metadata.error(f"{PREFIX}tokens", "two tokens differ only by a mark of BERT's pieces")
    first, last, unknown = (pieces[special[name]] for name in ("bos_token", "sep_token", "unk_token"))
    tokenizer = Tokenizer(WordPiece(ids, unk_token=unknown, max_input_chars_per_word=_WORD_LIMIT))
    lowercase = metadata.flag(f"{PREFIX}normalizer.lowercase", True)
    strip = metadata.flag(f"{PREFIX}normalizer.strip_accents", lowercase)
    blanks = normalizers.Replace(Regex(r"[\x0B\x0C\x{85}]"), " ")  # control characters for the library
    tokenizer.normalizer = normalizers.Sequence([blanks, normalizers.BertNormalizer(True, True, strip, lowercase)])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _set_ends(tokenizer, vocabulary, first, last)
    return tokenizer


def _as_piece(text: str, kind: int) -> str:
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
        return text
    return text.removeprefix(_SPACE) if text.startswith(_SPACE) else f"##{text}"


_BUILDERS: dict[str, Callable[[GgufVocabulary], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "bert": _word_piece,
}
