from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from trainer.config import ModelShape
from trainer.export import export_model, load_exported
from trainer.model import Llama, initialise


def reference_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(reference, transformers.LlamaForCausalLM)
    with torch.inference_mode():
        logits: torch.Tensor = reference(tokens).logits
    return logits


def test_export_gives_the_same_logits_as_the_training_module(
    toy_shape: ModelShape, bundled: tuple[Llama, Tokenizer], tmp_path: Path
) -> None:
    model = Llama(toy_shape)
    initialise(model, seed=3)
    # Norms start at one; other values show that each lands where it belongs.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    export_model(dict(model.named_parameters()), toy_shape, bundled[1], tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, toy_shape.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = model(tokens)
    assert (ours - reference_logits(tmp_path, tokens)).abs().max() <= 1e-4


def test_bundled_model_gives_the_same_logits_in_transformers(
    bundled: tuple[Llama, Tokenizer], bundled_folder: Path
) -> None:
    model, tokenizer = bundled
    tokens = torch.tensor([tokenizer.encode("import os\n\ndef main(argv):\n    return os.path.join(").ids])
    with torch.inference_mode():
        ours = model(tokens)
    assert (ours - reference_logits(bundled_folder, tokens)).abs().max() <= 1e-4


def test_bf16_export_rounds_weights_and_keeps_the_shape(
    toy_shape: ModelShape, bundled: tuple[Llama, Tokenizer], tmp_path: Path
) -> None:
    model = Llama(toy_shape)
    initialise(model, seed=3)
    export_model(dict(model.named_parameters()), toy_shape, bundled[1], tmp_path)
    shape, weights = load_exported(tmp_path)
    assert shape == toy_shape
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach().bfloat16().float())
    assert sum(weight.numel() for weight in weights.values()) == toy_shape.n_parameters
    assert [path.name for path in tmp_path.glob("*.partial")] == []
