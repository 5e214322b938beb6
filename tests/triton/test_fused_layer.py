"""A layer by the kernels around attention against the same layer by torch's own functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mla_ops import DecodePlan, DeepseekMLA, MLAConfig, PrefillPlan, signatures
from mla_ops.testing import assert_matches

CONFIG = MLAConfig(
    hidden_size=64,
    num_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=16,
    q_lora_rank=64,
)
CONFIGS = {
    "plain": CONFIG,
    "one-q-proj": dataclasses.replace(CONFIG, q_lora_rank=None),
    "halves": dataclasses.replace(CONFIG, rope_interleave=False),
    "nope": dataclasses.replace(CONFIG, qk_rope_head_dim=0),
    "bias": dataclasses.replace(CONFIG, attention_bias=True),
    "query-scale": dataclasses.replace(
        CONFIG, rope_scaling={"factor": 8, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    ),
}
PAGE_SIZE, PROMPTS, DECODED = 4, [5, 1, 9], 2


def make_layer(config: MLAConfig, device: torch.device) -> DeepseekMLA:
    layer = DeepseekMLA(config, device=device).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0.0, 0.3)
    return layer


def serve(
    layer: DeepseekMLA, hidden: Tensor, backend: str, kv_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Prefill three prompts, the last in two pieces, decode two tokens more of each; outputs and the cache."""
    config, device = layer.config, hidden.device
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).to(device, torch.int32)
    cache = torch.full((12, PAGE_SIZE, config.latent_dim), torch.nan, device=device).to(kv_dtype or hidden.dtype)
    outputs = []
    for new, prefix in (([5, 1, 4], [0, 0, 0]), ([0, 0, 5], [5, 1, 4])):
        prefill = PrefillPlan.make(
            config, query_lens=new, prefix_lens=prefix, block_table=table, page_size=PAGE_SIZE, dtype=hidden.dtype,
            backend=backend, chunk_tokens=8,
        )  # fmt: skip
        rows, hidden = hidden[: sum(new)], hidden[sum(new) :]
        outputs.append(layer.prefill(rows, prefill.positions, cache, prefill))
    plan = DecodePlan(
        config, max_batch_size=4, max_seq_len=16, query_len=DECODED, page_size=PAGE_SIZE, device=device,
        dtype=hidden.dtype, kv_dtype=kv_dtype, backend=backend,
    )  # fmt: skip
    plan.update(table, torch.tensor(PROMPTS, dtype=torch.int32, device=device) + DECODED)
    padded = torch.cat([hidden, torch.full_like(hidden[:DECODED], 7.0)])
    outputs.append(layer(padded, plan.at(4).positions, cache, plan.at(4)))
    return torch.cat(outputs), cache


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, but for those that are bound to a signature by now."""
    from mla_ops.backends.triton.launch import Launch

    signatures.READY.clear()
    names: list[str] = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (names.append(self.name), run(self))[1])
    return names


def random_rows(config: MLAConfig, device: torch.device) -> Tensor:
    return torch.randn(sum(PROMPTS) + 3 * DECODED, config.hidden_size, device=device)


@pytest.mark.parametrize("free", [False, True], ids=["kv_b_proj", "freed"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_layer_gives_what_torchs_functions_give(
    name: str, free: bool, device: torch.device, launched: list[str]
) -> None:
    layer = make_layer(CONFIGS[name], device)
    layer.absorb(free_kv_b_proj=free)
    hidden = random_rows(layer.config, device)
    found, cache = serve(layer, hidden, "triton")
    assert {"norm_rope_write_kernel", "absorb_kernel", "expand_kernel"} <= set(launched)
    assert "write_kernel" not in launched
    expected, expected_cache = serve(layer, hidden, "reference")
    assert_matches(found, expected.double(), factor=256.0)
    written = ~expected_cache.isnan()
    assert torch.equal(~cache.isnan(), written)
    assert_matches(cache[written], expected_cache[written].double(), factor=64.0)


@pytest.mark.gpu  # the interpreter rounds to fp8 in a way of its own
def test_a_layer_over_an_fp8_cache(device: torch.device) -> None:
    layer = make_layer(CONFIG, device)
    layer.kv_scale = torch.full((1,), 0.02, device=device)
    hidden = random_rows(CONFIG, device)
    found, _ = serve(layer, hidden, "triton", torch.float8_e4m3fn)
    expected, _ = serve(layer, hidden, "reference", torch.float8_e4m3fn)
    assert (found - expected).norm() / expected.norm() < 1e-2  # a value at a rounding border goes either way


def test_a_gradient_takes_torchs_functions(device: torch.device, launched: list[str]) -> None:
    layer = make_layer(CONFIG, device)
    hidden = torch.randn(2, CONFIG.hidden_size, device=device)
    assert layer.fuses(hidden, "triton")
    assert not layer.fuses(hidden.requires_grad_(), "triton")
    with torch.no_grad():
        assert layer.fuses(hidden, "triton")
    layer.o_proj.weight.requires_grad_()
    assert not layer.fuses(hidden.detach(), "triton")
    assert not layer.fuses(hidden.detach().double(), "triton")
    assert not layer.fuses(hidden.detach(), "reference")
    layer.requires_grad_(False)
    assert layer.fuses(hidden.detach(), "flash_mla") == hidden.is_cuda


def test_a_residual_is_added_to_the_result(device: torch.device) -> None:
    layer, rows = make_layer(CONFIG, device), torch.randn(2, CONFIG.hidden_size, device=device)
    plan = DecodePlan(
        CONFIG, max_batch_size=2, max_seq_len=8, page_size=PAGE_SIZE, device=device, dtype=rows.dtype, backend="triton"
    )  # fmt: skip
    plan.update(torch.tensor([[0], [1]], dtype=torch.int32, device=device), torch.ones_like(plan.at(2).seq_lens))
    cache = torch.zeros(2, PAGE_SIZE, CONFIG.latent_dim, device=device)
    alone, added = (layer(rows, plan.at(2).positions, cache, plan.at(2), x) for x in (None, rows))
    assert_matches(added, alone.double() + rows, factor=16.0)


def test_a_layer_with_a_hook_runs_its_own_forward(device: torch.device, launched: list[str]) -> None:
    layer = make_layer(CONFIG, device)
    hidden, seen = random_rows(CONFIG, device), []
    expected, _ = serve(layer, hidden, "triton")
    products = launched.count("linear_kernel")
    layer.q_b_proj.register_forward_hook(lambda module, args, output: seen.append(output) or output * 1.0)
    launched.clear()
    signatures.READY.clear()
    found, _ = serve(layer, hidden, "triton")
    assert len(seen) == 3
    assert launched.count("linear_kernel") < products
    assert_matches(found, expected.double(), factor=16.0)


@pytest.mark.parametrize("name", ["q_b_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_layernorm"])
def test_a_forward_set_on_a_part_of_a_layer_is_run(device: torch.device, name: str) -> None:
    """As accelerate sets them, to bring weights in."""
    layer = make_layer(CONFIG, device)
    hidden, part = random_rows(CONFIG, device), layer.get_submodule(name)
    forward = part.forward
    part.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    found, expected = (serve(layer, hidden, backend)[0] for backend in ("triton", "reference"))
    assert_matches(found, expected.double(), factor=256.0)


@pytest.mark.parametrize("change", ["hook", "class"])
def test_a_norm_of_another_kind_runs_its_own_forward(device: torch.device, change: str) -> None:
    layer = make_layer(CONFIG, device)
    hidden = random_rows(CONFIG, device)
    if change == "hook":
        layer.kv_a_layernorm.register_forward_hook(lambda module, args, output: 2 * output)
    else:
        norm = torch.nn.LayerNorm(CONFIG.kv_lora_rank, device=device).requires_grad_(False)
        layer.kv_a_layernorm = norm  # type: ignore[assignment]
    found, expected = (serve(layer, hidden, backend)[0] for backend in ("triton", "reference"))
    assert_matches(found, expected.double(), factor=256.0)
