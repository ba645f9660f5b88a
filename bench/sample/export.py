"""Writes a trained model as a qwen3moe GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.sample import tokenizer as tokens
from bench.sample.model import Config, Model

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0

NAMES = {  # below blk.N
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.output": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "experts.router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}


def gguf_name(name: str) -> str:
    """blocks.3.attn.q.weight -> blk.3.attn_q.weight"""
    name = name.removesuffix(".weight")
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return {"embed": "token_embd.weight", "norm": "output_norm.weight"}[name]


def tensor_type(name: str, dimensions: int, expert_type: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Norms and routers stay F32; the trunk is Q8_0 unless all is F32."""
    if expert_type == F32 or dimensions == 1 or "ffn_gate_inp" in name:
        return F32
    return expert_type if "_exps" in name else Q8_0


def weights(model: Model, expert_type: str) -> Iterator[tuple[str, Any, gguf.GGMLQuantizationType, Any]]:
    """For each tensor its name, its parameter, its type and its bytes in this type."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().cpu().numpy()
        kind = tensor_type(gguf_name(name), values.ndim, gguf.GGMLQuantizationType[expert_type])
        yield gguf_name(name), parameter, kind, gguf.quants.quantize(np.ascontiguousarray(values), kind)


def write(path: Path, model: Model, tokenizer: Any, expert_type: str) -> None:
    """Writes the model with its experts in `expert_type` ("Q4_0", "F32", ...)."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    _write_metadata(writer, model.c)
    _write_tokenizer(writer, tokenizer)
    for name, _, kind, data in weights(model, expert_type):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_name("sample-moe")
    writer.add_description("Small trained sample; text of Jane Austen's novels and a public-domain English Bible")
    writer.add_license("MIT")
    writer.add_block_count(c.n_layer)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.n_ff_exp * c.n_expert_used)
    writer.add_expert_feed_forward_length(c.n_ff_exp)
    writer.add_expert_count(c.n_expert)
    writer.add_expert_used_count(c.n_expert_used)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.norm_eps)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    names, merges = tokens.vocabulary(tokenizer)
    boundary = names.index(tokens.BOUNDARY)
    types = [gguf.TokenType.CONTROL if name == tokens.BOUNDARY else gguf.TokenType.NORMAL for name in names]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(boundary)
    writer.add_eos_token_id(boundary)
    writer.add_add_bos_token(True)
