"""Quantizes a checkpoint: a survey that chooses bits, then every layer, on the rows of the quantized layers below it.

Only one layer is in memory at a time. Finished layers are on disk, and a run that was killed continues after them: its
rows pass the finished layers as they are stored, which is what an uninterrupted run also computes.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.common.hub import UNWANTED, WANTED
from services.compute.backends.base import Attention, ModelBackend
from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.backends.weights import Stacked
from services.compute.model.build import attention_shape, build_decoder, load_layer, open_checkpoint
from services.compute.model.decoder import DecoderLayer
from services.compute.model.families.config import Config
from services.compute.model.families.sizes import logical_shape, read_shapes
from services.compute.model.formats.grids import GridReader
from services.compute.model.formats.registry import read_layouts
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layout import Layout
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.loading.folder import ModelFolder, open_folder
from services.compute.model.loading.tokenizer import TokenizerFiles
from services.compute.model.shard import Shard
from services.compute.model.spec import ModelError, ModelSpec
from services.tools.program import Progress
from services.tools.quantizer.activations import ActivationRecorder, RecordingLoader
from services.tools.quantizer.calibration import digest, read_texts, sequences
from services.tools.quantizer.choice import Candidate, choose
from services.tools.quantizer.folder import RECORD, PartialFolder
from services.tools.quantizer.layer import (
    LayerTask,
    LayerTensors,
    QuantizedLayer,
    Shapes,
    quantize_layer,
    read_layer,
    relative_error,
)
from services.tools.quantizer.methods.registry import METHODS
from services.tools.quantizer.methods.rtn import RoundToNearest
from services.tools.quantizer.scheme import Scheme
from services.tools.quantizer.storing import quantization_config, store_linears, store_whole
from services.tools.quantizer.stream import Stream
from services.tools.quantizer.target import QuantizationTarget
from services.tools.quantizer.units import Unit, units

_BYTES = Scheme(8, 0, symmetric=True)  # scheme of the head and of layers with more bits
_UNROUNDED = ("router", "shared_gate")  # units of a mixture whose products choose and weigh experts
_INSTEAD = "`ryzanstein up MODEL --quantization int8` (or int4) rounds its weights while they load"
_RTN = "rtn"
_CONFIG = "config.json"
_HEAD = "lm_head"  # the module of a tied head in transformers
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_LICENCES = ("LICENSE*", "NOTICE*")


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """The options of a quantization."""

    model: Path
    out: Path
    method: str
    bits: int
    group: int | None  # None: one for each output with 8 bits, else the largest of 128, 64, 32 that divides all inputs
    extra: float  # share of bytes that may be added to store some layers in 8 bits
    symmetric: bool  # with 4 bits; False: a zero for each group
    calibration: Path | None
    samples: int
    length: int


def quantize(request: QuantizationOptions, device: torch.device, progress: Progress) -> str:
    """Write the quantized checkpoint; returns a note about it, "" for none. Raises ModelError."""
    if not request.model.is_dir():
        raise ModelError(
            f"{request.model}: GGUF is not quantized; allowed: a folder of safetensors, such as that which "
            f"`ryzanstein convert {request.model} DIR` writes, or a hub id"
        )
    model = open_folder(request.model)
    with torch.inference_mode(), open_checkpoint(model.description, torch.float32) as (_, source):
        work = _Work.prepare(request, model, source, open_backend(torch.float32, device))
        folder = PartialFolder(request.out, model.spec.n_layers + 1)
        with folder.locked():
            record = folder.begin(work.description())
            if request.extra and request.bits < _BYTES.bits:
                work.survey(folder, record, progress)
            schemes = work.schemes(record)
            work.quantize_layers(folder, record, schemes, progress)
            work.finish(folder, record, schemes)
            return work.note(record)


@dataclass(frozen=True, slots=True)
class _Work:
    """One run; everything that its layers share."""

    request: QuantizationOptions
    spec: ModelSpec
    source: Checkpoint
    target: QuantizationTarget
    backend: ModelBackend
    attention: Attention[Any]
    shapes: Shapes
    ids: Tensor  # [n_sequences, length]
    text: str  # hash of the calibration's texts
    usual: Scheme
    dtype: torch.dtype  # dtype of stored scales

    @classmethod
    def prepare(
        cls, request: QuantizationOptions, model: ModelFolder, source: Checkpoint, backend: ModelBackend
    ) -> _Work:
        """Check the request and read the calibration. Raises ModelError."""
        spec, family = model.spec, model.description.family
        if spec.bidirectional:
            raise ModelError(f"{request.model}: an encoder, the family {spec.family}, is not quantized; {_INSTEAD}")
        if spec.latent is not None or spec.sub_norm or spec.activation == "xielu" or spec.has_state:
            raise ModelError(f"{request.model}: the family {spec.family} is not quantized; {_INSTEAD}")
        sizes = read_shapes(model.config, family, spec)

        def shapes(key: str) -> tuple[int, ...]:
            return tuple(size.value for size in logical_shape(key, sizes))

        target = QuantizationTarget.of(request.model, source, family, spec)
        stored = frozenset(source)
        keys = [key for index in range(spec.n_layers) for unit in units(spec, index, stored) for key in unit.keys]
        for key in keys:
            try:
                target.place(key, shapes(key)[0])
            except ModelError as error:
                raise ModelError(f"{error}; {_INSTEAD}") from error
        if request.length > spec.max_positions:
            raise ModelError(f"--length {request.length}: the model was made for {spec.max_positions} positions")
        texts = read_texts(request.calibration)
        return cls(
            request,
            spec,
            source,
            target,
            backend,
            backend.attention(attention_shape(spec, LinearLoader(source, SingleRank(), backend))),
            shapes,
            _read_ids(request, model.tokenizer, texts),
            digest(texts),
            _usual_scheme(
                request, {shapes(key)[1] for key in keys}, mixed=any(layer.moe is not None for layer in spec.layers)
            ),
            getattr(torch, spec.dtype),
        )

    def description(self) -> dict[str, Any]:
        """Return all that the result depends on."""
        paths = ("model", "out", "calibration")
        options = {key: value for key, value in asdict(self.request).items() if key not in paths}
        sizes = {file.name: file.stat().st_size for file in sorted(self.request.model.glob("*.safetensors"))}
        model = sha256((self.request.model / _CONFIG).read_bytes() + json.dumps(sizes).encode()).hexdigest()
        return {"model": model, "calibration": self.text, **options, "group": self.usual.group}

    def survey(self, folder: PartialFolder, record: dict[str, Any], progress: Progress) -> None:
        """Record the relative errors of every unit, rounded to both numbers of bits, on the model's own rows."""
        done = len(record["survey"])
        if done == self.spec.n_layers:
            return
        stream = self._stream()
        method = RoundToNearest()
        for index in range(self.spec.n_layers):
            progress("survey", index, self.spec.n_layers)
            if index < done:
                stream.advance(self._load(self.source, index))
                continue
            recorder, errors = ActivationRecorder(), {}
            stream.advance(self._recording(index, recorder, routed=False), recorder.begin)
            tensors = self._read(index)
            for unit in self._units(index):
                inputs = None if unit.mixed else recorder.take(unit.keys)
                if inputs is None:
                    continue
                weight = tensors.stacked(unit)
                made = (method.rounded(weight, scheme, self.dtype) for scheme in (self.usual, _BYTES))
                errors[unit.name] = [relative_error(weight, quantized, inputs) for quantized in made]
            record["survey"].append(errors)
            folder.record(record)

    def schemes(self, record: dict[str, Any]) -> dict[str, Scheme]:
        """Return the scheme of every unit, by its layer and name."""
        names = {f"{index}.{unit.name}": unit for index in range(self.spec.n_layers) for unit in self._units(index)}
        if not record["survey"]:
            return dict.fromkeys(names, self.usual)
        candidates = {}
        for name, unit in names.items():
            surveyed = record["survey"][int(name.partition(".")[0])]
            errors = surveyed.get(unit.name, (0.0, 0.0))  # experts get no more bits
            sizes = [self._bytes(unit, scheme) for scheme in (self.usual, _BYTES)]
            candidates[name] = Candidate(*errors, *sizes)
        chosen = choose(candidates, self.request.extra)
        return {name: _BYTES if name in chosen else self.usual for name in names}

    def quantize_layers(
        self, folder: PartialFolder, record: dict[str, Any], schemes: dict[str, Scheme], progress: Progress
    ) -> None:
        """Write all layers that are not written yet."""
        n_layers, method = self.spec.n_layers, METHODS[self.request.method]
        if all(folder.has(index) for index in range(n_layers)):
            return
        stream = self._stream() if method.calibrated else None
        layouts = read_layouts(Config(self._described(schemes), folder.path / _CONFIG))
        for index in range(n_layers):
            progress("quantize", index, n_layers)
            if not folder.has(index):
                seen = None if stream is None else self._look(stream, index)
                tasks = [
                    LayerTask(unit, None if seen is None else seen.take(unit.keys), schemes[f"{index}.{unit.name}"])
                    for unit in self._units(index)
                ]
                made = quantize_layer(self._read(index), tasks, method, self.dtype, self.spec.norm_offset)
                # An ended process may have recorded this layer without listing its file.
                record["layers"][index:] = [{task.unit.name: self._entry(task, made) for task in tasks}]
                folder.record(record)
                folder.add(index, store_linears(made.linears, self.target) | store_whole(made.whole, self.target))
            if stream is not None and index + 1 < n_layers:
                stream.advance(self._finished(folder, index, layouts))
        progress("quantize", n_layers, n_layers)

    def _entry(self, task: LayerTask, made: QuantizedLayer) -> list[Any]:
        """Return what is recorded of a unit: its bits, its relative error or None, the method."""
        name = task.unit.name
        return [task.scheme.bits, made.errors.get(name), _RTN if name in made.rounded else self.request.method]

    def note(self, record: dict[str, Any]) -> str:
        """Return how many units of experts were rounded to nearest because they saw too few rows; "" if none was."""
        mixed = [unit.name for index in range(self.spec.n_layers) for unit in self._units(index) if unit.mixed]
        entries = [entry for layer in record["layers"] for entry in layer.values()]
        n_rounded = sum(entry[-1] == _RTN != self.request.method for entry in entries)
        if not n_rounded:
            return ""
        return (
            f"{n_rounded} of {len(mixed)} sets of experts' matrices saw too few tokens for {self.request.method} and "
            f"were rounded to nearest; more --samples help, {RECORD} names them"
        )

    def finish(self, folder: PartialFolder, record: dict[str, Any], schemes: dict[str, Scheme]) -> None:
        """Write what is in no layer, the configuration and the model's other files."""
        tensors = self._outside()
        if self._quantizes_head():
            made = RoundToNearest().rounded(self._dense("head"), self._head_scheme(), self.dtype)
            tensors |= store_linears({"head": made}, self.target)
        folder.add(self.spec.n_layers, tensors)
        _copy_files(self.request.model, folder.path)
        config = json.loads((self.request.model / _CONFIG).read_text())
        config.pop("compression_config", None)
        folder.write_json(_CONFIG, config | self._described(schemes))
        folder.publish()

    def _described(self, schemes: dict[str, Scheme]) -> dict[str, Any]:
        """Return the part of config.json that says how the modules are stored."""
        modules = {
            self.target.module(key): schemes[f"{index}.{unit.name}"]
            for index in range(self.spec.n_layers)
            for unit in self._units(index)
            for key in unit.keys
        }
        ignored = [self.target.module(key) for key in self.target.refs if key.rpartition(".")[2] in _UNROUNDED]
        head = self.target.module("head")
        if self._quantizes_head():
            modules[head] = self._head_scheme()
        else:
            ignored.append(_HEAD if self.spec.tied else head)
        return {"quantization_config": quantization_config(modules, self.usual, ignored)}

    def _outside(self) -> dict[str, Tensor]:
        """Return the tensors that are in no layer and stay as they are; a tied table once."""
        tensors: dict[str, Tensor] = {}
        for key in self.source:
            if key.startswith("layers.") or (key == "head" and self._quantizes_head()):
                continue
            shape = self.shapes(key)
            if len(shape) == 1:
                tensors |= store_whole({key: self.source.vector(key, shape[0])}, self.target)
            elif key != "head" or not self.source.is_one("embed", "head"):
                tensors |= store_whole({key: self._dense(key).to(self.dtype)}, self.target)
        return tensors

    def _dense(self, key: str) -> Tensor:
        n_out, n_in = self.shapes(key)
        weight = self.source.weight(Shard.whole(key, (n_out, n_in)))
        return Stacked((weight,)).dense(torch.float32, torch.device("cpu"))

    def _quantizes_head(self) -> bool:
        """Whether the head is a layer of its own; a tied one is the embedding, which is only looked up."""
        return self.spec.generates and not self.spec.tied and not self.source.is_one("embed", "head")

    def _head_scheme(self) -> Scheme:
        return self.usual if self.usual.bits == _BYTES.bits else _BYTES

    def _read(self, index: int) -> LayerTensors:
        return read_layer(self.source, index, self._units(index), self.shapes, self.backend.device, self.dtype)

    def _units(self, index: int) -> tuple[Unit, ...]:
        return units(self.spec, index, frozenset(self.source))

    def _bytes(self, unit: Unit, scheme: Scheme) -> int:
        return sum(scheme.bytes(*self.shapes(key)) for key in unit.keys)

    def _stream(self) -> Stream:
        load = LinearLoader(self.source, SingleRank(), self.backend)
        frame = build_decoder(self.spec, load, self.request.length, layers=())
        return Stream(frame, self.ids, self.backend.device)

    def _load(self, source: Checkpoint, index: int) -> DecoderLayer:
        return load_layer(self.spec, LinearLoader(source, SingleRank(), self.backend), index, self.attention)

    def _recording(self, index: int, recorder: ActivationRecorder, *, routed: bool) -> DecoderLayer:
        """Load a layer whose linear layers' inputs are recorded, those of experts if `routed`."""
        load = RecordingLoader(self.source, SingleRank(), self.backend, recorder, routed)
        return load_layer(self.spec, load, index, self.attention)

    def _look(self, stream: Stream, index: int) -> ActivationRecorder:
        """Let the model's own layer see the rows before it."""
        recorder = ActivationRecorder()
        stream.look(self._recording(index, recorder, routed=True), recorder.begin)
        return recorder

    def _finished(self, folder: PartialFolder, index: int, layouts: tuple[Layout, ...]) -> DecoderLayer:
        """Load a layer as it is written, as a worker does."""
        refs = {key: ref for key, ref in self.target.refs.items() if key.startswith(f"layers.{index}.")}
        with closing(TensorFiles(folder.path)) as files:
            readers = tuple(GridReader(files, layout) for layout in layouts)
            written = Checkpoint(files, refs, ignored=("*",), quantized=readers)
            return self._load(written, index)


def _read_ids(request: QuantizationOptions, files: TokenizerFiles, texts: list[str]) -> Tensor:
    tokenizer = Tokenizer.from_buffer(files.json)
    bos = files.special_tokens.get("bos_token")
    start = None if bos is None else tokenizer.token_to_id(bos)
    return sequences(texts, tokenizer, start, request.samples, request.length)


def _usual_scheme(request: QuantizationOptions, inputs: set[int], *, mixed: bool) -> Scheme:
    """Return the scheme of most layers, whose numbers of inputs are `inputs`. Raises ModelError.

    `mixed`: with experts, which other programs read packed only.
    """
    possible = [size for size in (128, 64, 32) if all(n % size == 0 for n in inputs)]
    group = request.group
    if group is None:
        if request.bits == 4 and not possible:
            raise ModelError(f"{request.model}: none of the groups 128, 64, 32 divides all of {sorted(inputs)} inputs")
        group = 0 if request.bits == 8 else possible[0]
    if group and group not in possible:
        allowed = ", ".join(map(str, possible)) or "none"
        raise ModelError(f"--group {group}: does not divide all of {sorted(inputs)} inputs; allowed: {allowed}")
    return Scheme(request.bits, group, symmetric=request.bits == 8 or request.symmetric, packed=mixed)


def _copy_files(model: Path, to: Path) -> None:
    """Copy tokenizer, template, settings of generation and licences; weights and config.json are written anew."""
    for file in sorted(model.iterdir()):
        wanted = any(fnmatchcase(file.name, pattern) for pattern in (*WANTED, *_LICENCES))
        written = file.name == _CONFIG or any(fnmatchcase(file.name, pattern) for pattern in (*UNWANTED, *_WEIGHTS))
        if file.is_file() and wanted and not written:
            shutil.copyfile(file, to / file.name)
