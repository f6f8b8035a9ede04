"""A random model that sees, as small as it can be: Idefics 3 with the tiny model's tokenizer."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from services.cli.stack.default_model import TINY_MODEL
from tests.unit.compute.model.zoo import write_checkpoint

FRAME, PATCH, SHUFFLE, MOST = 28, 2, 2, 3  # pixels, pixels, patches, frames on a side
FRAME_TOKENS = (FRAME // PATCH // SHUFFLE) ** 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPECIAL = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, MOST + 1) for column in range(1, MOST + 1)),
]


def write_seeing_model(folder: Path) -> transformers.PreTrainedModel:
    """Write the model's folder; returns the model of transformers that equals it."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    config = transformers.Idefics3Config(
        image_token_id=tokenizer.token_to_id("<image>"),
        scale_factor=SHUFFLE,
        tie_word_embeddings=False,
        text_config={
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "eos_token_id": 1,
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": FRAME,
            "patch_size": PATCH,
        },
    )
    model = write_checkpoint(config, folder)
    with torch.no_grad():
        for special in tokenizer.get_added_tokens_decoder():
            model.lm_head.weight[special] = 0.0  # another token always has a higher logit: greedy answers do not end
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((TINY_MODEL / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    image_processor().save_pretrained(folder)
    return model


def image_processor() -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(
        size={"longest_edge": MOST * FRAME}, max_image_size={"longest_edge": FRAME}, image_mean=[0.4, 0.5, 0.6]
    )


def processor(folder: Path) -> transformers.Idefics3Processor:
    """The model's processor in transformers."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return transformers.Idefics3Processor(image_processor(), tokenizer, image_seq_len=FRAME_TOKENS)


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


def reference_answer(
    model: transformers.PreTrainedModel, folder: Path, text: str, images: list[Image.Image], n_tokens: int
) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the greedy answer's, as transformers' processor and model have them."""
    inputs = processor(folder)(text=text, images=[images] if images else None, return_tensors="pt")
    with torch.inference_mode():
        whole = model.generate(
            **inputs, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, eos_token_id=None
        )
    n_prompt = inputs["input_ids"].shape[1]
    return inputs["input_ids"][0].tolist(), whole[0, n_prompt:].tolist()
