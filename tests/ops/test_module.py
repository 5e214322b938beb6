"""``DeepseekMLA``: prefill, chunked prefill and decode agree, and the state dict is Hugging Face's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mla_ops import DecodePlan, DeepseekMLA, MLAConfig, PagedLatentCache, PrefillPlan
from mla_ops.testing import assert_matches

CONFIG = MLAConfig(
    hidden_size=48, num_heads=3, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=24
)
CONFIGS = {
    "plain": CONFIG,
    "one-q-proj": dataclasses.replace(CONFIG, q_lora_rank=None),
    "halves": dataclasses.replace(CONFIG, rope_interleave=False),
    "nope": dataclasses.replace(CONFIG, qk_rope_head_dim=0),
    "bias": dataclasses.replace(CONFIG, attention_bias=True),
    "yarn": dataclasses.replace(
        CONFIG, rope_scaling={"factor": 8, "original_max_position_embeddings": 8, "mscale": 1, "mscale_all_dim": 1}
    ),
    "query-scale": dataclasses.replace(
        CONFIG, rope_scaling={"factor": 8, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    ),
}
LENGTHS = (9, 1, 14)
FACTOR = 256.0  # of float64's rounding, through two norms, five matmuls and rotations in float32


def make_layer(config: MLAConfig, dtype: torch.dtype = torch.float32) -> DeepseekMLA:
    layer = DeepseekMLA(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.3)
    return layer


class Sequences:
    """Three sequences of one layer, and the steps that grow them."""

    def __init__(self, layer: DeepseekMLA, dtype: torch.dtype = torch.float32) -> None:
        self.layer = layer
        self.config = layer.config
        self.cache = PagedLatentCache(self.config, num_layers=1, num_pages=20, page_size=4, dtype=dtype)
        self.rows = self.cache.layers[0]
        for name in range(len(LENGTHS)):
            self.cache.allocate(name, 0)

    def prefill(self, hidden: Sequence[Tensor], **options: Any) -> list[Tensor]:
        """The next rows of each sequence; their outputs."""
        names, new = range(len(hidden)), [len(x) for x in hidden]
        prefix = [self.cache.length(name) for name in names]
        for name, count in zip(names, new, strict=True):
            self.cache.extend(name, count)
        plan = PrefillPlan.make(
            self.config,
            query_lens=new,
            prefix_lens=prefix,
            block_table=self.cache.block_table(list(names)),
            page_size=4,
            dtype=hidden[0].dtype,
            **options,
        )
        return list(self.layer.prefill(torch.cat(list(hidden)), plan.positions, self.rows, plan).split(new))

    def decode(self, hidden: Sequence[Tensor], batch_size: int | None = None) -> list[Tensor]:
        """``query_len`` new rows of each of the first sequences; a larger batch is padded."""
        query_len, names = len(hidden[0]), list(range(len(hidden)))
        for name in names:
            self.cache.extend(name, query_len)
        plan = DecodePlan(
            self.config,
            max_batch_size=8,
            max_seq_len=32,
            query_len=query_len,
            page_size=4,
            device="cpu",
            dtype=hidden[0].dtype,
        )
        plan.update(self.cache.block_table(names), self.cache.seq_lens(names))
        metadata = plan.at(batch_size or len(hidden))
        rows = torch.cat(list(hidden))
        padding = rows.new_full((len(metadata.positions) - len(rows), rows.shape[1]), 7.0)
        out = self.layer(torch.cat([rows, padding]), metadata.positions, self.rows, metadata)
        return list(out.split(query_len))


def random_rows(config: MLAConfig, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n, config.hidden_size).to(dtype) for n in LENGTHS]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_matches(a, b.double(), factor=FACTOR)


def assert_same_rows(found: Tensor, expected: Tensor) -> None:
    """Of two caches: a product over another number of tokens may be rounded otherwise, so not bit by bit."""
    assert_matches(found, expected.double(), factor=FACTOR)
    assert torch.equal(found.any(-1), expected.any(-1))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_prefill_at_once_equals_prefill_in_pieces_equals_decode_token_by_token(name: str) -> None:
    layer, hidden = make_layer(CONFIGS[name]), random_rows(CONFIGS[name])
    at_once = Sequences(layer).prefill(hidden)

    pieces = Sequences(layer)
    cuts = (5, 0, 8)
    first = pieces.prefill([x[:cut] for x, cut in zip(hidden, cuts, strict=True)])
    rest = pieces.prefill([x[cut:] for x, cut in zip(hidden, cuts, strict=True)], chunk_tokens=8)
    assert_same([torch.cat(pair) for pair in zip(first, rest, strict=True)], at_once)

    for index, x in enumerate(hidden):
        tokens = Sequences(layer)
        one_by_one = [tokens.decode([x[i : i + 1]])[0] for i in range(len(x))]
        assert_same([torch.cat(one_by_one)], [at_once[index]])


@pytest.mark.parametrize("chunk_tokens", [1, 12, 1000])
def test_prefill_over_a_prefix_does_not_depend_on_the_chunks(chunk_tokens: int) -> None:
    layer, hidden = make_layer(CONFIG), random_rows(CONFIG)
    at_once = Sequences(layer).prefill(hidden)
    pieces = Sequences(layer)
    pieces.prefill([x[:-1] for x in hidden])
    last = pieces.prefill([x[-1:] for x in hidden], chunk_tokens=chunk_tokens)
    assert_same(last, [x[-1:] for x in at_once])


def test_decode_of_two_queries_equals_two_decodes_of_one() -> None:
    layer, hidden = make_layer(CONFIG), random_rows(CONFIG)
    one, two = Sequences(layer), Sequences(layer)
    for sequences in (one, two):
        sequences.prefill(hidden)
    new = [torch.randn(2, CONFIG.hidden_size) for _ in LENGTHS]
    first, second = one.decode([x[:1] for x in new]), one.decode([x[1:] for x in new])
    assert_same(two.decode(new), [torch.cat(pair) for pair in zip(first, second, strict=True)])
    assert_same_rows(two.rows, one.rows)


@pytest.mark.parametrize("free", [False, True])
def test_absorbing_changes_no_result(free: bool) -> None:
    layer, hidden = make_layer(CONFIG), random_rows(CONFIG)
    before = Sequences(layer)
    expected = before.prefill(hidden), before.decode([x[:1] for x in hidden])
    w_uk, w_uv = layer.absorb(free_kv_b_proj=free)
    assert (w_uk.shape, w_uv.shape) == ((3, 12, 32), (3, 10, 32))
    after = Sequences(layer)
    found = after.prefill(hidden), after.decode([x[:1] for x in hidden])
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert ("kv_b_proj.weight" in layer.state_dict()) is not free


def test_loading_into_a_layer_that_freed_its_weight_is_refused() -> None:
    layer = make_layer(CONFIG)
    weights = layer.state_dict()
    layer.absorb(free_kv_b_proj=True)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*kv_b_proj\.weight"):
        layer.load_state_dict(weights)


@pytest.mark.parametrize("name", ["plain", "nope"])
def test_padded_rows_are_zero_and_leave_the_others_and_the_cache_alone(name: str) -> None:
    layer, hidden = make_layer(CONFIGS[name]), random_rows(CONFIGS[name])
    alone, padded = Sequences(layer), Sequences(layer)
    for sequences in (alone, padded):
        sequences.prefill(hidden)
    new = [x[:1] for x in hidden]
    found = padded.decode(new, batch_size=8)
    assert_same(found[:3], alone.decode(new))
    assert not torch.cat(found[3:]).any()
    assert_same_rows(padded.rows, alone.rows)


def test_padded_rows_of_a_layer_with_bias_are_the_bias() -> None:
    layer = make_layer(CONFIGS["bias"])
    found = Sequences(layer).decode([torch.randn(1, 48)], batch_size=2)
    assert torch.equal(found[1][0], layer.o_proj.bias)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_an_fp8_cache_is_close(kv_dtype: torch.dtype) -> None:
    layer, hidden = make_layer(CONFIG), random_rows(CONFIG)
    exact = Sequences(layer)
    exact.prefill(hidden)
    quantised = Sequences(layer, kv_dtype)
    layer.kv_scale = torch.tensor([float(exact.rows.abs().max()) / torch.finfo(kv_dtype).max])
    new = [x[:1] for x in hidden]
    quantised.prefill(hidden)
    found = torch.cat(quantised.decode(new))
    layer.kv_scale = None
    expected = torch.cat(exact.decode(new))
    error = (found - expected).norm() / expected.norm()
    assert 1e-6 < error < 0.1  # three bits of mantissa: 2^-4 relative per row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_layer_is_close_to_the_float32_one(dtype: torch.dtype) -> None:
    layer, hidden = make_layer(CONFIG, dtype), random_rows(CONFIG, dtype)
    exact = make_layer(CONFIG)
    exact.load_state_dict(layer.state_dict())
    found = torch.cat(Sequences(layer, dtype).prefill(hidden))
    expected = torch.cat(Sequences(exact).prefill([x.float() for x in hidden]))
    assert (found - expected).norm() / expected.norm() < 30 * torch.finfo(dtype).eps


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_state_dict_has_the_names_and_shapes_of_hugging_face(q_lora_rank: int | None, bias: bool) -> None:
    config = dataclasses.replace(CONFIG, q_lora_rank=q_lora_rank, attention_bias=bias)
    hf_config = DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        q_lora_rank=q_lora_rank,
        attention_bias=bias,
    )
    theirs = {name: x.shape for name, x in DeepseekV3Attention(hf_config, 0).state_dict().items()}
    assert {name: x.shape for name, x in DeepseekMLA(config).state_dict().items()} == theirs


def test_a_layer_made_on_meta_is_filled_by_load_state_dict() -> None:
    layer, hidden = make_layer(CONFIG), random_rows(CONFIG)
    empty = DeepseekMLA(CONFIG, device="meta").to_empty(device="cpu").requires_grad_(False)
    empty.load_state_dict(layer.state_dict())
    assert_same(Sequences(empty).prefill(hidden), Sequences(layer).prefill(hidden))


def test_up_projections_are_views_of_kv_b_proj() -> None:
    layer = make_layer(CONFIG)
    assert layer.kv_b_proj is not None
    weight = layer.kv_b_proj.weight.view(3, 22, 32)
    assert torch.equal(layer.W_UK, weight[:, :12])
    assert torch.equal(layer.W_UV, weight[:, 12:])
    assert layer.W_UK.untyped_storage().data_ptr() == layer.kv_b_proj.weight.untyped_storage().data_ptr()


def test_the_down_projections_lie_together_and_stay_there_when_weights_are_loaded() -> None:
    layer, other = make_layer(CONFIG), make_layer(CONFIG)
    layer.load_state_dict(other.state_dict())
    first, second = layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert torch.equal(first, other.q_a_proj.weight)
    assert torch.equal(second, other.kv_a_proj_with_mqa.weight)


def test_a_layer_made_on_meta_works_once_weights_are_assigned() -> None:
    whole = make_layer(CONFIG)
    with torch.device("meta"):
        layer = DeepseekMLA(CONFIG).requires_grad_(False)
    layer.load_state_dict(whole.state_dict(), assign=True)
    hidden = [torch.randn(length, CONFIG.hidden_size) for length in LENGTHS]
    for found, expected in zip(Sequences(layer).prefill(hidden), Sequences(whole).prefill(hidden), strict=True):
        assert torch.equal(found, expected)


def test_moving_to_another_dtype_keeps_the_scale_of_the_cache() -> None:
    layer = make_layer(CONFIG)
    layer.kv_scale = torch.tensor([0.037])
    layer.to(torch.bfloat16)
    assert layer.o_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.kv_scale, torch.tensor([0.037]))
    assert layer.to("meta").kv_scale.is_meta


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_layers_own_device_goes_before_the_default_one(device: str | None) -> None:
    with torch.device("meta"):
        layer = DeepseekMLA(CONFIGS["yarn"], device=device)
    assert {x.device.type for x in (*layer.parameters(), layer.rotary_emb.inv_freq)} == {device or "meta"}


class AnotherLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def of_another_class(layer: DeepseekMLA) -> None:
    layer.kv_b_proj = AnotherLinear(*layer.kv_b_proj.weight.T.shape, bias=False)


def with_a_bias(layer: DeepseekMLA) -> None:
    layer.kv_b_proj = nn.Linear(*layer.kv_b_proj.weight.T.shape)


def with_a_hook(layer: DeepseekMLA) -> None:
    layer.kv_b_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_its_own_forward(layer: DeepseekMLA) -> None:
    layer.kv_b_proj.forward = lambda x: 2 * x


@pytest.mark.parametrize("change", [of_another_class, with_a_bias, with_a_hook, with_its_own_forward])
def test_a_kv_b_proj_that_is_not_its_weight_alone_is_refused(change: Callable[[DeepseekMLA], None]) -> None:
    layer = make_layer(CONFIG)
    change(layer)
    with pytest.raises(ValueError, match=r"kv_b_proj must be an nn\.Linear with no bias, hook or forward of its own"):
        layer.absorb()


def test_a_parametrized_kv_b_proj_is_read_as_its_parametrization_says() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    layer = make_layer(CONFIG)
    before = layer.W_UK.clone()
    nn.utils.parametrize.register_parametrization(layer.kv_b_proj, "weight", Double())
    assert torch.equal(layer.W_UK, 2 * before)
