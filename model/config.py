"""What the network needs to know, parsed from a checkpoint's config.json. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.batch import PoolLayout
from model.errors import ConfigError, ModelError
from model.families import (
    FAMILIES,
    IGNORED_QUANTIZATION,
    IGNORED_QUANTIZATION_WEIGHTS,
    QUANTIZATION,
    QUANTIZATION_GROUP,
    QUANTIZATION_WEIGHTS,
    Family,
    Rule,
    family_of,
)

# Constructor defaults of the reference implementation, in no config (other stacks use 1e-5 for the first).
LORA_NORM_EPS = 1e-6
QK_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The text network's shape. Layer indices are 0-based; the file's lists are 1-based.

    `lora_norm_eps` is for q_a_layernorm and kv_a_layernorm, `rms_norm_eps` for the other norms; `qk_l2_eps` is
    added to the sum of squares of KDA's q and k. K = V = `kda_head_dim` in every known checkpoint.
    """

    family: Family
    dtype: Literal["bfloat16", "float32"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_len: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_token_id: int | None
    rms_norm_eps: float
    lora_norm_eps: float
    qk_l2_eps: float
    mla_layers: tuple[int, ...]
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    mla_output_gate: bool
    kda_layers: tuple[int, ...]
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    kda_full_rank_gate: bool
    activation: Literal["situ", "silu"]
    situ_beta: float | None
    situ_linear_beta: float | None
    dense_layers: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_intermediate_size: int
    latent_size: int | None
    renormalize: bool
    routed_scaling_factor: float
    attn_res_block_size: int | None
    mxfp4_group: int | None

    @property
    def row_width(self) -> int:
        """Floats per token and MLA layer: the normed latent, then the raw shared key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def expert_size(self) -> int:
        """Width at which the routed experts work."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def shared_intermediate_size(self) -> int:
        """The shared experts are one fused MLP of this width."""
        return self.num_shared_experts * self.expert_intermediate_size

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def pool_layout(self, block_tokens: int) -> PoolLayout:
        return PoolLayout(
            block_tokens=block_tokens,
            num_mla_layers=len(self.mla_layers),
            row_width=self.row_width,
            num_kda_layers=len(self.kda_layers),
            num_heads=self.kda_heads,
            key_dim=self.kda_head_dim,
            value_dim=self.kda_head_dim,
            conv_history=self.conv_kernel - 1,
        )


def load_config(model_dir: Path) -> ModelConfig:
    """Parse model_dir/config.json. Raises ModelError (unreadable) or ConfigError (a field)."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected an object, found {type(raw).__name__}")
    return parse_config(raw, path)


def parse_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """Check every field against the family's table, then for contradictions. Raises ConfigError."""
    family = family_of(raw.get("model_type"), raw.get("architectures"))
    if family is None:
        known = " or ".join(f"{name} with {[table.architecture]}" for name, table in FAMILIES.items())
        found = f"{raw.get('model_type')!r} with {raw.get('architectures')!r}"
        raise ConfigError(path, "model_type and architectures", known, found)
    table = FAMILIES[family]
    text, at = raw, ""
    if table.outer is not None:
        check_fields(raw, table.outer, {}, table.ignored_outer, path, "")
        text, at = raw["text_config"], "text_config."
    check_fields(text, table.text, table.checked_if_present, table.ignored_text, path, at)
    linear = text["linear_attn_config"]
    check_fields(linear, table.linear, {}, frozenset(), path, f"{at}linear_attn_config.")
    mxfp4_group = None
    if "quantization_config" in text:
        mxfp4_group = _check_quantization(text["quantization_config"], path, f"{at}quantization_config.")
    if table.outer is not None:
        for name in ("dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
            if name in text and text[name] != raw[name]:
                raise ConfigError(path, at + name, f"{raw[name]!r} as outside text_config", repr(text[name]))
    config = _build(family, raw, text, linear, mxfp4_group)
    _check_consistent(config, text, path, at)
    return config


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate field {next(n for n in names if names.count(n) > 1)!r}")
    return table


def check_fields(
    section: Mapping[str, Any],
    rules: Mapping[str, Rule],
    optional: Mapping[str, Rule],
    ignored: Set[str],
    path: Path,
    at: str,
) -> None:
    for name, rule in rules.items():
        if name not in section:
            raise ConfigError(path, at + name, rule.expected, "no such field")
    for name, value in section.items():
        rule_or_none = rules.get(name) or optional.get(name)
        if rule_or_none is None:
            if name not in ignored:
                raise ConfigError(path, at + name, "only fields that this model family has", f"{value!r}")
        elif not rule_or_none.accepts(value):
            raise ConfigError(path, at + name, rule_or_none.expected, f"{value!r}")


def _check_quantization(section: Mapping[str, Any], path: Path, at: str) -> int:
    nothing = Rule("null", nullable=True)
    check_fields(section, QUANTIZATION, {"kv_cache_scheme": nothing}, IGNORED_QUANTIZATION, path, at)
    groups = section["config_groups"]
    if len(groups) != 1:
        raise ConfigError(path, f"{at}config_groups", "exactly one group", sorted(groups))
    name, group = next(iter(groups.items()))
    at = f"{at}config_groups.{name}."
    if not isinstance(group, dict):
        raise ConfigError(path, at.rstrip("."), "an object", repr(group))
    optional = {
        "input_activations": nothing,
        "output_activations": nothing,
        "format": QUANTIZATION["format"],
    }
    check_fields(group, QUANTIZATION_GROUP, optional, frozenset(), path, at)
    check_fields(group["weights"], QUANTIZATION_WEIGHTS, {}, IGNORED_QUANTIZATION_WEIGHTS, path, f"{at}weights.")
    return int(group["weights"]["group_size"])


def _build(
    family: Family,
    raw: Mapping[str, Any],
    text: Mapping[str, Any],
    linear: Mapping[str, Any],
    mxfp4: int | None,
) -> ModelConfig:
    k3 = family == "kimi_k3"
    return ModelConfig(
        family=family,
        dtype=raw["dtype"],
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        context_len=text["max_position_embeddings" if k3 else "model_max_length"],
        bos_token_id=raw["bos_token_id"],
        eos_token_id=raw["eos_token_id"],
        pad_token_id=raw["pad_token_id"],
        media_token_id=raw["media_placeholder_token_id"] if k3 else None,
        rms_norm_eps=float(text["rms_norm_eps"]),
        lora_norm_eps=LORA_NORM_EPS,
        qk_l2_eps=QK_L2_EPS,
        mla_layers=tuple(layer - 1 for layer in linear["full_attn_layers"]),
        num_heads=text["num_attention_heads"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_nope_dim=text["qk_nope_head_dim"],
        qk_rope_dim=text["qk_rope_head_dim"],
        v_dim=text["v_head_dim"],
        mla_output_gate=text["mla_use_output_gate"] if k3 else False,
        kda_layers=tuple(layer - 1 for layer in linear["kda_layers"]),
        kda_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_kernel=linear["short_conv_kernel_size"],
        gate_lower_bound=float(linear["gate_lower_bound"]) if k3 else None,
        kda_full_rank_gate=linear["use_full_rank_gate"] if k3 else False,
        activation=text["hidden_act"],
        situ_beta=float(text["activation_situ_beta"]) if k3 else None,
        situ_linear_beta=float(text["activation_situ_linear_beta"]) if k3 else None,
        dense_layers=text["first_k_dense_replace"],
        intermediate_size=text["intermediate_size"],
        num_experts=text["num_experts"],
        experts_per_token=text["num_experts_per_token"],
        num_shared_experts=text["num_shared_experts"],
        expert_intermediate_size=text["moe_intermediate_size"],
        latent_size=text["routed_expert_hidden_size"] if k3 else None,
        renormalize=text["moe_renormalize"],
        routed_scaling_factor=float(text["routed_scaling_factor"]),
        attn_res_block_size=text["attn_res_block_size"] if k3 else None,
        mxfp4_group=mxfp4,
    )


def _check_consistent(config: ModelConfig, text: Mapping[str, Any], path: Path, at: str) -> None:
    """Fields that are each possible but not together."""

    def require(holds: bool, name: str, expected: str, found: object) -> None:
        if not holds:
            raise ConfigError(path, at + name, expected, found)

    layers = [*config.mla_layers, *config.kda_layers]
    wanted = set(range(config.num_layers))
    require(
        sorted(layers) == sorted(wanted),
        "linear_attn_config.full_attn_layers and kda_layers",
        f"every layer of 1..{config.num_layers} exactly once",
        f"missing {sorted(i + 1 for i in wanted - set(layers))}, "
        f"outside {sorted(i + 1 for i in set(layers) - wanted)}, "
        f"repeated {sorted({i + 1 for i in layers if layers.count(i) > 1})}",
    )
    for name, found in (("full_attn_layers", config.mla_layers), ("kda_layers", config.kda_layers)):
        require(list(found) == sorted(found), f"linear_attn_config.{name}", "ascending", [i + 1 for i in found])
    kv_heads = text["num_key_value_heads"]
    require(
        kv_heads == config.num_heads,
        "num_key_value_heads",
        f"{config.num_heads} = num_attention_heads, since MLA expands one latent to every head",
        kv_heads,
    )
    require(
        config.experts_per_token <= config.num_experts,
        "num_experts_per_token",
        f"at most num_experts = {config.num_experts}",
        config.experts_per_token,
    )
    require(
        config.dense_layers <= config.num_layers,
        "first_k_dense_replace",
        f"at most num_hidden_layers = {config.num_layers}",
        config.dense_layers,
    )
    tokens = {"bos": config.bos_token_id, "eos": config.eos_token_id, "pad": config.pad_token_id}
    for role, token in tokens.items():
        require(token < config.vocab_size, f"{role}_token_id", f"below vocab_size = {config.vocab_size}", token)
    if config.mxfp4_group is not None:
        for name, width in (
            ("moe_intermediate_size", config.expert_intermediate_size),
            ("routed_expert_hidden_size", config.expert_size),
        ):
            require(width % config.mxfp4_group == 0, name, f"a multiple of {config.mxfp4_group}", width)
