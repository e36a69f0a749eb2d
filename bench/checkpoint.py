"""A random K3-form checkpoint of about 180 M parameters, generated on the spot, with a tokenizer any peer can read.

For speed only: its text is noise. Seeded, so every run measures the same weights.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SEED = 0
LAYERS, HIDDEN, HEADS, HEAD_DIM, VOCAB = 12, 768, 6, 128, 49152
FULL_ATTENTION = [4, 8, 12]
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM = 384, 256, 128, 64, 128
EXPERTS, TOP_K, MOE_INNER, LATENT, DENSE_INNER = 16, 4, 256, 384, 1536
SPECIALS = 256


def config() -> dict[str, object]:
    ranks = VOCAB - SPECIALS
    kda = [i for i in range(1, LAYERS + 1) if i not in FULL_ATTENTION]
    ids = {"bos_token_id": ranks, "eos_token_id": ranks + 2, "pad_token_id": ranks + 255}
    text = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", **ids,
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": DENSE_INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 4,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": EXPERTS, "num_experts_per_token": TOP_K,
        "num_shared_experts": 1, "moe_intermediate_size": MOE_INNER, "routed_expert_hidden_size": LATENT,
        "latent_moe_use_norm": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0, "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM,
        "mla_use_nope": True, "mla_use_output_gate": True, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "linear_attn_config": {
            "head_dim": HEAD_DIM, "num_heads": HEADS, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "use_full_rank_gate": True, "full_attn_layers": FULL_ATTENTION, "kda_layers": kda,
        },
    }  # fmt: skip
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16", **ids,
        "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": ranks + 21, "tie_word_embeddings": False, "text_config": text,
    }  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """Names and shapes of facts' tensor table; bf16 but for what the real checkpoint keeps in fp32."""
    generator = torch.Generator().manual_seed(SEED)
    made: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = torch.randn(rows, columns, generator=generator) * (0.8 / columns**0.5)
        made[f"language_model.{name}.weight"] = values.to(torch.bfloat16)

    def ones(name: str, *shape: int) -> None:
        made[f"language_model.{name}.weight"] = torch.ones(*shape, dtype=torch.bfloat16)

    matrix("model.embed_tokens", VOCAB, HIDDEN)
    matrix("lm_head", VOCAB, HIDDEN)
    for name in ("model.norm", "model.output_attn_res_norm"):
        ones(name, HIDDEN)
    matrix("model.output_attn_res_proj", 1, HIDDEN)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            ones(f"{base}.{name}", HIDDEN)
        matrix(f"{base}.self_attention_res_proj", 1, HIDDEN)
        matrix(f"{base}.mlp_res_proj", 1, HIDDEN)
        if layer + 1 in FULL_ATTENTION:
            mla(f"{base}.self_attn", matrix, ones)
        else:
            kda(f"{base}.self_attn", matrix, made, generator)
        mlp(base, layer, matrix, ones, made)
    return made


def mla(base: str, matrix, ones) -> None:
    matrix(f"{base}.q_a_proj", Q_LORA, HIDDEN)
    ones(f"{base}.q_a_layernorm", Q_LORA)
    matrix(f"{base}.q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
    matrix(f"{base}.kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
    ones(f"{base}.kv_a_layernorm", KV_LORA)
    matrix(f"{base}.kv_b_proj", HEADS * (NOPE + V_DIM), KV_LORA)
    matrix(f"{base}.g_proj", HEADS * V_DIM, HIDDEN)
    matrix(f"{base}.o_proj", HIDDEN, HEADS * V_DIM)


def kda(base: str, matrix, made: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    width = HEADS * HEAD_DIM
    for name in ("q", "k", "v"):
        matrix(f"{base}.{name}_proj", width, HIDDEN)
        conv = torch.randn(width, 1, 4, generator=generator) * 0.5
        made[f"language_model.{base}.{name}_conv1d.weight"] = conv
    matrix(f"{base}.g_proj", width, HIDDEN)
    matrix(f"{base}.o_proj", HIDDEN, width)
    matrix(f"{base}.b_proj", HEADS, HIDDEN)
    matrix(f"{base}.f_a_proj", HEAD_DIM, HIDDEN)
    matrix(f"{base}.f_b_proj", width, HEAD_DIM)
    padded = torch.zeros(HEAD_DIM)
    padded[:HEADS] = torch.randn(HEADS, generator=generator) * 0.3
    made[f"language_model.{base}.A_log"] = padded
    made[f"language_model.{base}.dt_bias"] = torch.randn(width, generator=generator) - 3.0
    made[f"language_model.{base}.o_norm.weight"] = torch.ones(HEAD_DIM)


def mlp(base: str, layer: int, matrix, ones, made: dict[str, torch.Tensor]) -> None:
    if layer == 0:
        matrix(f"{base}.mlp.gate_proj", DENSE_INNER, HIDDEN)
        matrix(f"{base}.mlp.up_proj", DENSE_INNER, HIDDEN)
        matrix(f"{base}.mlp.down_proj", HIDDEN, DENSE_INNER)
        return
    moe = f"{base}.block_sparse_moe"
    matrix(f"{moe}.gate", EXPERTS, HIDDEN)
    made[f"language_model.{moe}.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    matrix(f"{moe}.routed_expert_down_proj", LATENT, HIDDEN)
    matrix(f"{moe}.routed_expert_up_proj", HIDDEN, LATENT)
    ones(f"{moe}.routed_expert_norm", LATENT)
    matrix(f"{moe}.shared_experts.gate_proj", MOE_INNER, HIDDEN)
    matrix(f"{moe}.shared_experts.up_proj", MOE_INNER, HIDDEN)
    matrix(f"{moe}.shared_experts.down_proj", HIDDEN, MOE_INNER)
    for expert in range(EXPERTS):
        matrix(f"{moe}.experts.{expert}.w1", MOE_INNER, LATENT)
        matrix(f"{moe}.experts.{expert}.w3", MOE_INNER, LATENT)
        matrix(f"{moe}.experts.{expert}.w2", LATENT, MOE_INNER)


def vocabulary() -> list[bytes]:
    """The 256 bytes, then pairs of letters, then triples: every entry is a merge of two earlier ones."""
    entries = [bytes([b]) for b in range(256)]
    letters = [bytes([b]) for b in range(32, 127)]
    pairs = [a + b for a in letters for b in letters]
    triples = (a + b for a in pairs for b in letters)
    entries += pairs
    while len(entries) < VOCAB - SPECIALS:
        entries.append(next(triples))
    return entries[: VOCAB - SPECIALS]


def make(directory: Path) -> Path:
    """Write the checkpoint once; return its directory."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors(), directory / "model.safetensors")
    lines = [base64.b64encode(entry).decode() + f" {rank}" for rank, entry in enumerate(vocabulary())]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (directory / "config.json").write_text(json.dumps(config(), indent=1))
    return directory


if __name__ == "__main__":
    target = make(Path(__file__).parent / ".work" / "k3_180m")
    print(target, sum(t.numel() for t in tensors().values()) / 1e6, "M parameters")
