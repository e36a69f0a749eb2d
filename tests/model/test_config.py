"""config.json: every field of the family is needed, none unknown is accepted, contradictions are named."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig, load_config, parse_config
from model.errors import ConfigError, ModelError
from model.families import BOOKKEEPING, FAMILIES, SHARED_LINEAR
from model.tensors import expected_tensors
from tests.golden import golden_dir

WHERE = Path("somewhere/config.json")
MODELS = ("k3_tiny_mxfp4", "kimi_linear_tiny")
Json = dict[str, Any]


def raw_config(name: str) -> Json:
    return json.loads((golden_dir(name) / "config.json").read_text())


def text_of(raw: Json) -> Json:
    return raw.get("text_config", raw)


def required_fields(family: str) -> list[tuple[str, ...]]:
    table = FAMILIES[family]
    at = ("text_config",) if table.outer is not None else ()
    outer = [(name,) for name in table.outer or ()]
    return [
        *outer,
        *((*at, name) for name in table.text),
        *((*at, "linear_attn_config", name) for name in table.linear),
    ]


def released_k3() -> Json:
    """The released model's numbers, as the fact sheet lists them, in the tiny file's form."""
    raw = raw_config("k3_tiny_mxfp4")
    raw |= {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    raw |= {"media_placeholder_token_id": 163605}
    full = [*range(4, 93, 4), 93]
    raw["text_config"] |= {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "attn_res_block_size": 12,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1048576,
    } | {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    raw["text_config"]["linear_attn_config"] |= {
        "head_dim": 128,
        "num_heads": 96,
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, 94) if layer not in full],
    }
    return raw


def test_tiny_k3() -> None:
    config = load_config(golden_dir("k3_tiny_mxfp4"))
    assert (config.family, config.dtype, config.mxfp4_group) == ("kimi_k3", "bfloat16", 32)
    assert config.mla_layers == (3, 7, 11, 15, 16)
    assert sorted(config.mla_layers + config.kda_layers) == list(range(17))
    assert (config.gate_lower_bound, config.situ_beta, config.situ_linear_beta) == (-5.0, 4.0, 25.0)
    assert (config.rms_norm_eps, config.lora_norm_eps, config.qk_l2_eps) == (1e-5, 1e-6, 1e-6)
    assert (config.experts_per_token, config.latent_size, config.attn_res_block_size) == (2, 96, 6)
    layout = config.pool_layout(64)
    assert (layout.row_width, layout.conv_history, layout.num_kda_layers) == (56, 3, 12)
    assert layout.slot_floats == 12 * (6 * 32 * 32 + 3 * 3 * 6 * 32)


def test_tiny_kimi_linear() -> None:
    config = load_config(golden_dir("kimi_linear_tiny"))
    assert (config.family, config.activation, config.gate_lower_bound) == ("kimi_linear", "silu", None)
    assert (config.q_lora_rank, config.latent_size, config.attn_res_block_size) == (None, None, None)
    assert not config.mla_output_gate
    assert not config.kda_full_rank_gate
    assert config.routed_scaling_factor == 2.446


def test_released_k3_has_the_released_checkpoint_s_tensors_and_bytes() -> None:
    config = parse_config(released_k3(), WHERE)
    assert config.mla_layers[-2:] == (91, 92)
    layout = config.pool_layout(512)
    assert 4 * layout.recurrent_floats == 434_110_464
    assert 2 * layout.num_mla_layers * layout.row_width == 27_648  # bf16 bytes a token
    sizes = {"BF16": 2, "F32": 4, "U8": 1}
    counts, total = {True: 0, False: 0}, {True: 0, False: 0}
    for name, spec in expected_tensors(config, experts_packed=True).items():
        routed = ".experts." in name
        shape = (128,) if name.endswith("A_log") else spec.shape  # padded on disk
        counts[routed] += 1
        total[routed] += math.prod(shape) * sizes[spec.dtypes[0]]
    assert counts == {True: 494_592, False: 2_460}
    assert total == {True: 1_446_456_066_048, False: 113_509_540_864}


@pytest.mark.parametrize("name", MODELS)
def test_each_missing_field_is_named(name: str) -> None:
    original = raw_config(name)
    fields = required_fields(original["model_type"])
    assert len(fields) > 35
    for path in fields:
        raw = copy.deepcopy(original)
        section = raw
        for key in path[:-1]:
            section = section[key]
        del section[path[-1]]
        with pytest.raises(ConfigError, match=path[-1]):
            parse_config(raw, WHERE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("section", ["outer", "text", "linear"])
def test_an_unknown_field_is_named(name: str, section: str) -> None:
    raw = raw_config(name)
    text = text_of(raw)
    place = {"outer": raw, "text": text, "linear": text["linear_attn_config"]}[section]
    place["sliding_window"] = 4096
    with pytest.raises(ConfigError, match=r"sliding_window.*found 4096"):
        parse_config(raw, WHERE)


@pytest.mark.parametrize("name", MODELS)
def test_bookkeeping_is_ignored_in_files_that_have_it(name: str) -> None:
    plain = parse_config(raw_config(name), WHERE)
    raw = raw_config(name)
    for field in BOOKKEEPING:
        text_of(raw)[field] = raw[field] = "whatever"
    assert parse_config(raw, WHERE) == plain


def test_fields_of_another_family_are_refused() -> None:
    raw = raw_config("kimi_linear_tiny")
    raw["linear_attn_config"]["gate_lower_bound"] = -5.0
    with pytest.raises(ConfigError, match="gate_lower_bound"):
        parse_config(raw, WHERE)
    assert "gate_lower_bound" not in SHARED_LINEAR
    raw = raw_config("k3_tiny_mxfp4")
    raw["text_config"]["rope_theta"] = 10000.0
    with pytest.raises(ConfigError, match="rope_theta"):
        parse_config(raw, WHERE)


def test_vision_is_recognised_and_unread() -> None:
    raw = raw_config("k3_tiny_mxfp4")
    plain = parse_config(raw, WHERE)
    raw["vision_config"] = {"anything": 1}
    assert parse_config(raw, WHERE) == plain


def put(value: Any, *path: str) -> Callable[[Json], None]:
    def change(text: Json) -> None:
        for key in path[:-1]:
            text = text[key]
        text[path[-1]] = value

    return change


LINEAR, QUANT = "linear_attn_config", "quantization_config"
WEIGHTS = (QUANT, "config_groups", "group_0", "weights")
CONTRADICTIONS = [
    (put(4, "num_key_value_heads"), "num_key_value_heads.*found 4"),
    (put([1, 2, 3], LINEAR, "kda_layers"), "every layer.*missing"),
    (put([4, 8, 12, 16, 17, 18], LINEAR, "full_attn_layers"), r"outside \[18\]"),
    (put([0, 4, 8, 12, 16, 17], LINEAR, "full_attn_layers"), r"outside \[0\]"),
    (put([1, 4, 8, 12, 16, 17], LINEAR, "full_attn_layers"), r"repeated \[1\]"),
    (put([4, 8, 12, 17, 16], LINEAR, "full_attn_layers"), "ascending"),
    (put([4, 8, 12, 16, True], LINEAR, "full_attn_layers"), "full_attn_layers"),
    (put(18, "num_hidden_layers"), r"missing \[18\]"),
    (put("gelu", "hidden_act"), "hidden_act.*situ.*gelu"),
    (put("greedy", "topk_method"), "topk_method.*noaux_tc.*greedy"),
    (put("softmax", "moe_router_activation_func"), "moe_router_activation_func.*sigmoid"),
    (put(2, "num_expert_group"), "num_expert_group.*found 2"),
    (put(2, "topk_group"), "topk_group.*found 2"),
    (put(2, "moe_layer_freq"), "moe_layer_freq"),
    (put(1, "num_nextn_predict_layers"), "num_nextn_predict_layers"),
    (put(True, "tie_word_embeddings"), "tie_word_embeddings"),
    (put(False, "mla_use_nope"), "mla_use_nope"),
    (put(False, "latent_moe_use_norm"), "latent_moe_use_norm"),
    (put(9, "num_experts_per_token"), "num_experts_per_token.*at most num_experts = 8.*found 9"),
    (put(18, "first_k_dense_replace"), "first_k_dense_replace"),
    (put(True, "num_experts"), "num_experts.*positive integer.*True"),
    (put(-1, "hidden_size"), "hidden_size"),
    (put(176.0, "hidden_size"), "hidden_size"),
    (put("176", "hidden_size"), "hidden_size"),
    (put(None, "q_lora_rank"), "q_lora_rank"),
    (put(0.0, "rms_norm_eps"), "rms_norm_eps"),
    (put(float("nan"), "rms_norm_eps"), "rms_norm_eps"),
    (put(5.0, LINEAR, "gate_lower_bound"), "gate_lower_bound"),
    (put([], LINEAR), "linear_attn_config.*object"),
    (put(255, "eos_token_id"), "text_config.eos_token_id.*258.*found 255"),
    (put("float32", "dtype"), "text_config.dtype.*bfloat16.*float32"),
    (put("float16", "dtype"), "text_config.dtype"),
    (put(48, "moe_intermediate_size"), "moe_intermediate_size.*multiple of 32"),
    (put("awq", QUANT, "quant_method"), "quant_method"),
    (put("nvfp4-pack-quantized", QUANT, "format"), "format.*mxfp4"),
    (put({"num_bits": 8}, QUANT, "kv_cache_scheme"), "kv_cache_scheme"),
    (put({}, QUANT, "config_groups"), "config_groups.*exactly one"),
    (put({"num_bits": 8}, QUANT, "config_groups", "group_0", "input_activations"), "input_activations"),
    (put(8, *WEIGHTS, "num_bits"), "num_bits.*found 8"),
    (put(16, *WEIGHTS, "group_size"), "group_size.*found 16"),
    (put(False, *WEIGHTS, "symmetric"), "symmetric"),
    (put(3, *WEIGHTS, "surprise"), "surprise"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_contradictions_are_named(change: Callable[[Json], None], message: str) -> None:
    raw = raw_config("k3_tiny_mxfp4")
    change(raw["text_config"])
    with pytest.raises(ConfigError, match=message) as error:
        parse_config(raw, WHERE)
    assert str(WHERE) in str(error.value)


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_special_tokens_lie_in_the_vocabulary(field: str) -> None:
    raw = raw_config("k3_tiny_mxfp4")
    raw[field] = raw["text_config"][field] = 272
    with pytest.raises(ConfigError, match=f"{field}.*below vocab_size = 272"):
        parse_config(raw, WHERE)


@pytest.mark.parametrize(
    ("model_type", "architectures"),
    [
        ("llama", ["LlamaForCausalLM"]),
        ("kimi_k3", ["KimiLinearForCausalLM"]),
        ("kimi_linear", ["KimiK3ForConditionalGeneration"]),
        (None, None),
        ("kimi_k3", []),
    ],
)
def test_families_are_told_apart_by_both_names(model_type: object, architectures: object) -> None:
    raw = raw_config("k3_tiny_mxfp4") | {"model_type": model_type, "architectures": architectures}
    with pytest.raises(ConfigError, match="model_type and architectures"):
        parse_config(raw, WHERE)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\udcff"])
def test_unreadable_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_config(tmp_path / "nowhere")


def test_parsing_a_config_needs_no_torch() -> None:
    code = "import sys, model.config, model.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_config_is_a_value() -> None:
    first, second = (load_config(golden_dir("k3_tiny_smooth")) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, ModelConfig)
    with pytest.raises(AttributeError):
        first.vocab_size = 1  # type: ignore[misc]
