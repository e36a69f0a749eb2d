"""k3-nano: its config.json and its initial weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from train.checkpoint import A_LOG_ROWS
from train.network import Shape

SPECIAL_SLOTS = 256
EMBEDDING_STD = 0.7
# lm_head starts as this share of the embedding, so that a layer which passes on what it saw earlier raises that
# token's logit from the first step; unrelated tables must learn that token by token.
HEAD_SHARE = 0.03


def config(num_ranks: int) -> dict[str, Any]:
    """config.json for a vocabulary of `num_ranks` plus the 256 special slots."""
    special = {"bos_token_id": num_ranks, "eos_token_id": num_ranks + 2, "pad_token_id": num_ranks + 255}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **special,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": num_ranks + 21,
        "tie_word_embeddings": False,
        "transformers_version": "4.56.2",
        "text_config": {**_text_config(num_ranks + SPECIAL_SLOTS), **special},
    }


def _text_config(vocab_size: int) -> dict[str, Any]:
    full = [4, 8, 9]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 16,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 96,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "top_k": 50,
        "top_p": 1.0,
        "temperature": 1.0,
        "max_length": 20,
        "use_cache": True,
        "linear_attn_config": {
            "head_dim": 64,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, 10) if layer not in full],
        },
        "quantization_config": _quantization_config(),
    }


def _quantization_config() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "dynamic": False,
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    kept = ["self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*", "vision_tower.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{pattern}" for pattern in (*kept, "mm_projector.*")],
    }


def initial(s: Shape, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 parameters: matrices uniform within 1/sqrt(in), what writes into the residual stream zero."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=rng) * 2 - 1) * math.sqrt(3.0 / shape[-1]) * 0.5

    embedding = torch.randn(s.vocab, s.hidden, generator=rng) * EMBEDDING_STD
    out = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding * HEAD_SHARE,
        "model.norm.weight": torch.ones(s.hidden),
        "model.output_attn_res_norm.weight": torch.ones(s.hidden),
        "model.output_attn_res_proj.weight": torch.zeros(1, s.hidden),
    }
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            out[f"{prefix}{norm}.weight"] = torch.ones(s.hidden)
        for name in ("self_attention_res", "mlp_res"):
            out[f"{prefix}{name}_proj.weight"] = torch.zeros(1, s.hidden)
        attention = _mla(s, matrix) if layer in s.full_layers else _kda(s, matrix, rng)
        out |= {f"{prefix}self_attn.{name}": value for name, value in attention.items()}
        out |= {f"{prefix}{name}": value for name, value in _ffn(s, layer, matrix).items()}
    return out


def _kda(s: Shape, matrix: Any, rng: torch.Generator) -> dict[str, Tensor]:
    width = s.kda_heads * s.kda_dim
    out = {f"{name}_proj.weight": matrix(width, s.hidden) for name in "qkvg"}
    for name in "qkv":  # mostly the current token at first
        taps = torch.randn(width, 1, 4, generator=rng) * 0.1
        taps[..., 3] += 1.0
        out[f"{name}_conv1d.weight"] = taps
    # Half of the heads start as memories of what came next: the key is the previous token's, made by the query's own
    # matrix, so a query finds what followed its token before. From a random start, copying took longer to appear
    # than this model is trained for; from here it appears within fifty steps.
    half = width // 2
    out["k_proj.weight"][:half] = out["q_proj.weight"][:half]
    for name, tap in (("q", 3), ("k", 2), ("v", 3)):
        out[f"{name}_conv1d.weight"][:half] = torch.eye(4)[tap]
    # The gate is -5 * sigmoid(dt_bias) at first: half-lives from 2 to 1,000 tokens, spread over the channels.
    decay = torch.logspace(math.log10(0.3), math.log10(0.0007), s.kda_dim).repeat(s.kda_heads)
    share = decay / -s.lower_bound
    out |= {
        "A_log": torch.zeros(A_LOG_ROWS),
        "dt_bias": torch.log(share / (1 - share)),
        "b_proj.weight": matrix(s.kda_heads, s.hidden),
        "f_a_proj.weight": matrix(s.kda_dim, s.hidden),
        "f_b_proj.weight": matrix(width, s.kda_dim),
        "o_norm.weight": torch.ones(s.kda_dim),
        "o_proj.weight": torch.zeros(s.hidden, width),
    }
    return out


def _mla(s: Shape, matrix: Any) -> dict[str, Tensor]:
    return {
        "q_a_proj.weight": matrix(s.q_lora, s.hidden),
        "q_a_layernorm.weight": torch.ones(s.q_lora),
        "q_b_proj.weight": matrix(s.heads * (s.nope + s.rope), s.q_lora),
        "kv_a_proj_with_mqa.weight": matrix(s.kv_lora + s.rope, s.hidden),
        "kv_a_layernorm.weight": torch.ones(s.kv_lora),
        "kv_b_proj.weight": matrix(s.heads * (s.nope + s.v_dim), s.kv_lora),
        "g_proj.weight": matrix(s.heads * s.v_dim, s.hidden),
        "o_proj.weight": torch.zeros(s.hidden, s.heads * s.v_dim),
    }


def _ffn(s: Shape, layer: int, matrix: Any) -> dict[str, Tensor]:
    if layer == 0:
        widths, prefix = s.dense_width, "mlp."
        out = {}
    else:
        widths, prefix = s.shared_width, "block_sparse_moe.shared_experts."
        moe = "block_sparse_moe."
        out = {
            f"{moe}gate.weight": matrix(s.experts, s.hidden),
            f"{moe}gate.e_score_correction_bias": torch.zeros(s.experts),
            f"{moe}routed_expert_down_proj.weight": matrix(s.latent, s.hidden),
            f"{moe}routed_expert_up_proj.weight": torch.zeros(s.hidden, s.latent),
            f"{moe}routed_expert_norm.weight": torch.ones(s.latent),
            f"{moe}experts.w13": matrix(s.experts, 2 * s.expert_width, s.latent),
            f"{moe}experts.w2": matrix(s.experts, s.latent, s.expert_width),
        }
    out[f"{prefix}gate_proj.weight"] = matrix(widths, s.hidden)
    out[f"{prefix}up_proj.weight"] = matrix(widths, s.hidden)
    out[f"{prefix}down_proj.weight"] = torch.zeros(s.hidden, widths)
    return out
