"""The dimensions of multi-head latent attention, with DeepSeek's names."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PRESETS", "MLAConfig", "yarn_mscale"]


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction ``0.1 * mscale * ln(factor) + 1``, and 1 for ``factor <= 1``.

    Source: DeepSeek-V2, ``yarn_get_mscale``.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True)
class MLAConfig:
    """Dimensions and constants of one MLA layer.

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads (on this rank, after :meth:`shard`).
        kv_lora_rank: width of the compressed key-value latent.
        qk_nope_head_dim: width per head of the part of q and k without position.
        qk_rope_head_dim: width of the part with rotary position, shared by all heads in k; 0 for none.
        v_head_dim: width per head of v.
        q_lora_rank: width of the compressed query; ``None`` for a single ``q_proj`` (DeepSeek-V2-Lite).
        rms_norm_eps: epsilon of the model's norms. MLA's two inner norms use 1e-6 whatever this says, as
            Hugging Face's and DeepSeek's code do.
        rope_theta: base of the rotary frequencies.
        rope_scaling: YaRN's parameters (``factor``, ``original_max_position_embeddings``, ``mscale``,
            ``mscale_all_dim``, ``beta_fast``, ``beta_slow``, ``attention_factor``, ``truncate``), Mistral 4's
            ``llama_4_scaling_beta``, or ``None``.
        rope_interleave: rotate adjacent pairs (DeepSeek's checkpoints) and not the two halves.
        max_position_embeddings: longest position.
        attention_bias: bias in ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``.

    Raises:
        ValueError: a field is out of range; the message names it.
        TypeError: a dimension is not an int.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_interleave: bool = True
    max_position_embeddings: int = 4096
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name == "q_lora_rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"MLAConfig.{name} must be an int, got {value!r} ({type(value).__name__})")
            if value < least:
                raise ValueError(f"MLAConfig.{name} must be at least {least}, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"MLAConfig.qk_rope_head_dim must be even (it rotates pairs), got {self.qk_rope_head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"MLAConfig.{name} must be positive, got {value!r}")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_rope_scaling(self.rope_scaling))

    @property
    def qk_head_dim(self) -> int:
        """Width per head of q and k before absorption: 192 in DeepSeek-V3."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a row of the latent cache: 576 in DeepSeek-V3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim ** -0.5``, times YaRN's ``mscale ** 2`` where the config asks for it.

        0.114721 for DeepSeek-V2-Lite and 0.135234 for DeepSeek-V3. The same in the absorbed form: it is the
        scale of 192-wide heads, never of 576-wide latent rows.
        """
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        if self.rope_scaling is not None and self.rope_scaling["mscale_all_dim"]:
            scale *= yarn_mscale(self.rope_scaling["factor"], self.rope_scaling["mscale_all_dim"]) ** 2
        return scale

    @property
    def query_scaling(self) -> tuple[float, int]:
        """Mistral 4's growth of queries past the original context: beta and its window of positions; (0, 1) for none.

        A query at a position is multiplied by ``1 + beta * log(1 + position // window)``.
        """
        scaling = self.rope_scaling
        if scaling is None or "llama_4_scaling_beta" not in scaling:
            return 0.0, 1
        return float(scaling["llama_4_scaling_beta"]), int(scaling["original_max_position_embeddings"])

    def shard(self, tp_size: int) -> MLAConfig:
        """The config of one of ``tp_size`` tensor-parallel ranks, with ``num_heads / tp_size`` heads."""
        if tp_size < 1 or self.num_heads % tp_size:
            raise ValueError(f"tp_size must divide num_heads={self.num_heads}, got {tp_size}")
        return dataclasses.replace(self, num_heads=self.num_heads // tp_size)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, for fingerprints and messages."""
        values = dataclasses.asdict(self)
        if self.rope_scaling is not None:
            values["rope_scaling"] = dict(self.rope_scaling)
        return values

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """The config of a published model, by its name in :data:`PRESETS`."""
        try:
            return PRESETS[name]
        except KeyError:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(sorted(PRESETS))}") from None

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> MLAConfig:
        """Read a Hugging Face config.

        Args:
            source: the path of a ``config.json`` or of the folder that holds one, its content as a mapping,
                or a ``transformers`` config object.

        Raises:
            ValueError: the config is not of an MLA model, or of one whose attention is another; the message says which
                field is missing, or what is different.
            FileNotFoundError: no such file.
        """
        return cls(**_fields_from_hf(_hf_mapping(source)))

    @staticmethod
    def num_layers_of_hf(source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> int | None:
        """``num_hidden_layers`` of a Hugging Face config, or ``None`` where it has none; ``source`` as above."""
        layers = _language_model(_hf_mapping(source)).get("num_hidden_layers")
        return None if layers is None else int(layers)


_LEAST = {
    "hidden_size": 1,
    "num_heads": 1,
    "kv_lora_rank": 1,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 0,
    "v_head_dim": 1,
    "q_lora_rank": 1,
    "max_position_embeddings": 1,
}

# What Hugging Face's YaRN takes when the config is silent.
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}


class _FrozenDict(dict[str, Any]):
    """A dict that hashes by content and does not change, so that a config can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles are made whole, not item by item
        return _FrozenDict, (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("MLAConfig.rope_scaling does not change; make another config with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse


def _checked_rope_scaling(scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    if kind != "yarn":
        raise ValueError(f'MLAConfig.rope_scaling must be of type "yarn", got {kind!r}')
    for name in ("factor", "original_max_position_embeddings"):
        if scaling.get(name) is None:
            raise ValueError(f"MLAConfig.rope_scaling needs {name!r}, got {sorted(scaling)}")
    values: dict[str, Any] = {name: float(scaling.get(name) or default) for name, default in _YARN_DEFAULTS.items()}
    values["factor"] = float(scaling["factor"])
    values["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    for name in ("factor", "original_max_position_embeddings"):
        if not values[name] >= 1:
            raise ValueError(f"MLAConfig.rope_scaling[{name!r}] must be at least 1, got {scaling[name]}")
    for name in ("attention_factor", "truncate", "llama_4_scaling_beta"):
        if scaling.get(name) is not None:
            values[name] = scaling[name]
    return _FrozenDict(values)


def _hf_mapping(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        try:
            values = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return values
    if hasattr(source, "to_dict"):
        values = source.to_dict()
        assert isinstance(values, dict)
        return values
    raise TypeError(f"from_hf takes a path, a mapping or a transformers config, got {type(source).__name__}")


def _language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal checkpoints nest the language model."""
    return hf["text_config"] if "text_config" in hf and "kv_lora_rank" not in hf else hf


def _fields_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    hf = _language_model(hf)
    told = (what for field, what in _HF_OTHER_FIELDS.items() if hf.get(field))
    if other := _HF_OTHER_ATTENTION.get(hf.get("model_type", "")) or next(told, None):
        raise ValueError(
            f"the attention of model_type {hf.get('model_type')!r} is not served: it {other}; "
            "make an MLAConfig by hand for what is the same"
        )
    fields: dict[str, Any] = {}
    heads, hidden = hf.get("num_attention_heads"), hf.get("hidden_size")
    if hf.get("model_type") == "minicpm3" and hf.get("v_head_dim") is None and heads and hidden:
        hf = {**hf, "v_head_dim": hidden // heads}  # which a file may leave to the model's code
    for ours, theirs in _HF_REQUIRED.items():
        if hf.get(theirs) is None:
            raise ValueError(
                f"not the config of an MLA model: {theirs!r} is missing (model_type {hf.get('model_type')!r})"
            )
        fields[ours] = hf[theirs]
    fields["q_lora_rank"] = hf.get("q_lora_rank")
    # transformers 5 has theta and scaling in rope_parameters, published files in rope_theta and rope_scaling
    rope = dict(hf.get("rope_parameters") or {})
    scaling = hf.get("rope_scaling") or rope
    fields["rope_theta"] = float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    if scaling.get("rope_type", scaling.get("type", "default")) not in ("default", None):
        fields["rope_scaling"] = {
            "original_max_position_embeddings": hf.get("max_position_embeddings"),
            **{name: value for name, value in scaling.items() if value is not None},
        }
    elif scaling.get("llama_4_scaling_beta") is not None:
        raise ValueError("llama_4_scaling_beta without a scaled rotation is not served; its rope type must be yarn")
    fields["rope_interleave"] = hf.get("model_type") not in _HF_HALF_ROTATION
    for name in ("rms_norm_eps", "rope_interleave", "max_position_embeddings", "attention_bias"):
        if hf.get(name) is not None:
            fields[name] = hf[name]
    return fields


_HF_REQUIRED = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


# Fields of a config that tell of attention that DeepseekMLA is not.
_HF_OTHER_FIELDS = {
    "index_topk": "attends to the keys that an indexer selects (index_topk)",
    "mla_use_nope": "rotates nothing (mla_use_nope)",
    "mla_scale_q_lora": "scales queries by their rank (mla_scale_q_lora)",
    "mla_scale_kv_lora": "scales latents by their rank (mla_scale_kv_lora)",
}

# Model types with the fields of an MLA config, and what their code does that no field says and DeepseekMLA does not.
_HF_OTHER_ATTENTION = {
    "bailing_hybrid": "gates the heads' outputs",
    "dots3_note_text": "gates the heads' outputs, and scales queries and latents by their ranks",
    "kimi_linear": "rotates nothing",
    "longcat_flash": "scales queries and latents by their ranks",
}

# Model types whose code rotates halves and whose config has no word for it.
_HF_HALF_ROTATION = frozenset({"minicpm3"})


def _yarn(factor: float, original: int = 4096, mscale: float = 1.0, **more: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        **more,
    }


PRESETS: Mapping[str, MLAConfig] = {
    "deepseek-v2-lite": MLAConfig(
        hidden_size=2048,
        num_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_scaling=_yarn(40, mscale=0.707),
        max_position_embeddings=163840,
    ),
    "deepseek-v2": MLAConfig(
        hidden_size=5120,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_scaling=_yarn(40),
        max_position_embeddings=163840,
    ),
    "deepseek-v3": MLAConfig(
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_scaling=_yarn(40),
        max_position_embeddings=163840,
    ),
    "kimi-k2": MLAConfig(
        hidden_size=7168,
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_theta=50000.0,
        rope_scaling=_yarn(32, beta_fast=1.0),
        max_position_embeddings=131072,
    ),
    "mistral-small-4": MLAConfig(
        hidden_size=4096,
        num_heads=32,
        q_lora_rank=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_scaling=_yarn(128, 8192, llama_4_scaling_beta=0.1),
        max_position_embeddings=1048576,
    ),
    "minicpm3": MLAConfig(
        hidden_size=2560,
        num_heads=40,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        rms_norm_eps=1e-5,
        rope_interleave=False,
        max_position_embeddings=32768,
    ),
}
"""Published models, by name. MiniCPM3's has its shapes; files of it that scale the rotation by longrope, which is not
served, are refused by :meth:`MLAConfig.from_hf`."""
