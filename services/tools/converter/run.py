"""Converts between a GGUF file and a folder of safetensors; what appears under the asked name is always complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from services.common.gguf_files import SUFFIX
from services.compute.model.files import end_tokens
from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.loading.folder import open_folder
from services.compute.model.spec import ModelError
from services.tools.converter.source import Source, open_source
from services.tools.converter.to_gguf import FILE_TYPES, write_gguf
from services.tools.converter.to_safetensors import DTYPES, Report, write_folder
from services.tools.converter.vocabulary_keys import FolderTokenizer, vocabulary_keys

AUTO = "auto"
_BY_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of a conversion."""

    source: Path  # a folder or a GGUF file
    out: Path  # a name that ends with .gguf, or a folder
    kind: str  # type of matrices; AUTO: the source's dtype
    shard_bytes: int = 5 * 10**9
    force: bool = False


def convert(request: ConversionOptions, report: Report) -> None:
    """Convert; calls `report` with the tensors written and their number. Raises ModelError."""
    to_gguf = request.out.suffix == SUFFIX
    allowed = tuple(FILE_TYPES) if to_gguf else tuple(DTYPES)
    if request.kind not in (AUTO, *allowed):
        raise ModelError(f"--type {request.kind}: expected {AUTO} or one of {', '.join(allowed)} for {request.out}")
    if request.source.is_file() == to_gguf:
        wanted = "a folder" if to_gguf else f"a name that ends with {SUFFIX}"
        raise ModelError(f"{request.out}: {request.source} becomes {wanted}")
    if request.out.exists() and not request.force:
        raise ModelError(f"{request.out}: exists already; --force replaces it")
    with open_source(request.source) as source, _replaced(request.out, folder=not to_gguf) as partial:
        kind = _BY_DTYPE[source.hub_spec.dtype] if request.kind == AUTO else request.kind
        if source.gguf is None:
            _to_gguf(source, partial, kind, report)
        else:
            write_folder(source, hub_files(source.gguf.metadata), partial, kind, request.shard_bytes, report)


def _to_gguf(source: Source, out: Path, kind: str, report: Report) -> None:
    spec = source.hub_spec
    folder = open_folder(source.path, vocab_size=spec.vocab_size)
    files = folder.tokenizer
    tokenizer = FolderTokenizer(
        folder.path,
        Tokenizer.from_buffer(files.json),
        files.special_tokens,
        folder.chat_template,
        tuple(dict.fromkeys((*end_tokens(*folder.generation), *spec.eos_token_ids))),
        spec.vocab_size,
    )
    write_gguf(source, vocabulary_keys(tokenizer), folder.sampling, out, kind, report)


@contextmanager
def _replaced(out: Path, *, folder: bool) -> Iterator[Path]:
    """Give a place to write, which takes the name `out` at the end; nothing is left after an error. Raises ModelError.

    What was there is removed last.
    """
    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    try:
        _remove(partial)
        out.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            partial.mkdir()
        yield partial
        _remove(out)
        partial.rename(out)
    except OSError as error:
        raise ModelError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
