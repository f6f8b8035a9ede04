"""Random models that see, as small as they can be, with the tiny model's tokenizer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from ryzanstein.v1 import worker_pb2
from tokenizers import AddedToken, Tokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.cli.stack.default_model import TINY_MODEL
from tests.unit.compute.model.zoo import write_checkpoint

FRAME, PATCH, SQUARE, MOST = 28, 2, 2, 3  # pixels, pixels, patches, frames on a side
FRAME_TOKENS = (FRAME // PATCH // SQUARE) ** 2
_MEAN = [0.4, 0.5, 0.6]
WIDE_PATCH, LEAST_PIXELS, MOST_PIXELS = 4, 512, 7000  # a patch's side, and bounds of frames with any sides
CELL = WIDE_PATCH * SQUARE


@dataclass(frozen=True)
class Seeing:
    """A family of models that see."""

    layout: str
    placeholder: str  # text of chat templates for an image
    row: str  # token of a frame's rows
    special: tuple[str, ...]  # tokens besides these
    resample: str
    name: str = ""  # "": that of the layout

    @property
    def any_sides(self) -> bool:
        """Whether an image is one frame of about its own sides."""
        return self.layout == "qwen2_5_vl"

    @property
    def named(self) -> dict[str, str]:
        """The tokens that processors of transformers look for, by their names."""
        around = dict(zip(("boi_token", "eoi_token"), self.special, strict=True)) if self.layout == "gemma3" else {}
        return {"image_token": self.row, **around}

    @property
    def template(self) -> str:
        return (
            "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n"
            "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
            f"{{% elif part['type'] == 'image' %}}{self.placeholder}{{% endif %}}{{% endfor %}}<|end|>\n{{% endfor %}}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        )

    @property
    def card(self) -> worker_pb2.ImageInput:
        """The images that workers say they take, without the token."""
        if self.any_sides:
            return worker_pb2.ImageInput(
                layout=self.layout,
                frame_tokens=MOST_PIXELS // CELL**2,
                resample=self.resample,
                cell=CELL,
                least_pixels=LEAST_PIXELS,
                most_pixels=MOST_PIXELS,
            )
        splits = self.layout == "idefics3"
        return worker_pb2.ImageInput(
            layout=self.layout,
            frame_tokens=FRAME_TOKENS,
            frame_size=FRAME,
            longest_edge=MOST * FRAME if splits else 0,
            splits=splits,
            resample=self.resample,
        )

    def config(self, text: dict[str, Any], vision: dict[str, Any], token: int) -> transformers.PretrainedConfig:
        common = {"text_config": text, "vision_config": vision, "image_token_id": token, "tie_word_embeddings": False}
        if self.layout == "idefics3":
            text |= {"model_type": "llama"}
            return transformers.Idefics3Config(scale_factor=SQUARE, **common)
        if self.any_sides:
            third, rest = divmod(text["hidden_size"] // text["num_attention_heads"] // 2, 3)
            sections = [third + rest, third, third]
            text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
            vision = {key: vision[key] for key in ("hidden_size", "intermediate_size")}
            vision |= {"depth": 2, "num_heads": 2, "patch_size": WIDE_PATCH, "out_hidden_size": text["hidden_size"]}
            if self.name == "qwen3_vl":
                text.setdefault("head_dim", 12)
                vision |= {"num_position_embeddings": 49, "deepstack_visual_indexes": [0]}
                return transformers.Qwen3VLConfig(**common | {"vision_config": vision})
            vision |= {"window_size": 2 * CELL, "fullatt_block_indexes": [1]}
            return transformers.Qwen2_5_VLConfig(**common | {"vision_config": vision})
        text = {"head_dim": 16, "query_pre_attn_scalar": 16, **text, "sliding_window": 16}
        text |= {"layer_types": ["sliding_attention", "full_attention"]}
        return transformers.Gemma3Config(mm_tokens_per_image=FRAME_TOKENS, **common)

    def image_processor(self) -> Any:
        if self.any_sides:
            size = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
            return Qwen2VLImageProcessorPil(size=size, patch_size=WIDE_PATCH, merge_size=SQUARE, image_mean=_MEAN)
        if self.layout == "gemma3":
            return Gemma3ImageProcessorPil(size={"height": FRAME, "width": FRAME}, image_mean=_MEAN)
        return Idefics3ImageProcessorPil(
            size={"longest_edge": MOST * FRAME}, max_image_size={"longest_edge": FRAME}, image_mean=_MEAN
        )

    def processor(self, folder: Path) -> Any:
        """The model's processor in transformers."""
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=self.named)
        if self.layout == "gemma3":
            return transformers.Gemma3Processor(self.image_processor(), tokenizer, image_seq_length=FRAME_TOKENS)
        return transformers.Idefics3Processor(self.image_processor(), tokenizer, image_seq_len=FRAME_TOKENS)

    def write(self, folder: Path, **shape: int) -> transformers.PreTrainedModel:
        """Write the model's folder, its decoder with another `shape`; returns the equal model of transformers."""
        tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
        special = (self.row, *self.special)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        if self.layout == "gemma3":  # its processor in vLLM merges lines around images
            tokenizer.add_tokens([AddedToken("\n" * n_lines, normalized=False) for n_lines in range(1, 5)])
        text = {"vocab_size": tokenizer.get_vocab_size(), **_TEXT, **shape}
        config = self.config(text, {**_TOWER}, tokenizer.token_to_id(self.row))
        model = write_checkpoint(config, folder)
        with torch.no_grad():
            for token in tokenizer.get_added_tokens_decoder():
                model.lm_head.weight[token] = 0.0  # another token always has a higher logit: greedy answers do not end
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
        settings |= {"chat_template": self.template, "extra_special_tokens": self.named}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.image_processor().save_pretrained(folder)
        return model

    def inputs(self, folder: Path, text: str, images: list[Image.Image]) -> Any:
        """Inputs of transformers' model for a text with images."""
        if not self.any_sides:
            return self.processor(folder)(text=text, images=[images] if images else None, return_tensors="pt")
        # transformers' processor needs torchvision, for videos.
        pixels = self.image_processor().preprocess(images, return_tensors="pt")
        before, *after = text.split(self.row)
        for grid, part in zip(pixels["image_grid_thw"], after, strict=True):
            before += self.row * (int(grid.prod()) // SQUARE**2) + part
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ids = tokenizer(before, return_tensors="pt")["input_ids"]
        return {
            "input_ids": ids,
            "mm_token_type_ids": ids.eq(tokenizer.convert_tokens_to_ids(self.row)).long(),
            **pixels,
        }

    def reference_answer(
        self,
        model: transformers.PreTrainedModel,
        folder: Path,
        text: str,
        images: list[Image.Image],
        n_tokens: int,
        *,
        causal: bool = False,
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens and the greedy answer's, as transformers' processor and model have them.

        `causal`: tokens of Gemma 3's frames attend to those before them alone.
        """
        inputs = self.inputs(folder, text, images)
        if causal:
            inputs.pop("token_type_ids", None)
        if self.any_sides:
            return inputs["input_ids"][0].tolist(), _drawn(model, inputs, n_tokens)
        with torch.inference_mode():
            whole = model.generate(
                **inputs, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, eos_token_id=None
            )
        n_prompt = inputs["input_ids"].shape[1]
        return inputs["input_ids"][0].tolist(), whole[0, n_prompt:].tolist()


def _drawn(model: transformers.PreTrainedModel, inputs: Any, n_tokens: int) -> list[int]:
    """A greedy answer, each token from a whole pass: `generate` places drawn tokens otherwise than the model itself."""
    values, n_prompt = dict(inputs), inputs["input_ids"].shape[1]
    for _ in range(n_tokens):
        with torch.inference_mode():
            drawn = model(**values, use_cache=False).logits[:, -1:].argmax(-1)
        values["input_ids"] = torch.cat((values["input_ids"], drawn), 1)
        values["mm_token_type_ids"] = torch.cat((values["mm_token_type_ids"], torch.zeros_like(drawn)), 1)
    return list(values["input_ids"][0, n_prompt:].tolist())


_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": FRAME,
    "patch_size": PATCH,
}
IDEFICS3 = Seeing(
    "idefics3",
    placeholder="<image>",
    row="<image>",
    special=(
        *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, MOST + 1) for column in range(1, MOST + 1)),
    ),
    resample="lanczos",
)
GEMMA3 = Seeing(
    "gemma3",
    placeholder="<start_of_image>",
    row="<image_soft_token>",
    special=("<start_of_image>", "<end_of_image>"),
    resample="bilinear",
)
QWEN2_5_VL = Seeing(
    "qwen2_5_vl",
    placeholder="<|vision_start|><|image_pad|><|vision_end|>",
    row="<|image_pad|>",
    special=("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    resample="bicubic",
)
QWEN3_VL = replace(QWEN2_5_VL, name="qwen3_vl")
FAMILIES: Mapping[str, Seeing] = {one.name or one.layout: one for one in (IDEFICS3, GEMMA3, QWEN2_5_VL, QWEN3_VL)}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with large and small structures."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(0, 60, (height, width, 3))
    return Image.fromarray((np.asarray(coarse) * 0.75 + noise).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    """A picture in base64."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def question(dialect: str, images: list[Image.Image], text: str, **more: Any) -> dict[str, Any]:
    """A request about pictures in one of the three APIs, by its path."""
    urls = [f"data:image/png;base64,{encoded(image)}" for image in images]
    last: dict[str, Any] = {"type": "text", "text": text}
    if dialect == "responses":
        parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": [*parts, last | {"type": "input_text"}]}], **more}
    if dialect == "messages":
        sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
        parts = [{"type": "image", "source": source} for source in sources]
    else:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, last]}], **more}
