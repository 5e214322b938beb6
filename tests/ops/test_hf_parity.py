"""``DeepseekMLA`` against Hugging Face's code: one attention layer, and a whole small model around it.

Hugging Face runs each sequence alone and whole. Ours prefills them as one ragged batch, then decodes them together
token by token from the paged cache; what each layer's attention returns must be the same at every position.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from mla_ops import DecodePlan, DeepseekMLA, MLAConfig, PagedLatentCache, PrefillPlan

PROMPT_LENS = [1, 7, 24, 40]  # one token, a page edge -1, a page edge, several pages
DECODE_STEPS = 64
PAGE_SIZE = 8
MAX_LEN = 128
REL_ERROR = 1e-5

# original_max_position_embeddings is 32: most positions of the test are beyond it
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


def hf_config(*, q_lora_rank: int | None, yarn: bool, interleave: bool) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        max_position_embeddings=MAX_LEN,
        rope_interleave=interleave,
        rope_parameters=dict(YARN) if yarn else {"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )


CONFIGS = [
    pytest.param(hf_config(q_lora_rank=rank, yarn=yarn, interleave=interleave), id=f"{r}-{y}-{i}")
    for rank, r in ((None, "q_proj"), (24, "q_lora"))
    for yarn, y in ((False, "rope"), (True, "yarn"))
    for interleave, i in ((True, "interleaved"), (False, "halves"))
]


class PagedAttention(nn.Module):
    """Hugging Face's call of an attention layer, served by a ``DeepseekMLA`` and the step's plan."""

    def __init__(self, attention: DeepseekMLA, kv_cache: Tensor, steps: dict[str, Any]) -> None:
        super().__init__()
        self.attention = attention
        self.kv_cache = kv_cache
        self.steps = steps

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        plan, rows = self.steps["plan"], hidden_states[0]
        if isinstance(plan, PrefillPlan):
            out = self.attention.prefill(rows, plan.positions, self.kv_cache, plan)
        else:
            out = self.attention(rows, plan.at(rows.shape[0]).positions, self.kv_cache, plan)
        return out[None], None


def ragged_then_decoded(
    config: MLAConfig, caches: PagedLatentCache, tokens: list[Tensor], run: Any
) -> list[list[Tensor]]:
    """Call ``run(rows, plan)`` for a ragged prefill and ``DECODE_STEPS`` steps; return its results per sequence."""
    sequences = range(len(tokens))
    for sequence, length in zip(sequences, PROMPT_LENS, strict=True):
        caches.allocate(sequence, length)
    plan = PrefillPlan.make(
        config,
        query_lens=PROMPT_LENS,
        block_table=caches.block_table(sequences),
        page_size=PAGE_SIZE,
        dtype=torch.float32,
    )
    prompts = torch.cat([x[:n] for x, n in zip(tokens, PROMPT_LENS, strict=True)])
    results = [[part] for part in run(prompts, plan).split(PROMPT_LENS)]
    decode = DecodePlan(
        config,
        max_batch_size=len(tokens),
        max_seq_len=MAX_LEN,
        page_size=PAGE_SIZE,
        device="cpu",
        dtype=torch.float32,
        debug=True,
    )
    for step in range(DECODE_STEPS):
        for sequence in sequences:
            caches.extend(sequence)
        decode.update(caches.block_table(sequences), caches.seq_lens(sequences))
        rows = torch.stack([x[n + step] for x, n in zip(tokens, PROMPT_LENS, strict=True)])
        for result, row in zip(results, run(rows, decode), strict=True):
            result.append(row[None])
    decode.check_canaries()
    return results


def poisoned_cache(config: MLAConfig, num_layers: int) -> PagedLatentCache:
    cache = PagedLatentCache(config, num_layers=num_layers, num_pages=64, page_size=PAGE_SIZE, dtype=torch.float32)
    for layer in cache.layers:
        layer.fill_(torch.nan)
    return cache


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error <= REL_ERROR, f"{what}: relative error {error:.2e} is above {REL_ERROR:.0e}"


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_attention_layer_equals_hugging_face(config: DeepseekV3Config) -> None:
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    for norm in (theirs.kv_a_layernorm, theirs.q_a_layernorm):
        if norm is not None:
            norm.weight.uniform_(0.5, 1.5)  # ones would hide a norm that is left out of the weights
    ours = DeepseekMLA(MLAConfig.from_hf(config))
    ours.load_state_dict(theirs.state_dict())
    hidden = [torch.randn(n + DECODE_STEPS, config.hidden_size) for n in PROMPT_LENS]
    cache = poisoned_cache(ours.config, 1)
    results = ragged_then_decoded(
        ours.config,
        cache,
        hidden,
        lambda rows, plan: (
            ours.prefill(rows, plan.positions, cache.layers[0], plan)
            if isinstance(plan, PrefillPlan)
            else ours(rows, plan.at(rows.shape[0]).positions, cache.layers[0], plan)
        ),
    )
    rotary = DeepseekV3RotaryEmbedding(config)
    for sequence, (rows, result) in enumerate(zip(hidden, results, strict=True)):
        length = rows.shape[0]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        expected = theirs(rows[None], rotary(rows[None], torch.arange(length)[None]), mask)[0][0]
        assert_same(torch.cat(result), expected, f"sequence {sequence}")


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_whole_model_equals_hugging_face(config: DeepseekV3Config) -> None:
    model = DeepseekV3ForCausalLM(config).eval()
    tokens = [torch.randint(config.vocab_size, (n + DECODE_STEPS,)) for n in PROMPT_LENS]

    attended: list[list[Tensor]] = []  # per layer, Hugging Face's attention outputs of each sequence
    for layer in model.model.layers:
        outputs: list[Tensor] = []
        attended.append(outputs)
        layer.self_attn.register_forward_hook(lambda m, a, out, outputs=outputs: outputs.append(out[0][0]))
    logits = [model(x[None]).logits[0] for x in tokens]

    mla = MLAConfig.from_hf(config)
    cache = poisoned_cache(mla, config.num_hidden_layers)
    steps: dict[str, Any] = {}
    ours_attended: list[list[Tensor]] = [[] for _ in model.model.layers]
    for index, layer in enumerate(model.model.layers):
        attention = DeepseekMLA(mla)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = PagedAttention(attention, cache.layers[index], steps)
        layer.self_attn.register_forward_hook(lambda m, a, out, outputs=ours_attended[index]: outputs.append(out[0][0]))

    def run(rows: Tensor, plan: Any) -> Tensor:
        steps["plan"] = plan
        return model(rows[None], use_cache=False).logits[0]

    results = ragged_then_decoded(mla, cache, tokens, run)
    for sequence, result in enumerate(results):
        assert_same(torch.cat(result), logits[sequence], f"logits of sequence {sequence}")
    for index, (ours, theirs) in enumerate(zip(ours_attended, attended, strict=True)):
        prefill, *decoded = ours
        for sequence, prompt in enumerate(prefill.split(PROMPT_LENS)):
            rows = torch.cat([prompt, *(step[sequence][None] for step in decoded)])
            assert_same(rows, theirs[sequence], f"attention of layer {index}, sequence {sequence}")


@torch.no_grad()
def test_parity_is_lost_without_yarns_second_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a softmax scale without mscale squared is caught from the second position on."""
    config = hf_config(q_lora_rank=None, yarn=True, interleave=True)
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    ours = DeepseekMLA(MLAConfig.from_hf(config))
    ours.load_state_dict(theirs.state_dict())
    monkeypatch.setattr(MLAConfig, "softmax_scale", property(lambda self: self.qk_head_dim**-0.5))
    cache = poisoned_cache(ours.config, 1)
    cache.allocate(0, 8)
    plan = PrefillPlan.make(
        ours.config, query_lens=[8], block_table=cache.block_table([0]), page_size=PAGE_SIZE, dtype=torch.float32
    )
    rows = torch.randn(8, config.hidden_size)
    out = ours.prefill(rows, plan.positions, cache.layers[0], plan)
    mask = torch.full((1, 1, 8, 8), -torch.inf).triu(1)
    expected = theirs(rows[None], DeepseekV3RotaryEmbedding(config)(rows[None], torch.arange(8)[None]), mask)[0][0]
    assert_same(out[:1], expected[:1], "position 0")
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(out, expected, "position 7")
