"""Splits of text into words before byte-level BPE merges, by the names of `tokenizer.ggml.pre`. Free of torch.

Every name splits as llama.cpp does, so that a file gives equal ids in both. The expressions are those of the models'
published tokenizers with llama.cpp's readings of them: letters outside of ASCII are upper and lower case at once, and
blanks are in no range of characters. Oniguruma, which the tokenizers library uses, matches them.

Source: `llama-vocab.cpp` and `unicode.cpp` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions that split a text one after the other: matches and the text between them become words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is not built from merges
    add_bos: bool = False  # texts begin with the BOS token, unless the file says otherwise


_SUFFIX = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"  # suffixes of English contractions
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_REST}|{_SPACES}"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}[\r\n]*|{_LINES}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}[\r\n]*|{_LINES}"

_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED}|{_MARKED_WORD}|{_SIGNS}[\r\n]*|{_LINES}"
_WIDE_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
# Cased letters of the Unicode version that DeepSeek LLM lists, without mathematical alphabets.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}]]"
)

_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"


def _by_case(upper: str, lower: str, suffix: str) -> str:
    """Words that change from upper to lower case at most once."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"


_GPT4O_END = rf"\p{{N}}{{1,3}}|{_REST}[\r\n/]*|{_LINES}"
_GPT4O = rf"{_by_case(_UPPER, _LOWER, f'(?:{_SUFFIX})?')}|{_GPT4O_END}"
_GRANITE = _by_case(r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]", f"(?:{_SUFFIX})?")
_ANY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_SUFFIX})?"
_HAN = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}"
    r"\x{2F800}-\x{2FA1F}"
)
_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+"
    rf"|{_CJK}"
)
_BLANKS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three digits, counted from the last
_SUPERBPE = r"\p{N}+?(?=(?:[0-9]{3})+(?![0-9]))"

_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_WHOLE = PreTokenizer((_GPT2,))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA_MERGED = PreTokenizer((_LLAMA3,))
_QWEN = PreTokenizer((_QWEN2,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_O200K = PreTokenizer((_GPT4O,))
_COMMAS = PreTokenizer((_BLOOM,))
_BAILING = PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}[\r\n]*|\s*[\r\n]|{_SPACES}",))
_AYA = PreTokenizer((_FROM_RIGHT, rf"{_ANY_CASE}|{_GPT4O_END}"))
_UNNAMED = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _UNNAMED),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA_MERGED),
    ("jais-2", PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}[\r\n]*|\s*[\r\n]+|{_BLANKS}",))),
    (
        "minicpm5",
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_REST}[\r\n]*|{_LINES}"),
            ignore_merges=True,
        ),
    ),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
                rf"|{_LINES}",
            )
        ),
    ),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_REST}[\r\n]*|{_LINES}",))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _QWEN2))),
    ("seed-coder", PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",))),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"|{_REST}[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        _WHOLE,
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?{_CASED}+",
                r"\s?[!-/:-~！-／：-～\x{2018}-\x{201F}\x{3001}\x{3002}]+",
                r"\s+\z",
                _WIDE_CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE_CJK, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK),
    (
        "spark2_5",
        PreTokenizer(
            (r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}|{_MARKED_WORD}|{_SIGNS}|[\r\n]|{_SPACES}", r"\p{N}"),
        ),
    ),
    (
        "afmoe",
        PreTokenizer((_FROM_RIGHT, _SCRIPTS, _DEEPSEEK3)),
    ),
    (
        "youtu",
        PreTokenizer((_YOUTU, rf"{_ANY_CASE}|\p{{N}}|{_REST}[\r\n/]*|{_LINES}"), ignore_merges=True),
    ),
    ("poro-chat bloom gpt3-finnish", _COMMAS),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "tekken",
        PreTokenizer(
            (rf"{_by_case(_UPPER, _LOWER, '')}|\p{{N}}|{_REST}[\r\n/]*|{_LINES}",),
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K),
    ("granite-embed-multi-97m", PreTokenizer((rf"{_GRANITE}|{_GPT4O_END}",), ignore_merges=True)),
    ("tiny_aya cohere2moe", _AYA),
    (
        "kimi-k2",
        PreTokenizer(
            (
                rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_SUFFIX})?|\p{{N}}{{1,3}}"
                rf"|{_REST}[\r\n]*|{_LINES}",
            )
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", _SUPERBPE))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
)
PRE_TOKENIZERS = {name: split for names, split in _GROUPS for name in names.split()}
