"""Converts SentencePiece models of older checkpoints to the tokenizers library, which gateways use."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]  # made at its import
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from services.compute.model.files import refuse_pointer
from services.compute.model.formats.piece_merges import piece_merges
from services.compute.model.spec import ModelError

_SPACE = "▁"
_Piece = ModelProto.SentencePiece
_MARKED = (_Piece.CONTROL, _Piece.UNKNOWN)


def read_sentencepiece(file: Path, *, legacy: bool, add_bos: bool, add_eos: bool) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a `tokenizer.model`, and its special tokens by name; raises ModelError naming the file.

    `legacy`: a space is added to the text after every special token, not only at the start.
    """
    refuse_pointer(file)
    try:
        proto = ModelProto.FromString(file.read_bytes())
    except DecodeError as error:
        raise ModelError(f"{file}: no SentencePiece model: {error}") from error
    if not proto.pieces:
        raise ModelError(f"{file}: no SentencePiece model: it has no pieces")
    tokenizer = Tokenizer(_model(file, proto))
    _set_spaces(tokenizer, proto, legacy=legacy)
    marked = [AddedToken(p.piece, special=True, normalized=False) for p in proto.pieces if p.type in _MARKED]
    tokenizer.add_special_tokens(marked)
    own = [AddedToken(p.piece, normalized=False) for p in proto.pieces if p.type == _Piece.USER_DEFINED]
    tokenizer.add_tokens(own)
    special = _special_tokens(proto)
    _set_ends(tokenizer, special, [name for name, add in (("bos_token", add_bos), ("eos_token", add_eos)) if add])
    return tokenizer, special


def _model(file: Path, proto: ModelProto) -> BPE | Unigram:
    byte_fallback = any(piece.type == _Piece.BYTE for piece in proto.pieces)
    unknown = next((index for index, piece in enumerate(proto.pieces) if piece.type == _Piece.UNKNOWN), None)
    kind = proto.trainer_spec.model_type
    if kind == TrainerSpec.UNIGRAM:
        return Unigram([(piece.piece, piece.score) for piece in proto.pieces], unknown, byte_fallback)
    if kind == TrainerSpec.BPE:
        vocabulary = {piece.piece: index for index, piece in enumerate(proto.pieces)}
        unk = None if unknown is None else proto.pieces[unknown].piece
        merges = piece_merges({piece.piece: piece.score for piece in proto.pieces if piece.type == _Piece.NORMAL})
        return BPE(vocabulary, merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)
    raise ModelError(f"{file}: SentencePiece models of type {TrainerSpec.ModelType.Name(kind)} are not implemented")


def _set_spaces(tokenizer: Tokenizer, proto: ModelProto, *, legacy: bool) -> None:
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and legacy:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if spec.add_dummy_prefix and not legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else back)


def _special_tokens(proto: ModelProto) -> dict[str, str]:
    trained = proto.trainer_spec
    known = {piece.piece for piece in proto.pieces if piece.type in _MARKED}
    named = {"bos_token": trained.bos_piece, "eos_token": trained.eos_piece, "unk_token": trained.unk_piece}
    return {name: text for name, text in named.items() if text in known}


def _set_ends(tokenizer: Tokenizer, special: dict[str, str], names: list[str]) -> None:
    """Let texts begin or end with the named tokens that the model has."""
    ends = {name: special[name] for name in names if name in special}
    if not ends:
        return
    before = f"{ends['bos_token']} " if "bos_token" in ends else ""
    after = f" {ends['eos_token']}" if "eos_token" in ends else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in ends.values()],
    )
