"""``MLAConfig``: the published models' numbers, reading Hugging Face's configs, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from mla_ops import PRESETS, MLAConfig

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
SMALL_HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
YARN: dict[str, Any] = {"factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("preset", "scale"),
    [
        ("deepseek-v2-lite", 0.114721),
        ("deepseek-v2", 0.135234),
        ("deepseek-v3", 0.135234),
        ("minicpm3", 96**-0.5),
        ("kimi-k2", 192**-0.5 * (0.1 * math.log(32) + 1) ** 2),
        ("mistral-small-4", 128**-0.5 * (0.1 * math.log(128) + 1) ** 2),
    ],
)
def test_preset_has_the_softmax_scale_of_its_model(preset: str, scale: float) -> None:
    assert MLAConfig.preset(preset).softmax_scale == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "heads", "qk", "latent"),
    [
        ("deepseek-v2-lite", 16, 192, 576),
        ("deepseek-v2", 128, 192, 576),
        ("deepseek-v3", 128, 192, 576),
        ("kimi-k2", 64, 192, 576),
        ("mistral-small-4", 32, 128, 320),
        ("minicpm3", 40, 96, 288),
    ],
)
def test_preset_has_the_widths_of_its_model(preset: str, heads: int, qk: int, latent: int) -> None:
    config = MLAConfig.preset(preset)
    assert (config.num_heads, config.qk_head_dim, config.latent_dim) == (heads, qk, latent)


def test_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'deepseek-v9'; the presets are deepseek-v2, .*minicpm3"):
        MLAConfig.preset("deepseek-v9")


def test_softmax_scale_without_mscale_all_dim_is_plain() -> None:
    config = MLAConfig(**SMALL, rope_scaling={**YARN, "mscale": 1.0})
    assert config.softmax_scale == pytest.approx(40**-0.5)


# --- from_hf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["path", "string", "folder", "mapping"])
def test_from_hf_reads_files_folders_and_mappings(form: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_HF))
    sources: dict[str, Any] = {"path": path, "string": str(path), "folder": tmp_path, "mapping": SMALL_HF}
    assert MLAConfig.from_hf(sources[form]) == MLAConfig(**SMALL, q_lora_rank=48)


@pytest.mark.parametrize("name", ["DeepseekV3Config", "DeepseekV2Config", "Mistral4Config", "MiniCPM3Config"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "yarn"])
def test_from_hf_reads_a_transformers_config(name: str, scaled: bool) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "mscale": 0.7, "mscale_all_dim": 0.7, **YARN}
    options = {"rope_parameters": rope if scaled else {"rope_type": "default", "rope_theta": 5e4}}
    config = MLAConfig.from_hf(getattr(transformers, name)(**SMALL_HF, **options, max_position_embeddings=163840))
    for field, value in {**SMALL, "q_lora_rank": 48, "rope_theta": 5e4, "max_position_embeddings": 163840}.items():
        assert getattr(config, field) == value, field
    if not scaled:
        assert config.rope_scaling is None
        return
    assert config.rope_scaling is not None
    assert config.rope_scaling["factor"] == 40.0
    assert config.softmax_scale == pytest.approx(40**-0.5 * (0.1 * 0.7 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("name", "interleaved"),
    [("DeepseekV3Config", True), ("DeepseekV2Config", True), ("Mistral4Config", True), ("MiniCPM3Config", False)],
)
def test_from_hf_knows_how_a_model_rotates(name: str, interleaved: bool) -> None:
    assert MLAConfig.from_hf(getattr(transformers, name)(**SMALL_HF)).rope_interleave is interleaved


def test_from_hf_keeps_rope_interleave_off() -> None:
    config = transformers.DeepseekV3Config(**SMALL_HF, rope_interleave=False)
    assert MLAConfig.from_hf(config).rope_interleave is False


def test_from_hf_reads_the_published_form_of_rope_scaling() -> None:
    published = {**SMALL_HF, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, **YARN}}
    config = MLAConfig.from_hf(published)
    assert config.softmax_scale == pytest.approx(40**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_from_hf_reads_the_text_part_of_a_multimodal_config() -> None:
    assert MLAConfig.from_hf({"vision_config": {}, "text_config": SMALL_HF}) == MLAConfig(**SMALL, q_lora_rank=48)


@pytest.mark.parametrize("missing", sorted(set(SMALL_HF) - {"q_lora_rank"}))
def test_from_hf_names_a_missing_field(missing: str) -> None:
    with pytest.raises(ValueError, match=rf"not the config of an MLA model: '{missing}' is missing"):
        MLAConfig.from_hf({name: value for name, value in SMALL_HF.items() if name != missing})


OTHER_ATTENTION = [
    ("BailingHybridConfig", "bailing_hybrid"),
    ("DeepseekV32Config", "deepseek_v32"),
    ("GlmMoeDsaConfig", "glm_moe_dsa"),
    ("KimiLinearConfig", "kimi_linear"),
    ("LongcatFlashConfig", "longcat_flash"),
]


@pytest.mark.parametrize(("name", "model_type"), OTHER_ATTENTION)
def test_from_hf_refuses_a_model_whose_attention_is_another(name: str, model_type: str) -> None:
    with pytest.raises(ValueError, match=f"attention of model_type '{model_type}' is not served"):
        MLAConfig.from_hf(getattr(transformers, name)())


@pytest.mark.parametrize("field", ["index_topk", "mla_scale_kv_lora", "mla_scale_q_lora", "mla_use_nope"])
def test_from_hf_refuses_a_field_that_tells_of_other_attention(field: str) -> None:
    with pytest.raises(ValueError, match=rf"attention of model_type None is not served: .*\({field}\)"):
        MLAConfig.from_hf({**SMALL_HF, field: 1})
    for unset in (None, False, 0):
        MLAConfig.from_hf({**SMALL_HF, field: unset})


def test_from_hf_knows_the_width_of_values_that_a_published_config_leaves_out() -> None:
    published = {**SMALL_HF, "model_type": "minicpm3", "v_head_dim": None}
    assert MLAConfig.from_hf(published).v_head_dim == 64 // 4


def test_from_hf_takes_none_for_a_missing_value_of_rope_scaling() -> None:
    scaling = {**YARN, "type": "yarn", "original_max_position_embeddings": None}
    config = MLAConfig.from_hf({**SMALL_HF, "rope_scaling": scaling, "max_position_embeddings": 8192})
    assert config.rope_scaling is not None
    assert config.rope_scaling["original_max_position_embeddings"] == 8192
    with pytest.raises(ValueError, match="needs 'original_max_position_embeddings'"):
        MLAConfig.from_hf({**SMALL_HF, "rope_scaling": scaling})


def test_from_hf_refuses_a_growth_of_queries_beside_a_rotation_that_is_not_scaled() -> None:
    scaling = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(ValueError, match="llama_4_scaling_beta without a scaled rotation"):
        MLAConfig.from_hf({**SMALL_HF, "rope_scaling": scaling})


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "must hold a JSON object, got list")])
def test_from_hf_refuses_a_file_that_is_no_json_object(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_hf(tmp_path)


def test_from_hf_refuses_what_is_no_config() -> None:
    with pytest.raises(TypeError, match="from_hf takes a path, a mapping or a transformers config, got int"):
        MLAConfig.from_hf(3)


def test_from_hf_of_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MLAConfig.from_hf(tmp_path / "none.json")


# --- validation -------------------------------------------------------------------------------------------------

DIMENSIONS = [*SMALL, "q_lora_rank", "max_position_embeddings"]


@pytest.mark.parametrize("field", DIMENSIONS)
def test_a_dimension_below_its_least_is_named(field: str) -> None:
    least = 0 if field == "qk_rope_head_dim" else 1
    with pytest.raises(ValueError, match=rf"MLAConfig\.{field} must be at least {least}, got {least - 1}"):
        MLAConfig(**SMALL | {field: least - 1})


@pytest.mark.parametrize("field", DIMENSIONS)
@pytest.mark.parametrize("value", [2.0, "2", True])
def test_a_dimension_that_is_no_int_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"MLAConfig\.{field} must be an int, got {value!r}"):
        MLAConfig(**SMALL | {field: value})


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_constant_that_is_not_positive_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"MLAConfig\.{field} must be positive, got {value!r}"):
        MLAConfig(**SMALL | {field: value})


def test_an_odd_rotary_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MLAConfig\.qk_rope_head_dim must be even .*got 15"):
        MLAConfig(**SMALL | {"qk_rope_head_dim": 15})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2}, "needs 'original_max_position_embeddings'"),
        ({"original_max_position_embeddings": 2}, "needs 'factor'"),
        ({**YARN, "type": "linear"}, "must be of type \"yarn\", got 'linear'"),
        ({**YARN, "factor": 0.5}, r"\['factor'\] must be at least 1, got 0.5"),
        ({**YARN, "factor": math.nan}, r"\['factor'\] must be at least 1, got nan"),
        ({**YARN, "factor": None}, "needs 'factor'"),
        ({**YARN, "original_max_position_embeddings": 0}, r"\['original_max_position_embeddings'\] must be at least 1"),
    ],
)
def test_bad_rope_scaling_is_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"MLAConfig\.rope_scaling.*{message}"):
        MLAConfig(**SMALL, rope_scaling=scaling)


def test_a_head_without_any_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MLAConfig\.qk_nope_head_dim"):
        MLAConfig(**SMALL | {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0})


# --- as a value -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_configs_are_hashable_values(preset: str) -> None:
    config = MLAConfig.preset(preset)
    again = MLAConfig(**json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert hash(dataclasses.replace(config, rope_theta=config.rope_theta + 1)) != hash(config)


def test_a_config_does_not_change() -> None:
    scaling = {**YARN}
    config = MLAConfig(**SMALL, rope_scaling=scaling)
    scaling["factor"] = 1
    assert config.rope_scaling is not None
    assert config.rope_scaling["factor"] == 40
    with pytest.raises(TypeError):
        config.rope_scaling["factor"] = 2  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 8  # type: ignore[misc]


def test_shard_divides_the_heads_and_nothing_else() -> None:
    config = MLAConfig(**SMALL)
    assert config.shard(2) == dataclasses.replace(config, num_heads=2)
    assert config.shard(1) == config


@pytest.mark.parametrize("tp_size", [0, -1, 3, 8])
def test_shard_refuses_a_size_that_does_not_divide_the_heads(tp_size: int) -> None:
    with pytest.raises(ValueError, match=rf"tp_size must divide num_heads=4, got {tp_size}"):
        MLAConfig(**SMALL).shard(tp_size)
