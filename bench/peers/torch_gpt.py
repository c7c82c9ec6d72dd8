"""The GPT of `jax_gpt.py` in PyTorch, with its fused attention kernel, and its weights."""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (
            t.view(b, s, self.heads, d // self.heads).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).split(d, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        h = F.gelu(self.up(self.ln2(x)), approximate="tanh")
        y: torch.Tensor = x + self.down(h)
        return y


class GPT(nn.Module):
    """A pre-norm GPT; `forward` returns the mean cross entropy of the tokens."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.wte = nn.Embedding(a.vocab, a.width)
        self.wpe = nn.Parameter(torch.empty(a.seq, a.width))
        self.layers = nn.ModuleList(Layer(a.width, a.heads, a.bias) for _ in range(a.layers))
        self.lnf = nn.LayerNorm(a.width)
        self.head = nn.Linear(a.width, a.vocab, bias=False)
        if a.tied:
            self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * a.layers) if residual else 0.02
                nn.init.normal_(p, std=scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load(gpt: GPT, given: dict[str, np.ndarray]) -> None:
    """Loads the weights of `jax_gpt.init`, which are [in, out]; PyTorch's are [out, in]."""
    names = {"ln1": "ln1", "ln2": "ln2", "lnf": "lnf"}
    kinds = {"g": "weight", "b": "bias", "w": "weight"}
    state = {}
    for name, value in given.items():
        if name in ("wte", "wpe"):
            state["wte.weight" if name == "wte" else "wpe"] = value
            continue
        *layer, part, kind = name.split(".")
        place = f"layers.{layer[0][1:]}." if layer else ""
        matrix = kind == "w"
        state[f"{place}{names.get(part, part)}.{kinds[kind]}"] = (
            value.reshape(value.shape[0], -1).T if matrix else value
        )
    gpt.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
