"""Makes vLLM's inputs of prompts with images. Imports vLLM, as `async_llm.py` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from services.worker.engine.errors import InvalidRequestError
from services.worker.vllm.core import CoreRequest
from services.worker.vllm.images import CoreImage


async def input_of(llm: Any, request: CoreRequest, on_image: Callable[[], None]) -> Any:
    """vLLM's input for a request; `on_image` is called after each image. Raises InvalidRequestError.

    vLLM's processor makes tensors of each image by itself, and the placeholders stay where the gateway has put them: in
    a prompt of tokens vLLM would look for one placeholder an image, and for texts around it that tokenizers merge with
    their neighbours.
    """
    ids, salt = list(request.token_ids), request.cache_salt or None
    if not request.images:
        return tokens_input(ids, cache_salt=salt)
    limit = llm.vllm_config.model_config.multimodal_config.get_limit_per_prompt("image")
    if len(request.images) > limit:
        raise InvalidRequestError("images", f"{len(request.images)} images; vLLM's limit_mm_per_prompt is {limit}")
    items = []
    for image in request.images:
        items.append(await _item(llm.renderer, image))
        on_image()
    return mm_input(
        ids,
        MultiModalKwargsItems({"image": items}),
        {"image": [image.digest for image in request.images]},
        {"image": [PlaceholderRange(image.first, image.n_tokens) for image in request.images]},
        cache_salt=salt,
    )


async def _item(renderer: Any, image: CoreImage) -> Any:
    """The tensors of an image."""
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": 1})
    pixels = Image.frombytes("RGB", (image.width, image.height), image.pixels)
    prompt = {"prompt": text, "multi_modal_data": {"image": [pixels]}, "multi_modal_uuids": {"image": [image.digest]}}
    try:
        (made,) = await renderer.render_cmpl_async([prompt])
    except ValueError as error:
        raise InvalidRequestError("images", f"vLLM's image processor refuses an image: {error}") from error
    ((place,), (item,)) = (made[part]["image"] for part in ("mm_placeholders", "mm_kwargs"))
    if (n_tokens := place.get_num_embeds()) != image.n_tokens:
        message = f"vLLM makes {n_tokens} tokens of an image that has {image.n_tokens} in the prompt"
        raise InvalidRequestError("images", message)
    return item
