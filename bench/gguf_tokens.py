"""Ids of a GGUF file's tokenizer, by this worker and by llama.cpp, on texts and files; exit status 1 if one differs.

    python -m bench.gguf_tokens FILE.gguf [TEXT_FILE ...]

Texts are compared with and without control tokens. Needs the package `xllamacpp`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx
import xllamacpp
from tokenizers import Tokenizer

from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.formats.gguf.parts import read_gguf
from services.tools.converter.probe_texts import PROBES


def main() -> int:
    """Compare, and print each text whose ids differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.gguf_tokens")
    parser.add_argument("file", type=Path)
    parser.add_argument("texts", type=Path, nargs="*")
    asked = parser.parse_args()
    tokenizer = hub_files(read_gguf(asked.file).metadata).tokenizer
    server = _open(asked.file)
    spelled = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:200]
    texts = [*PROBES, " ".join(spelled), "".join(spelled), *(" " * n + "x" + "\n" * n for n in (1, 2, 7, 40))]
    texts += [path.read_text() for path in asked.texts]
    n_different = sum(_differs(server, tokenizer, text, special) for text in texts for special in (True, False))
    print(f"{n_different} of {2 * len(texts)} differ")
    return int(n_different > 0)


def _open(file: Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.verbosity = str(file), 64, False, -1
    return xllamacpp.Server(params)


def _differs(server: xllamacpp.Server, tokenizer: Tokenizer, text: str, special: bool) -> bool:
    tokenizer.encode_special_tokens = not special
    found = tokenizer.encode(text).ids
    asked = {"content": text, "parse_special": special, "add_special": True}
    wanted = (
        httpx.post(f"{server.listening_address}/tokenize", json=asked, timeout=600).raise_for_status().json()["tokens"]
    )
    if found == wanted:
        return False
    first = next((n for n, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), -1)
    ours, theirs = ([tokenizer.id_to_token(token) for token in ids[first:][:6]] for ids in (found, wanted))
    print(
        f"control tokens {'on' if special else 'off'}, {text[:60]!r}: from token {first} on {ours}, llama.cpp {theirs}"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
