"""Proof b: what AITER's real Python launches when our ops call it; and that a swap of any two arguments would show.

Nothing runs here: launches are recorded, under the names that C++ gives their arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import DecodeMetadata, DecodePlan, MLAConfig
from mla_ops.backends.aiter import calls
from mla_ops.testing import make_prefill_inputs

from .fake_rocm import Launch, Launches

CONFIG = MLAConfig(
    hidden_size=64, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
LENGTHS = [5, 0, 9]
FP8 = torch.float8_e4m3fnuz


class Stage2:
    """Stands in for AITER's Triton kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


@pytest.fixture
def stage2(fake_gpu: Launches, imported_aiter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Stage2:
    stand_in = Stage2()
    monkeypatch.setattr(imported_aiter.mla, "_fwd_kernel_stage2_asm", stand_in)
    return stand_in


@pytest.fixture
def persistent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_AITER_PERSISTENT", "1")


class Step:
    """One planned decode step, kept so that a launch can be held against it."""

    def __init__(self, query_len: int = 1, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan = DecodePlan(
            CONFIG,
            max_batch_size=4,
            max_seq_len=16,
            query_len=query_len,
            page_size=4,
            device="cpu",
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            backend="aiter",
        )
        self.table = torch.randperm(40)[: 3 * 4].view(3, 4).int()
        self.plan.update(self.table, torch.tensor(LENGTHS, dtype=torch.int32))
        self.q = torch.randn(3 * query_len, 16, 576).bfloat16()
        self.pool = torch.randn(40, 4, 576).to(kv_dtype)
        self.kv_scale = torch.full((1,), 0.5) if kv_dtype == FP8 else None
        self.metadata: DecodeMetadata = self.plan.at(3)

    def run(self) -> tuple[Tensor, Tensor]:
        m = self.metadata
        return mla_ops.mla_decode(
            *(self.q, self.pool, m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_last_page_lens),
            softmax_scale=CONFIG.softmax_scale,
            max_seqlen_q=m.max_seqlen_q,
            num_kv_splits=m.num_kv_splits,
            backend_state=m.backend_state,
            kv_scale=self.kv_scale,
            backend="aiter",
        )

    def check(self, launch: Launch, out: Tensor) -> None:
        """Hold a stage-1 launch to this step."""
        a, m = launch.arguments, self.metadata
        assert a["Q"].data_ptr() == self.q.data_ptr()
        assert a["KV"].data_ptr() == self.pool.data_ptr()
        assert a["KV"].shape == (160, 1, 1, 576)
        assert a["qo_indptr"].data_ptr() == m.qo_indptr.data_ptr()
        slots = [int(self.table[b, i // 4]) * 4 + i % 4 for b, n in enumerate(LENGTHS) for i in range(n)]
        assert a["kv_indptr"].tolist() == [0, 5, 6, 15]
        assert a["kv_page_indices"][:15].tolist() == [*slots[:5], 0, *slots[5:]]
        assert a["kv_last_page_lens"].tolist() == [1, 1, 1]
        assert a["kv_last_page_lens"].data_ptr() == m.backend_state[2].data_ptr()
        assert a["max_seqlen_q"] == m.max_seqlen_q
        assert a["softmax_scale"] == CONFIG.softmax_scale
        assert a["output"].data_ptr() == out.data_ptr()
        assert a["splitLse"].shape == (*a["splitData"].shape[:3], 1)


def no_values() -> dict[str, Callable[..., None]]:
    def stage1(**arguments: Any) -> None:
        arguments["output"].fill_(1.0)

    return {"mla_decode_stage1_asm_fwd": stage1}


def test_splits_that_an_fp8_kernel_leaves_unwritten_count_for_nothing(fake_gpu: Launches, stage2: Stage2) -> None:
    """Its blocks are longer than stage 2 believes, which would read what torch.empty left."""
    step = Step()
    step.q, step.pool = step.q.to(FP8), step.pool.to(FP8)
    seen = {}

    def stage1(**arguments: Any) -> None:
        seen.update({name: arguments[name].clone() for name in ("splitData", "splitLse")})

    with fake_gpu.recorded(mla_decode_stage1_asm_fwd=stage1):
        m = step.metadata
        mla_ops.mla_decode(
            *(step.q, step.pool, m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_last_page_lens),
            softmax_scale=CONFIG.softmax_scale,
            q_scale=torch.ones(1),
            kv_scale=torch.ones(1),
            backend="aiter",
        )
    assert not seen["splitData"].any()
    assert seen["splitLse"].isneginf().all()


@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_a_planned_decode_launches_both_stages_over_our_buffers(
    query_len: int, fake_gpu: Launches, stage2: Stage2
) -> None:
    step = Step(query_len)
    with fake_gpu.recorded(**no_values()) as launched:
        out, _ = step.run()
    (launch,) = launched
    step.check(launch, out)
    splits = step.metadata.num_kv_splits
    assert launch.arguments["splitData"].shape == (3 * query_len, splits, 16, 512)
    assert launch.arguments["num_kv_splits_indptr"].data_ptr() == step.metadata.backend_state[4].data_ptr()
    assert launch.arguments["num_kv_splits_indptr"].tolist() == [0, splits, 2 * splits, 3 * splits]
    ((grid, args, constants),) = stage2.calls
    assert grid == (3, 16)
    assert args[2].data_ptr() == out.data_ptr()
    assert constants["mgc"] == (64 if query_len == 1 else 16)


def test_no_tensor_of_an_lru_cache_is_read(fake_gpu: Launches, stage2: Stage2, imported_aiter: ModuleType) -> None:
    step = Step()
    before = imported_aiter.mla.get_meta_param.cache_info()
    with fake_gpu.recorded(**no_values()):
        step.run()
    assert imported_aiter.mla.get_meta_param.cache_info() == before


def test_the_package_is_as_it_was_after_a_call(fake_gpu: Launches, stage2: Stage2, imported_aiter: ModuleType) -> None:
    before = dict(vars(imported_aiter.mla))
    with fake_gpu.recorded(**no_values()):
        Step().run()
    assert vars(imported_aiter.mla) == before


def test_neither_update_nor_decode_reads_the_device(fake_gpu: Launches, stage2: Stage2) -> None:
    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default, "reads a value"
            assert func is not torch.ops.aten.nonzero.default, "has a result of unknown size"
            return func(*args, **(kwargs or {}))

    step, lens = Step(), torch.tensor(LENGTHS, dtype=torch.int32)
    with fake_gpu.recorded(**no_values()), NoReads():
        step.plan.update(step.table, lens)
        step.run()


def test_rows_without_keys_are_defined_whatever_the_kernel_leaves(fake_gpu: Launches, stage2: Stage2) -> None:
    step = Step(query_len=2)

    def poison(**arguments: Any) -> None:
        arguments["output"].fill_(torch.nan)

    with fake_gpu.recorded(mla_decode_stage1_asm_fwd=poison):
        out, lse = step.run()
    assert torch.equal(out[2:4], torch.zeros_like(out[2:4]))
    assert lse[2:4].isneginf().all()


def test_the_buffers_of_a_plan_stay_where_they_are(fake_gpu: Launches) -> None:
    step = Step()
    before = [x.data_ptr() for x in step.plan.at(3).backend_state]
    step.plan.update(step.table[:1], torch.tensor([3], dtype=torch.int32))
    assert [x.data_ptr() for x in step.plan.at(3).backend_state] == before


# --- persistent mode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_persistent_decode_plans_its_work_in_update_and_reduces_it(
    kv_dtype: torch.dtype, fake_gpu: Launches, persistent: None
) -> None:
    with fake_gpu.recorded(**no_values()) as launched:
        step = Step(kv_dtype=kv_dtype)
        step.plan.update(step.table, torch.tensor(LENGTHS, dtype=torch.int32))
        planned = [launch for launch in launched if launch.function == "get_mla_metadata_v1"]
        launched.clear()
        out, lse = step.run()
    assert len(planned) == 2  # by at(), and by the update after it
    check_metadata(planned[-1], step)
    stage1, reduce = launched
    step.check(stage1, out)
    pointers, info_set, indptr, *reduce_buffers = step.metadata.backend_state[5:]
    assert stage1.arguments["num_kv_splits_indptr"] is None
    for name, buffer in (("work_metadata", pointers), ("work_indptr", indptr), ("work_info_set", info_set)):
        assert stage1.arguments[name].data_ptr() == buffer.data_ptr()
    for name, buffer in zip(("reduce_indptr", "reduce_final_map", "reduce_partial_map"), reduce_buffers, strict=True):
        assert reduce.arguments[name].data_ptr() == buffer.data_ptr()
    assert reduce.arguments["final_output"].data_ptr() == out.data_ptr()
    if kv_dtype == FP8:
        assert step.kv_scale is not None
        assert stage1.arguments["kv_scale"].data_ptr() == step.kv_scale.data_ptr()
    assert lse[:1].isnan().all()  # this version has no kernel that writes it
    assert lse[1].isneginf().all()


def check_metadata(launch: Launch, step: Step) -> None:
    a, state = launch.arguments, step.metadata.backend_state
    names = ("work_metadata_ptrs", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map")
    shapes = [tuple(a[name].shape) for name in (*names, "reduce_partial_map")]
    # 304 compute units, 3 requests of one tile
    assert shapes == [(2,), (306, 8), (305,), (4,), (3, 2), (306,)]
    for name, buffer in zip((*names, "reduce_partial_map"), state[5:], strict=True):
        assert a[name].data_ptr() == buffer.data_ptr(), name
    assert a["seqlens_qo_indptr"].data_ptr() == step.metadata.qo_indptr.data_ptr()
    assert a["seqlens_kv_indptr"].data_ptr() == state[0].data_ptr()
    assert (a["num_heads_per_head_k"], a["num_heads_k"]) == (16, 1)
    assert a["is_causal"] is True
    assert (a["max_seqlen_qo"], a["uni_seqlen_qo"], a["kv_granularity"]) == (1, 1, 16)


def test_work_planned_for_another_dtype_is_refused(fake_gpu: Launches, persistent: None) -> None:
    step = Step(kv_dtype=FP8)
    state = list(step.metadata.backend_state)
    state[6] = state[6][:-1]
    step.metadata = step.metadata._replace(backend_state=tuple(state))
    with pytest.raises(ValueError, match="was not planned for 3 requests"):
        step.run()


# --- prefill and cache write ------------------------------------------------------------------------------------


def run_prefill(fake_gpu: Launches) -> tuple[list[Launch], Any, Any]:
    inputs = make_prefill_inputs([3, 5], [7, 5], num_heads=2, qk_head_dim=192, v_head_dim=128, dtype=torch.bfloat16)

    def varlen(**a: Any) -> list[Tensor]:
        out = torch.randn(a["q"].shape[0], 2, 128).bfloat16()
        lse = torch.arange(2.0 * out.shape[0]).view(2, -1)
        return [out, lse, torch.empty(0), torch.empty(0)]

    with fake_gpu.recorded(mha_varlen_fwd=varlen) as launched:
        result = mla_ops.mla_prefill(**inputs._asdict(), backend="aiter")
    return launched, inputs, result


def check_prefill(launch: Launch, inputs: Any) -> None:
    a = launch.arguments
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        assert a[name].data_ptr() == getattr(inputs, name).data_ptr(), name
    assert (a["max_seqlen_q"], a["max_seqlen_k"]) == (inputs.max_seqlen_q, inputs.max_seqlen_k)
    assert a["softmax_scale"] == inputs.softmax_scale
    assert a["is_causal"] is True
    assert a["return_softmax_lse"] is True


def test_prefill_launches_flash_attention_and_turns_its_lse(fake_gpu: Launches) -> None:
    launched, inputs, (out, lse) = run_prefill(fake_gpu)
    check_prefill(launched[-1], inputs)
    assert out.shape == (inputs.q.shape[0], 2, 128)
    assert torch.equal(lse[:8], torch.arange(2.0 * lse.shape[0]).view(2, -1).T[:8])


def run_write(fake_gpu: Launches, scale: Tensor | None = None) -> tuple[list[Launch], tuple[Tensor, ...]]:
    tensors = (torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16(), torch.zeros(4, 2, 576).bfloat16())
    slots = torch.tensor([5, -1, 8])
    with fake_gpu.recorded() as launched:
        mla_ops.write_latent_cache(*tensors, slots, kv_scale=scale, backend="aiter")
    return launched, tensors


def check_write(launch: Launch, tensors: tuple[Tensor, ...]) -> None:
    a = launch.arguments
    for name, tensor in zip(("kv_c", "k_pe", "kv_cache"), tensors, strict=True):
        assert a[name].data_ptr() == tensor.data_ptr(), name
    assert a["slot_mapping"].tolist() == [5, -1, -1]  # slot 8 is one past the end, and AITER would write there
    assert a["slot_mapping"].dtype == torch.int64
    assert a["kv_cache_dtype"] == "auto"
    assert a["scale"].tolist() == [1.0]


def test_the_cache_write_reaches_the_kernel_and_only_slots_that_exist(fake_gpu: Launches) -> None:
    launched, tensors = run_write(fake_gpu)
    check_write(launched[-1], tensors)


# --- mutations --------------------------------------------------------------------------------------------------


def swaps(call: str, arguments: int) -> Iterator[Any]:
    for i, j in itertools.combinations(range(arguments), 2):
        if (call, i, j) == ("metadata_call", 3, 4):
            continue  # one head and causal, 1 and True: the dispatcher makes each of them the other
        yield pytest.param(call, i, j, id=f"{call}-{i}-{j}")


@pytest.mark.parametrize(
    ("call", "i", "j"),
    [*swaps("decode_call", 8), *swaps("metadata_call", 11), *swaps("prefill_call", 7), *swaps("write_call", 6)],
)
def test_a_swap_of_two_arguments_fails_a_proof(
    call: str, i: int, j: int, fake_gpu: Launches, stage2: Stage2, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., calls.BoundCall] = getattr(calls, call)

    def swapped(*args: Any, **kwargs: Any) -> calls.BoundCall:
        bound = real(*args, **kwargs)
        values = list(bound.args)
        values[i], values[j] = values[j], values[i]
        return calls.BoundCall(tuple(values), bound.kwargs)

    monkeypatch.setattr(calls, call, swapped)
    with pytest.raises((AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)):
        run_proof(call, fake_gpu, monkeypatch)


@pytest.mark.parametrize("call", ["decode_call", "metadata_call", "prefill_call", "write_call"])
def test_without_a_swap_the_same_proofs_hold(
    call: str, fake_gpu: Launches, stage2: Stage2, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_proof(call, fake_gpu, monkeypatch)


@pytest.mark.parametrize("call", ["decode_call", "prefill_call"])
def test_another_scale_fails_a_proof(
    call: str, fake_gpu: Launches, stage2: Stage2, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., calls.BoundCall] = getattr(calls, call)
    name = "sm_scale" if call == "decode_call" else "softmax_scale"
    monkeypatch.setattr(calls, call, lambda *args, **kwargs: real(*args, **(kwargs | {name: 576**-0.5})))
    with pytest.raises(AssertionError):
        run_proof(call, fake_gpu, monkeypatch)


def run_proof(call: str, fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    if call == "prefill_call":
        launched, inputs, _ = run_prefill(fake_gpu)
        check_prefill(launched[-1], inputs)
    elif call == "write_call":
        launched, tensors = run_write(fake_gpu)
        check_write(launched[-1], tensors)
    else:
        monkeypatch.setenv("MLA_AITER_PERSISTENT", "0" if call == "decode_call" else "1")
        with fake_gpu.recorded(**no_values()) as launched:
            step = Step()
            if call == "metadata_call":
                check_metadata(launched[-1], step)
            out, _ = step.run()
        stage1 = next(launch for launch in launched if launch.function == "mla_decode_stage1_asm_fwd")
        step.check(stage1, out)
