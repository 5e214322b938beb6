"""DeepSeek's multi-head latent attention (MLA) as well-behaved PyTorch custom ops.

Importing this package imports torch and nothing heavier, touches no device and creates no file.
"""

from mla_ops.backends.select import Choice, select
from mla_ops.compiled import compile_layers
from mla_ops.config import PRESETS, MLAConfig
from mla_ops.errors import BackendUnavailableError, InferenceOnlyError, MLAError, OutOfPagesError, PlanError
from mla_ops.functional import (
    AttentionOutput,
    gather_latent_cache,
    merge_attn_states,
    mla_decode,
    mla_prefill,
    write_latent_cache,
)
from mla_ops.kv_cache import PagedLatentCache
from mla_ops.layer_functional import absorb_query, expand_values, linear, norm_rope_write, rms_norm
from mla_ops.module import DeepseekMLA
from mla_ops.plan import DecodeMetadata, DecodePlan, PaddingRule, PrefillPlan

__all__ = [
    "PRESETS",
    "AttentionOutput",
    "BackendUnavailableError",
    "Choice",
    "DecodeMetadata",
    "DecodePlan",
    "DeepseekMLA",
    "InferenceOnlyError",
    "MLAConfig",
    "MLAError",
    "OutOfPagesError",
    "PaddingRule",
    "PagedLatentCache",
    "PlanError",
    "PrefillPlan",
    "absorb_query",
    "compile_layers",
    "expand_values",
    "gather_latent_cache",
    "linear",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "norm_rope_write",
    "rms_norm",
    "select",
    "write_latent_cache",
]
