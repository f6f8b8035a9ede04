"""Incremental detokenization: the joined pieces equal the decoding of all ids at once.

Text is held back while later ids can still change it: an unfinished UTF-8 sequence, or a run of sentencepiece byte
tokens, which is text only if the whole run is valid.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenizers import Tokenizer

from services.gateway.text.pieces import ByteLevelScheme, SentencePieceScheme, read_scheme

_CONTEXT = 8  # ids
_LOOKED_AT = 64  # ids, including special ones
_NEUTRAL = "a"  # a whole word in every vocabulary
_REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """Produces the text of one generated sequence, piece by piece."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that this id makes final; may be empty."""

    def push_all(self, ids: Sequence[int]) -> str:
        """The text that these ids make final."""
        return "".join(map(self.push, ids))

    @abstractmethod
    def flush(self) -> str:
        """The text that was held back, at the end of the sequence."""


class ByteLevelDetokenizer(Detokenizer):
    """Decodes bytes as UTF-8, incrementally; invalid bytes become U+FFFD as in Rust's lossy decoding."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.byte_pieces
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        return self._decode(self._pieces[token_id])

    def push_all(self, ids: Sequence[int]) -> str:
        """See :class:`Detokenizer`."""
        return self._decode(b"".join(map(self._pieces.__getitem__, ids)))

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._decode(b"", True)


class SentencePieceDetokenizer(Detokenizer):
    """Passes text tokens on, holds a run of byte tokens until it ends, and strips the text's leading space."""

    def __init__(self, vocabulary: Vocabulary, scheme: SentencePieceScheme, *, continues: bool) -> None:
        self._vocabulary = vocabulary
        self._pieces = vocabulary.text_pieces
        self._scheme = scheme
        self._first = not continues
        self._strip = 0 if continues else scheme.strip_start
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        if self._first:
            token = self._vocabulary.token(token_id)
            if token is None:
                return ""
            self._first = False
            piece: str | int | None = self._scheme.first_piece(token)
        else:
            piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._stripped(self._end_run() + piece)

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDetokenizer(Detokenizer):
    """For unknown decoders: decodes a window of ids with and without the new ones, and emits the difference."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = list(context)
        self._n_emitted = len(context)  # window[:n_emitted] was emitted, or precedes the text

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        self._window.append(token_id)
        text = self._decode(self._window)
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._emit(self._decode(self._window))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _emit(self, text: str) -> str:
        emitted = self._decode(self._window[: self._n_emitted])
        if len(text) == len(emitted):
            return ""  # a token without text does not affect the next one
        self._window = self._window[self._n_emitted :] if self._n_emitted else self._window
        self._n_emitted = len(self._window)
        return text[len(emitted) :]


Piece = TypeVar("Piece")


class _Pieces(dict[int, Piece]):
    """id -> what `read` makes of its token, or `without` for an id without text; filled on first use."""

    def __init__(self, vocabulary: Vocabulary, read: Callable[[str], Piece], without: Piece) -> None:
        self._vocabulary, self._read, self._without = vocabulary, read, without

    def __missing__(self, token_id: int) -> Piece:
        token = self._vocabulary.token(token_id)
        piece = self[token_id] = self._without if token is None else self._read(token)
        return piece


class Vocabulary:
    """The decoder of one tokenizer, shared by all sequences of a model."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._scheme = read_scheme(tokenizer)
        self._special = frozenset(
            token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.byte_pieces: dict[int, bytes] = {}
        self.text_pieces: dict[int, str | int | None] = {}
        if isinstance(self._scheme, ByteLevelScheme):
            self.byte_pieces = _Pieces(self, self._scheme.piece, b"")
        elif isinstance(self._scheme, SentencePieceScheme):
            self.text_pieces = _Pieces(self, self._scheme.piece, None)

    def token(self, token_id: int) -> str | None:
        """The token in the vocabulary's spelling; None for ids without text: unknown ids and skipped special tokens."""
        if self._skip_special and token_id in self._special:
            return None
        return self._tokenizer.id_to_token(token_id)

    def new_detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one sequence; `after`: the ids that precede it."""
        if isinstance(self._scheme, ByteLevelScheme):
            return ByteLevelDetokenizer(self)
        if isinstance(self._scheme, SentencePieceScheme):
            return SentencePieceDetokenizer(self, self._scheme, continues=bool(after))
        return WindowDetokenizer(self._tokenizer, self._context(after), skip_special_tokens=self._skip_special)

    def _inside(self, token: str) -> str:
        """The text that a token adds inside a text."""
        decoder = self._tokenizer.decoder
        if decoder is None:
            return f" {token}"  # without a decoder, the tokenizers library joins tokens with blanks
        before, both = decoder.decode([_NEUTRAL]), decoder.decode([_NEUTRAL, token])
        return both[len(before) :] if both.startswith(before) else token

    def _context(self, before: Sequence[int]) -> list[int]:
        """The last ids with text; they decide whether a space or a prefix comes first."""
        tail = [token_id for token_id in before[-_LOOKED_AT:] if self.token(token_id) is not None]
        return tail[-_CONTEXT:]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a single token; the spelling of a special token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return token.encode()
        if self._scheme is None:
            return self._inside(token).encode()
        piece = self._scheme.piece(token)
        if isinstance(piece, int):
            return bytes([piece])
        return piece if isinstance(piece, bytes) else piece.encode()
