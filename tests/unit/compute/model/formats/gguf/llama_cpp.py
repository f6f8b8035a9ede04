"""llama.cpp as an oracle: a server in this process for a GGUF file, and the smallest files that it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import httpx
import numpy as np
import xllamacpp

_WIDTH = 32


class LlamaCpp:
    """llama.cpp's server over one file."""

    def __init__(self, file: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_threads_http, params.cpuparams.n_threads = 64, 1, 1, 1
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        self.server = xllamacpp.Server(params)

    def tokenize(self, text: str, *, special: bool, ends: bool) -> list[int]:
        """The ids of a text. `special`: spelled control tokens are such; `ends`: with BOS and EOS."""
        body = {"content": text, "parse_special": special, "add_special": ends}
        answer = httpx.post(f"{self.server.listening_address}/tokenize", json=body, timeout=60)
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        """The likeliest continuation of a prompt, without end tokens."""
        body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "repeat_penalty": 1.0}
        body |= {"ignore_eos": True, "return_tokens": True}
        answer = httpx.post(f"{self.server.listening_address}/completion", json=body, timeout=60)
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def log_probabilities(self, prompt: list[int], n_tokens: int) -> dict[int, float]:
        """The log-probabilities of the `n_tokens` likeliest tokens after a prompt, by id."""
        body = {"prompt": prompt, "n_predict": 1, "n_probs": n_tokens, "ignore_eos": False}
        answer = httpx.post(f"{self.server.listening_address}/completion", json=body, timeout=60)
        [first] = answer.raise_for_status().json()["completion_probabilities"]
        return {int(one["id"]): float(one["logprob"]) for one in first["top_logprobs"]}


def write_tiny(file: Path, n_tokens: int, describe: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write a llama of one layer whose weights are zero; `describe` adds its tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_tokens)
    describe(writer)
    writer.add_tensor("token_embd.weight", np.zeros((n_tokens, _WIDTH), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(_WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((_WIDTH, _WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
