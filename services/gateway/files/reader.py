"""The files of a conversation, as texts of its messages: PDFs and texts in UTF-8."""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from msgspec.structs import replace

from services.gateway.api.chat import Part, Turn
from services.gateway.api.files import PDF, GivenFile
from services.gateway.api.ignored import Ignored
from services.gateway.api.parts import stand_in
from services.gateway.errors import ApiError, invalid
from services.gateway.files.pdf_limits import ENCRYPTED, MAX_CHARS, TOO_LONG

MAX_FILES = 32  # in a request
_LONGEST_S = 30.0
_MARK, _HEAD = b"%PDF-", 1024  # a PDF says that it is one within its first bytes
_REASONS = {
    ENCRYPTED: "it is a PDF with a password.",
    TOO_LONG: f"it has more than {MAX_CHARS} characters of text.",
}


@dataclass(slots=True)
class _KnownTexts:
    """Texts of the last files by their digests: a conversation brings its files again with every turn."""

    most_chars: int = 16_000_000
    _texts: OrderedDict[bytes, str] = field(default_factory=OrderedDict)

    def get(self, digest: bytes) -> str | None:
        """The text of a file, if it is known."""
        return self._texts.get(digest)

    def add(self, digest: bytes, text: str) -> None:
        """Remember a text."""
        self._texts[digest] = text
        while sum(map(len, self._texts.values())) > self.most_chars:
            self._texts.popitem(last=False)


class FileReader:
    """Reads the files of requests, PDFs one at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._known = _KnownTexts()
        self._turn = asyncio.Semaphore(1)

    async def read(self, turns: Sequence[Turn], ignored: Ignored) -> Sequence[Turn]:
        """The turns with texts in place of files; raises :class:`ApiError` (400) for a new file that is none.

        Notes stand in for those of a history that cannot be read, which `ignored` gets.
        """
        files = [part for turn in turns for part in turn.parts if isinstance(part, GivenFile)]
        if not files:
            return turns
        if len(files) > MAX_FILES:
            where = files[MAX_FILES].field
            message = f"`{where}`: a request may have at most {MAX_FILES} files, got {len(files)}."
            raise invalid(message, where, "too_many_files")
        return [replace(turn, parts=[await self._part(part, ignored) for part in turn.parts]) for turn in turns]

    async def _part(self, part: Part, ignored: Ignored) -> Part:
        if not isinstance(part, GivenFile):
            return part
        try:
            text = await self._text(part)
        except ApiError:
            if part.new:
                raise
            return stand_in(part.part, part.place, ignored)
        return f"[File {part.name}]\n{text}\n[End of file {part.name}]"

    async def _text(self, given: GivenFile) -> str:
        """The text of a file; raises :class:`ApiError` (400)."""
        data, digest = await asyncio.to_thread(_read, given)
        text = self._known.get(digest)
        if text is None:
            is_pdf = _MARK in data[:_HEAD]
            text = await (self._pdf(data, given) if is_pdf else asyncio.to_thread(_plain, data, given))
            self._known.add(digest, text)
        return text

    async def _pdf(self, data: bytes, given: GivenFile) -> str:
        async with self._turn:
            status, written = await _run(data)
        if status:  # a killed process may have ended within a character
            raise given.refused(_REASONS.get(status, "it is a broken PDF, or one that takes too long or too much."))
        text = written.decode().strip()
        if not text:
            raise given.refused("it is a PDF without text, as scans are; send its pages as images.")
        return text


def _read(given: GivenFile) -> tuple[bytes, bytes]:
    """The bytes of a file, and their digest; raises :class:`ApiError` (400)."""
    media, encoded = given.encoded()
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise given.refused("its data are no base64.") from error
    if media == PDF and _MARK not in data[:_HEAD]:
        raise given.refused("it is no PDF.")
    return data, sha256(data).digest()


async def _run(data: bytes) -> tuple[int, bytes]:
    """The exit status of the process that reads a PDF, and what it wrote; the status is negative if it was killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway.files.pdf",
        stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the gateway
    )  # fmt: skip
    try:
        async with asyncio.timeout(_LONGEST_S):
            written, _ = await process.communicate(data)
    except TimeoutError:
        return -1, b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, written


def _plain(data: bytes, given: GivenFile) -> str:
    """The text that a file is; raises :class:`ApiError` (400)."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise given.refused("it is neither a PDF nor a text in UTF-8.") from error
    if "\0" in text:
        raise given.refused("it is neither a PDF nor a text in UTF-8.")
    if len(text) > MAX_CHARS:
        raise given.refused(_REASONS[TOO_LONG])
    return text
