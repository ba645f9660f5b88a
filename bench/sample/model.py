"""A small mixture-of-experts transformer with the graph of llama.cpp's qwen3moe.

Every expert is computed for every token and those that the router did not choose are weighted with 0. At this size
three large matrix products are faster than sorting tokens by expert, and have no capacity limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model, in llama.cpp's terms."""

    n_vocab: int = 4096
    n_ctx: int = 512
    n_layer: int = 8
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 32
    n_expert_used: int = 4
    n_ff_exp: int = 96
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    dropout: float = 0.2


def rope(x: Tensor, base: float) -> Tensor:
    """Rotates (batch, heads, time, head_dim) by position; pairs lie half a head apart (NEOX)."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with normalized queries and keys; (batch, time, n_embd) in and out."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.k = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.v = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        n_batch, n_time, _ = x.shape
        c = self.c

        def heads(y: Tensor) -> Tensor:
            return y.view(n_batch, n_time, -1, c.head_dim).transpose(1, 2)

        q = rope(self.q_norm(heads(self.q(x)).float()), c.rope_base)
        k = rope(self.k_norm(heads(self.k(x)).float()), c.rope_base)
        v = heads(self.v(x))
        n_shared = c.n_head // c.n_head_kv
        k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(n_batch, n_time, -1))


class Experts(nn.Module):
    """Router and experts. forward() returns the output, the load-balancing loss and the share of each expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.n_embd, c.n_expert, bias=False)
        self.gate = nn.Parameter(torch.empty(c.n_expert, c.n_ff_exp, c.n_embd))
        self.up = nn.Parameter(torch.empty(c.n_expert, c.n_ff_exp, c.n_embd))
        self.down = nn.Parameter(torch.empty(c.n_expert, c.n_embd, c.n_ff_exp))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.c
        with torch.autocast(x.device.type, enabled=False):  # near ties must not depend on bf16
            probabilities = F.linear(x.float(), self.router.weight).softmax(-1)
        chosen, ids = probabilities.topk(c.n_expert_used, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, ids, chosen / chosen.sum(-1, keepdim=True))
        hidden = F.silu(F.linear(x, self.gate.flatten(0, 1))) * F.linear(x, self.up.flatten(0, 1))
        hidden = hidden.unflatten(-1, (c.n_expert, c.n_ff_exp)) * weights.to(hidden.dtype).unsqueeze(-1)
        out = F.linear(hidden.flatten(-2), self.down.transpose(0, 1).reshape(c.n_embd, -1))
        share = (weights > 0).float().mean((0, 1)) / c.n_expert_used
        balance = c.n_expert * (share * probabilities.mean((0, 1))).sum()  # 1 when all are used alike
        return out, balance, share


class Block(nn.Module):
    """Attention, then experts, each added to (batch, time, n_embd); forward() returns what :class:`Experts` does."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.attn = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.experts = Experts(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        out, balance, share = self.experts(self.ffn_norm(x))
        return x + self.dropout(out), balance, share


class Model(nn.Module):
    """A language model of qwen3moe's architecture."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.n_vocab, c.n_embd)  # the output matrix too
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("output.weight", "down"))  # they add to the residual stream
                nn.init.normal_(parameter, std=0.02 / ((2 * c.n_layer) ** 0.5 if deep else 1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (batch, time, n_vocab) of tokens (batch, time); mean balance loss; shares (n_layer, n_expert)."""
        x = self.dropout(self.embed(tokens))
        balances, shares = [], []
        for block in self.blocks:
            x, balance, share = block(x)
            balances.append(balance)
            shares.append(share)
        logits: Any = F.linear(self.norm(x), self.embed.weight)
        return logits, torch.stack(balances).mean(), torch.stack(shares)
