"""The tensors a drafter's checkpoint must hold, under their published names. Torch-free."""

from __future__ import annotations

from model.drafter.config import DrafterConfig
from model.tensors import STORED_DTYPE, TensorSpec


def expected_tensors(c: DrafterConfig) -> dict[str, TensorSpec]:
    """Source: Inferact/Kimi-K3-DSpark's 68 tensors; the `dflash` package's module names."""
    shapes: dict[str, tuple[int, ...]] = {}
    context, norm, last = ("context_proj", "context_norm", "final_norm")
    if c.form == "dflash":
        context, norm, last = ("fc", "hidden_norm", "norm")
    shapes[context] = (c.hidden, len(c.target_layers) * c.hidden)
    shapes[norm] = shapes[last] = (c.hidden,)
    for layer in range(c.layers):
        at = f"layers.{layer}."
        shapes[f"{at}input_layernorm"] = shapes[f"{at}post_attention_layernorm"] = (c.hidden,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}mlp.{name}"] = (c.intermediate, c.hidden)
        shapes[f"{at}mlp.down_proj"] = (c.hidden, c.intermediate)
        attention = _latent(c) if c.form == "dspark" else _grouped(c)
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
    if c.form == "dspark":
        shapes["markov_head.markov_w1"] = shapes["markov_head.markov_w2"] = (c.vocab, c.markov_rank)
    stored = (STORED_DTYPE[c.dtype],)
    table = {f"{name}.weight": TensorSpec(shape, stored) for name, shape in shapes.items()}
    if c.confidence:
        width = c.hidden + (c.markov_rank if c.confidence_sees_markov else 0)
        table["confidence_head.proj.weight"] = TensorSpec((1, width), stored)
        table["confidence_head.proj.bias"] = TensorSpec((1,), stored)
    return table


def unread_tensors(c: DrafterConfig) -> dict[str, TensorSpec]:
    """May be in the file: the target's own tables are used instead."""
    table = TensorSpec((c.vocab, c.hidden), (STORED_DTYPE[c.dtype],))
    return {"embed_tokens.weight": table, "lm_head.weight": table}


def _latent(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    rope = c.rope.dim
    return {
        "q_a_proj": (c.q_lora, c.hidden),
        "q_a_layernorm": (c.q_lora,),
        "q_b_proj": (c.heads * (c.nope + rope), c.q_lora),
        "kv_a_proj_with_mqa": (c.kv_lora + rope, c.hidden),
        "kv_a_layernorm": (c.kv_lora,),
        "kv_b_proj": (c.heads * (c.nope + c.v_dim), c.kv_lora),
        "o_proj": (c.hidden, c.heads * c.v_dim),
    }


def _grouped(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (c.heads * c.head_dim, c.hidden),
        "k_proj": (c.kv_heads * c.head_dim, c.hidden),
        "v_proj": (c.kv_heads * c.head_dim, c.hidden),
        "o_proj": (c.hidden, c.heads * c.head_dim),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
    }
