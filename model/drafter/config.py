"""Which drafter a checkpoint holds: DSpark's or DFlash's form, told apart by its config.json. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.config import ModelConfig, check_fields
from model.errors import ConfigError, ModelError
from model.families import BOOKKEEPING, COUNT, EPS, FLAG, SIZE, TABLE, TOKEN, Rule, one_of, only

Form = Literal["dspark", "dflash"]

LAYER_IDS = Rule("a list of layer numbers, the first is 0", (list,))
FACTOR = Rule("a number in [1, 1e6]", (int, float), minimum=1.0, maximum=1e6)
THETA = Rule("a number in [1, 1e12]", (int, float), minimum=1.0, maximum=1e12)
SCALE = Rule("a number in [0, 100]", (int, float), minimum=0.0, maximum=100.0)
DTYPE = one_of("bfloat16", "float32")

DSPARK: Mapping[str, Rule] = {
    "architectures": only(["K3DSparkModel"]),
    "model_type": only("k3_dspark"),
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "q_lora_rank": SIZE,
    "kv_lora_rank": SIZE,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "mla_use_nope": only(False),
    "mla_use_output_gate": only(False),
    "vocab_size": SIZE,
    "draft_vocab_size": SIZE,
    "rms_norm_eps": EPS,
    "target_hidden_size": SIZE,
    "target_layer_ids": LAYER_IDS,
    "num_target_layers": SIZE,
    "mask_token_id": TOKEN,
    "markov_rank": SIZE,
    "markov_head_type": only("vanilla"),
    "enable_confidence_head": FLAG,
    "confidence_head_with_markov": FLAG,
    "rope_parameters": TABLE,
    "torch_dtype": DTYPE,
}
DSPARK_OPTIONAL: Mapping[str, Rule] = {
    "num_key_value_heads": SIZE,
    "target_num_hidden_layers": SIZE,
    "tie_word_embeddings": only(False),
    "mla_use_qk_norm": only(False),
    "dspark_bonus_anchor": only(False),
    "hidden_act": only("silu"),
    "block_size": SIZE,
    "rope_theta": THETA,
}
DFLASH: Mapping[str, Rule] = {
    "architectures": only(["DFlashDraftModel"]),
    "model_type": only("qwen3"),
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "vocab_size": SIZE,
    "rms_norm_eps": EPS,
    "dflash_config": TABLE,
    "torch_dtype": DTYPE,
}
DFLASH_OPTIONAL: Mapping[str, Rule] = {
    "attention_bias": only(False),
    "attention_dropout": only(0.0),
    "hidden_act": only("silu"),
    "tie_word_embeddings": FLAG,
    "block_size": SIZE,
    "num_target_layers": SIZE,
    "target_hidden_size": SIZE,
    "sliding_window": Rule("a positive integer or null", (int,), minimum=1, nullable=True),
    "use_sliding_window": FLAG,
    "max_window_layers": COUNT,
    "is_causal": only(False),
    "rope_parameters": TABLE,
    "rope_theta": THETA,
    "rope_scaling": Rule("null", nullable=True),
}
DFLASH_SECTION: Mapping[str, Rule] = {"mask_token_id": TOKEN, "target_layer_ids": LAYER_IDS}
DFLASH_SECTION_OPTIONAL: Mapping[str, Rule] = {"block_size": SIZE, "input_embedding_scale": SCALE}
ROPE: Mapping[str, Rule] = {"rope_type": one_of("default", "yarn"), "rope_theta": THETA}
YARN: Mapping[str, Rule] = {
    "factor": FACTOR,
    "original_max_position_embeddings": SIZE,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "mscale": SCALE,
    "mscale_all_dim": SCALE,
}
# Nothing here reads them: the target says which tokens are special and how long a context may be.
IGNORED = BOOKKEEPING | {
    "_torchspec_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "dtype",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions; `factor` 1 is the plain kind, above it YaRN's."""

    dim: int
    theta: float
    factor: float = 1.0
    original_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A drafter as the code sees it. `block_len`: the most tokens that it drafts at once.

    DSpark attends through latents (`kv_lora` and a shared rotary key a token), DFlash through grouped heads;
    `windows` has one entry a layer, None where it sees everything.
    """

    form: Form
    dtype: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    eps: float
    vocab: int
    target_layers: tuple[int, ...]
    mask_id: int
    block_len: int
    rope: Rope
    windows: tuple[int | None, ...]
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    v_dim: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    markov_rank: int = 0
    confidence: bool = False
    confidence_sees_markov: bool = False
    embedding_scale: float = 1.0

    @property
    def row_width(self) -> int:
        """Numbers that one token leaves in one layer: what a later block attends to."""
        return self.kv_lora + self.rope.dim if self.form == "dspark" else 2 * self.kv_heads * self.head_dim

    @property
    def slots(self) -> int:
        """Positions of a full block: DFlash's anchor drafts nothing itself."""
        return self.block_len if self.form == "dspark" else self.block_len + 1


def load_drafter_config(model_dir: Path, target: ModelConfig, *, block_len: int | None = None) -> DrafterConfig:
    """Parse model_dir/config.json and check that it was made for `target`.

    `block_len` where the checkpoint does not say it. Raises: ModelError, ConfigError naming the field.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a readable JSON object, found {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected an object, found {type(raw).__name__}")
    return parse_drafter_config(raw, target, path=path, block_len=block_len)


def parse_drafter_config(
    raw: Mapping[str, Any], target: ModelConfig, *, path: Path, block_len: int | None = None
) -> DrafterConfig:
    """Raises: ConfigError."""
    kind = raw.get("architectures")
    if kind == ["K3DSparkModel"]:
        config = _dspark(raw, path, block_len)
    elif kind == ["DFlashDraftModel"]:
        config = _dflash(raw, path, block_len)
    else:
        raise ConfigError(path, "architectures", "['K3DSparkModel'] or ['DFlashDraftModel']", f"{kind!r}")
    _check_target(config, raw, target, path)
    return config


def _dspark(raw: Mapping[str, Any], path: Path, block_len: int | None) -> DrafterConfig:
    check_fields(raw, DSPARK, DSPARK_OPTIONAL, IGNORED, path, "")
    layers = raw["num_hidden_layers"]
    for name, expected in (
        ("draft_vocab_size", raw["vocab_size"]),
        ("num_target_layers", len(raw["target_layer_ids"])),
        ("num_key_value_heads", raw["num_attention_heads"]),
    ):
        if raw.get(name, expected) != expected:
            raise ConfigError(path, name, str(expected), raw[name])
    return DrafterConfig(
        form="dspark",
        **_sizes(raw),
        target_layers=tuple(raw["target_layer_ids"]),
        mask_id=raw["mask_token_id"],
        block_len=_block_len(raw.get("block_size", 7), block_len, path, "block_size"),
        rope=_rope(raw["rope_parameters"], raw["qk_rope_head_dim"], path),
        windows=(None,) * layers,
        q_lora=raw["q_lora_rank"],
        kv_lora=raw["kv_lora_rank"],
        nope=raw["qk_nope_head_dim"],
        v_dim=raw["v_head_dim"],
        markov_rank=raw["markov_rank"],
        confidence=raw["enable_confidence_head"],
        confidence_sees_markov=raw["confidence_head_with_markov"],
    )


def _dflash(raw: Mapping[str, Any], path: Path, block_len: int | None) -> DrafterConfig:
    check_fields(raw, DFLASH, DFLASH_OPTIONAL, IGNORED | {"layer_types"}, path, "")  # those are looked at below
    section = raw["dflash_config"]
    check_fields(section, DFLASH_SECTION, DFLASH_SECTION_OPTIONAL, frozenset(), path, "dflash_config.")
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or [FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise ConfigError(path, "layer_types", f"{layers} of {FULL!r} and {SLIDING!r}", kinds)
    window = raw.get("sliding_window")
    if SLIDING in kinds and window is None:
        raise ConfigError(path, "sliding_window", "a positive integer, since layers slide", window)
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise ConfigError(path, "num_key_value_heads", "a divisor of num_attention_heads", raw["num_key_value_heads"])
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)}
    size = section.get("block_size") or raw.get("block_size", 16)
    return DrafterConfig(
        form="dflash",
        **_sizes(raw),
        target_layers=tuple(section["target_layer_ids"]),
        mask_id=section["mask_token_id"],
        block_len=_block_len(size - 1, block_len, path, "block_size"),
        rope=_rope(rope, raw["head_dim"], path),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        embedding_scale=float(section.get("input_embedding_scale", 1.0)),
    )


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both forms name alike."""
    return {
        "dtype": raw["torch_dtype"],
        "hidden": raw["hidden_size"],
        "intermediate": raw["intermediate_size"],
        "layers": raw["num_hidden_layers"],
        "heads": raw["num_attention_heads"],
        "eps": float(raw["rms_norm_eps"]),
        "vocab": raw["vocab_size"],
    }


def _block_len(stored: int, asked: int | None, path: Path, name: str) -> int:
    """A shorter block than it was trained for is fine; none, or a longer one, is not."""
    if stored < 1 or (asked is not None and not 1 <= asked <= stored):
        raise ConfigError(path, name, f"a draft length of 1 to {stored}", stored if asked is None else asked)
    return stored if asked is None else asked


def _rope(section: Mapping[str, Any], dim: int, path: Path) -> Rope:
    at = "rope_parameters."
    yarn = section.get("rope_type") == "yarn"
    check_fields(section, {**ROPE, **YARN} if yarn else ROPE, {}, frozenset(), path, at)
    if dim % 2:
        raise ConfigError(path, "the rotary width", "an even number", dim)
    if not yarn:
        return Rope(dim=dim, theta=float(section["rope_theta"]))
    return Rope(
        dim=dim,
        theta=float(section["rope_theta"]),
        factor=float(section["factor"]),
        original_len=section["original_max_position_embeddings"],
        beta_fast=float(section["beta_fast"]),
        beta_slow=float(section["beta_slow"]),
        mscale=float(section["mscale"]),
        mscale_all_dim=float(section["mscale_all_dim"]),
    )


def _check_target(config: DrafterConfig, raw: Mapping[str, Any], target: ModelConfig, path: Path) -> None:
    """A drafter for another model, vocabulary or other taps drafts noise: refuse it by name."""
    at = "dflash_config." if config.form == "dflash" else ""
    layers = list(config.target_layers)
    if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise ConfigError(
            path, f"{at}target_layer_ids", f"ascending layers of the target's {target.num_layers}", layers
        )
    for name, found, wanted in (
        ("vocab_size", config.vocab, target.vocab_size),
        ("hidden_size", config.hidden, target.hidden_size),
        ("target_hidden_size", raw.get("target_hidden_size", target.hidden_size), target.hidden_size),
        ("target_num_hidden_layers", raw.get("target_num_hidden_layers", target.num_layers), target.num_layers),
    ):
        if found != wanted:
            raise ConfigError(path, name, f"the target's {wanted}", found)
    if config.mask_id >= config.vocab:
        raise ConfigError(path, f"{at}mask_token_id", f"a token below {config.vocab}", config.mask_id)
