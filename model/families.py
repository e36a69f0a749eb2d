"""Which fields a model family's config.json has: one table per family. Torch-free.

A rule checks one value. A field of the table that is missing is an error; so is a field found neither in
the table nor on the ignore list, since it may change the mathematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["kimi_k3", "kimi_linear"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One field's type and range; `expected` is the wording of the error."""

    expected: str
    types: tuple[type, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    allowed: tuple[object, ...] | None = None
    nullable: bool = False

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.nullable
        if isinstance(value, bool) and bool not in self.types:  # True is an int to Python
            return False
        if not isinstance(value, self.types):
            return False
        if self.allowed is not None:
            return value in self.allowed
        if isinstance(value, list):
            return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if isinstance(value, (int, float)):
            return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        return True


SIZE = Rule("a positive integer", (int,), minimum=1)
SIZE_OR_NULL = Rule("a positive integer or null", (int,), minimum=1, nullable=True)
COUNT = Rule("an integer >= 0", (int,), minimum=0)
TOKEN = COUNT
FLAG = Rule("true or false", (bool,))
EPS = Rule("a number in [1e-12, 1]", (int, float), minimum=1e-12, maximum=1.0)
SCALE = Rule("a number in [1e-6, 1e6]", (int, float), minimum=1e-6, maximum=1e6)
DECAY_BOUND = Rule("a number in [-80, -1e-3]", (int, float), minimum=-80.0, maximum=-1e-3)
LAYERS = Rule("a list of 1-based layer numbers", (list,))
KERNEL = Rule("an integer in [2, 16]", (int,), minimum=2, maximum=16)
TABLE = Rule("an object", (dict,))


def only(value: object) -> Rule:
    """The one value that this code implements."""
    return Rule(f"{value!r}, the only one supported", (type(value),), allowed=(value,))


def one_of(*values: object) -> Rule:
    return Rule(f"one of {list(values)!r}", (type(values[0]),), allowed=values)


# Written by transformers whatever the model; no arithmetic reads them.
BOOKKEEPING = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "add_cross_attention",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    }
)

DTYPE = one_of("bfloat16", "float32")
SPECIAL_TOKENS = {"bos_token_id": TOKEN, "eos_token_id": TOKEN, "pad_token_id": TOKEN}

SHARED_TEXT: Mapping[str, Rule] = {
    "architectures": only(["KimiLinearForCausalLM"]),
    "model_type": only("kimi_linear"),
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "first_k_dense_replace": COUNT,
    "moe_layer_freq": only(1),
    "num_experts": SIZE,
    "num_experts_per_token": SIZE,
    "num_shared_experts": SIZE,
    "moe_intermediate_size": SIZE,
    "moe_renormalize": FLAG,
    "moe_router_activation_func": only("sigmoid"),
    "use_grouped_topk": FLAG,  # with one group both values mean the same
    "num_expert_group": only(1),
    "topk_group": only(1),
    "routed_scaling_factor": SCALE,
    "num_nextn_predict_layers": only(0),
    "kv_lora_rank": SIZE,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "mla_use_nope": only(True),
    "rms_norm_eps": EPS,
    "tie_word_embeddings": only(False),
    "linear_attn_config": TABLE,
}

SHARED_LINEAR: Mapping[str, Rule] = {
    "head_dim": SIZE,
    "num_heads": SIZE,
    "short_conv_kernel_size": KERNEL,
    "full_attn_layers": LAYERS,
    "kda_layers": LAYERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The fields of one family. `outer` is the file itself where the text part is nested in it."""

    architecture: str
    outer: Mapping[str, Rule] | None
    text: Mapping[str, Rule]
    linear: Mapping[str, Rule]
    checked_if_present: Mapping[str, Rule] = field(default_factory=dict)  # in the text part
    ignored_outer: frozenset[str] = frozenset()
    ignored_text: frozenset[str] = frozenset()


FAMILIES: Mapping[Family, Table] = {
    "kimi_k3": Table(
        architecture="KimiK3ForConditionalGeneration",
        outer={
            "architectures": only(["KimiK3ForConditionalGeneration"]),
            "model_type": only("kimi_k3"),
            "dtype": DTYPE,
            "tie_word_embeddings": only(False),
            "media_placeholder_token_id": TOKEN,
            "text_config": TABLE,
            **SPECIAL_TOKENS,
        },
        text={
            **SHARED_TEXT,
            "hidden_act": only("situ"),
            "activation_situ_beta": SCALE,
            "activation_situ_linear_beta": SCALE,
            "attn_res_block_size": SIZE,
            "routed_expert_hidden_size": SIZE,
            "latent_moe_use_norm": only(True),
            "topk_method": only("noaux_tc"),
            "q_lora_rank": SIZE,
            "mla_use_output_gate": FLAG,
            "max_position_embeddings": SIZE,
        },
        linear={**SHARED_LINEAR, "gate_lower_bound": DECAY_BOUND, "use_full_rank_gate": FLAG},
        # Copies of the outer fields: they must agree with those.
        checked_if_present={"dtype": DTYPE, "quantization_config": TABLE, **SPECIAL_TOKENS},
        # The vision tower is recognised and left unread; image_placeholder is the renderer's text.
        ignored_outer=BOOKKEEPING | {"ignore_index", "image_placeholder", "vision_config"},
        ignored_text=BOOKKEEPING,
    ),
    "kimi_linear": Table(
        architecture="KimiLinearForCausalLM",
        outer=None,
        text={
            **SHARED_TEXT,
            "dtype": DTYPE,
            "hidden_act": only("silu"),
            "q_lora_rank": SIZE_OR_NULL,
            "model_max_length": SIZE,
            **SPECIAL_TOKENS,
        },
        linear=SHARED_LINEAR,
        checked_if_present={"topk_method": only("noaux_tc")},
        # NoPE: nothing rotates. head_dim is hidden/heads there, which no layer uses.
        ignored_text=BOOKKEEPING | {"head_dim", "rope_theta", "rope_scaling"},
    ),
}

QUANTIZATION: Mapping[str, Rule] = {
    "quant_method": only("compressed-tensors"),
    "format": only("mxfp4-pack-quantized"),
    "config_groups": TABLE,
}
# Which tensors are packed is read off the tensors (`ignore` and `targets` do not name them all).
IGNORED_QUANTIZATION = frozenset(
    {
        "quantization_status",
        "global_compression_ratio",
        "ignore",
        "version",
        "sparsity_config",
        "transform_config",
    }
)
QUANTIZATION_GROUP: Mapping[str, Rule] = {"targets": only(["Linear"]), "weights": TABLE}
QUANTIZATION_WEIGHTS: Mapping[str, Rule] = {
    "num_bits": only(4),
    "type": only("float"),
    "strategy": only("group"),
    "group_size": only(32),
    "symmetric": only(True),
    "scale_dtype": only("torch.uint8"),
    "dynamic": only(False),
}
IGNORED_QUANTIZATION_WEIGHTS = frozenset(
    {
        "observer",
        "observer_kwargs",
        "actorder",
        "block_structure",
        "zp_dtype",
    }
)


def family_of(model_type: Any, architectures: Any) -> Family | None:
    """The family whose outer `model_type` and `architectures` these are, else None."""
    for name, table in FAMILIES.items():
        if model_type == name and architectures == [table.architecture]:
            return name
    return None
