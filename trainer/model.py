"""A Llama decoder in plain PyTorch, for training only.

Parameter names equal those of a Hugging Face `LlamaForCausalLM` checkpoint, so export is a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of `x`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rope_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, each [max_positions, head_dim / 2] (arXiv:2104.09864)."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions).float(), shape.rope_theta**-exponent)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x [batch, seq, heads, head_dim], tables [seq, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class CausalAttention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq, _ = x.shape
        shape = self.shape
        q = rotate(self.q_proj(x).view(batch, seq, shape.n_heads, shape.head_dim), cos, sin)
        k = rotate(self.k_proj(x).view(batch, seq, shape.n_kv_heads, shape.head_dim), cos, sin)
        v = self.v_proj(x).view(batch, seq, shape.n_kv_heads, shape.head_dim)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )  # [batch, heads, seq, head_dim]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = CausalAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: the `model.` part of the checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """The whole model; the output head is the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = DecoderStack(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] for token ids [batch, seq]; seq is at most `max_positions`."""
        seq = tokens.shape[1]
        x = self.model.embed_tokens(tokens)  # [batch, seq, hidden]
        cos, sin = self.cos[:seq], self.sin[:seq]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, window: Tensor) -> Tensor:
        """Mean next-token cross-entropy, in nats, over windows [batch, seq + 1]."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def initialise(model: Llama, seed: int) -> None:
    """Seeded normal initialisation; projections back into the residual stream are scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * model.shape.n_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim < 2:
                continue
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, residual_std if into_residual else 0.02, generator=generator)
