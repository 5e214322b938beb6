"""What AITER is asked for, and what is refused before AITER could end the process."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import BackendUnavailableError, DecodePlan, MLAConfig
from mla_ops.backends.aiter import runtime
from mla_ops.backends.aiter.backend import _check_cache
from mla_ops.backends.aiter.capabilities import (
    _TABLE_BEFORE_CSV,
    DecodeShape,
    KernelTable,
    Refusal,
    find_decode_row,
    read_table,
)
from mla_ops.backends.aiter.contract import AiterNotFoundError, Installation, locate
from mla_ops.backends.aiter.state import choose_splits
from mla_ops.backends.select import select
from mla_ops.testing import DecodeInputs, make_decode_inputs

from .fake_rocm import Launches

TABLES = Path(__file__).parent / "tables"
PRESET = MLAConfig.preset("deepseek-v3")
# heads:query lengths that a kernel serves without padding; "old" is before the table of kernels, "new" is 0.1.20.
SERVED = {
    ("gfx942", "old", "bf16", "bf16", False): "16:1,2,3,4 128:1",
    ("gfx942", "old", "bf16", "bf16", True): "16:1,2,3,4 32:1 48:1 64:1 80:1 128:1",
    ("gfx942", "old", "bf16", "fp8", False): "",
    ("gfx942", "old", "bf16", "fp8", True): "16:1,2,3,4 32:1 48:1 64:1 80:1",
    ("gfx942", "old", "fp8", "fp8", False): "16:1,2,3,4 128:1,2,3,4,5,6,7,8",
    ("gfx942", "old", "fp8", "fp8", True): "16:1,2,3,4 32:1 48:1 80:1",
    ("gfx942", "new", "bf16", "bf16", False): "8:1 16:1,2,3,4 32:1,2,3,4 128:1",
    ("gfx942", "new", "bf16", "bf16", True): "8:2 16:1,2,3,4 32:1 48:1 64:1 80:1 128:1",
    ("gfx942", "new", "bf16", "fp8", True): "16:1,2,3,4 32:1 48:1 64:1 80:1 128:1",
    ("gfx942", "new", "fp8", "fp8", False): "8:1 16:1,2,3,4 128:1,2,3,4,5,6,7,8",
    ("gfx942", "new", "fp8", "fp8", True): "16:1,2,3,4 32:1 48:1 80:1",
    ("gfx950", "new", "bf16", "bf16", False): "8:1,2 16:1,2,3,4,5,6,7,8 32:1,2,3,4,5,6,7,8 64:1 128:1",
    ("gfx950", "new", "bf16", "fp8", True): "16:1,2,3,4 32:1 48:1 64:1 80:1 128:1",
    ("gfx950", "new", "fp8", "fp8", False): "8:1 16:1,2,3,4 128:1,2,3,4,5,6,7,8",
    ("gfx950", "new", "fp8", "fp8", True): (
        "8:4 16:1,2,3,4,5,6,7,8 32:1,2,3,4,5,6,7,8 48:1 64:1,2,3,4,5,6,7,8 80:1 128:1,2,3,4,5,6,7,8"
    ),
}


def table(arch: str, age: str) -> KernelTable | None:
    return None if age == "old" else read_table(TABLES / f"{arch}.csv")


@pytest.mark.parametrize("case", SERVED, ids=lambda case: "-".join(map(str, case)))
def test_the_kernels_are_those_that_the_dispatcher_reaches(case: tuple[str, str, str, str, bool]) -> None:
    arch, age, q_type, kv_type, persistent = case
    served = []
    for heads in (8, 16, 24, 32, 48, 64, 80, 128):
        rows = {
            q: find_decode_row(table(arch, age), DecodeShape(arch, q_type, kv_type, heads, q, persistent))
            for q in range(1, 9)
        }
        lens = [str(q) for q, row in rows.items() if not isinstance(row, Refusal) and row.num_heads == heads]
        served += [f"{heads}:{','.join(lens)}"] if lens else []
    assert " ".join(served) == SERVED[case]


@pytest.mark.parametrize(("heads", "padded"), [(5, 16), (12, 16), (20, None), (64, 128), (100, 128)])
def test_heads_are_padded_where_that_at_most_doubles_them(heads: int, padded: int | None) -> None:
    row = find_decode_row(None, DecodeShape("gfx942", "bf16", "bf16", heads, 1, False))
    assert (None if isinstance(row, Refusal) else row.num_heads) == padded


def test_every_kernel_of_the_hard_table_is_in_the_wheel(installation: Installation) -> None:
    source = (installation.meta / "csrc/py_itfs_cu/asm_mla.cu").read_text()
    decode = source[: source.index("void mla_prefill_asm_fwd")]
    assert set(_TABLE_BEFORE_CSV.values()) == set(re.findall(r"/mla/(\w+\.co)", decode))


@pytest.mark.parametrize(("batch_size", "splits"), [(1, 16), (19, 16), (304, 2), (608, 2)])
def test_splits_fill_the_machine_once_and_no_more(batch_size: int, splits: int) -> None:
    assert choose_splits(batch_size, 131072, 304) == splits


# --- where AITER is ---------------------------------------------------------------------------------------------


def test_the_unrelated_package_of_async_iterators_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    with pytest.raises(AiterNotFoundError, match=r"async iterators.*pip uninstall aiter"):
        locate(tmp_path / "aiter")


def test_a_machine_without_aiter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AiterNotFoundError, match="not installed; install amd-aiter"):
        locate()


# --- refusals of the ops ----------------------------------------------------------------------------------------


def decode(**changes: Any) -> Callable[[], object]:
    shape = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.bfloat16, "query_lens": 1}
    inputs: DecodeInputs = make_decode_inputs([3, 5], **(shape | changes))
    inputs = inputs._replace(q=inputs.q[: 2 * inputs.max_seqlen_q].contiguous())
    return lambda: mla_ops.mla_decode(**inputs.arguments(), backend="aiter")


REFUSED = {
    "latent rows of another width": (decode(kv_lora_rank=256), "512 \\+ 64 built in, not 256 \\+ 64"),
    "a dtype without a kernel": (decode(dtype=torch.float16), "no kernel for torch.float16; use bfloat16"),
    "the other fp8": (decode(kv_dtype=torch.float8_e4m3fn), "not the fp8 of gfx942, which is torch.float8_e4m3fnuz"),
    "bf16 over fp8, not persistent": (decode(kv_dtype=torch.float8_e4m3fnuz), "MLA_AITER_PERSISTENT=1"),
    "heads without a kernel": (decode(num_heads=32), "no AITER kernel on gfx942 for 32 heads.*16 or 128 heads"),
    "five query tokens": (decode(query_lens=5), "more than 4 query tokens is wrong"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_aiter_would_abort_on_is_refused_with_a_remedy(case: str, fake_gpu: Launches) -> None:
    call, message = REFUSED[case]
    with fake_gpu.recorded() as launched, pytest.raises(BackendUnavailableError, match=message):
        call()
    assert launched == []


def test_ragged_queries_are_refused(fake_gpu: Launches) -> None:
    inputs = make_decode_inputs(
        [3, 5], num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16, query_lens=[2, 1]
    )
    with pytest.raises(ValueError, match=r'max_seqlen_q=2 rows for each of the 2 requests.*backend="triton"'):
        mla_ops.mla_decode(**inputs.arguments(), backend="aiter")


def test_a_cache_of_4_gib_is_refused(fake_gpu: Launches) -> None:
    rows = 2**32 // 1152 + 1
    pool = torch.empty_strided((rows, 1, 576), (576, 576, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(BackendUnavailableError, match=r"4096 MiB.*4 GiB"):
        _check_cache(pool)


@pytest.mark.parametrize(("variable", "value"), [("GPU_ARCHS", "gfx950"), ("CU_NUM", "80")])
def test_build_variables_of_another_machine_are_refused(
    variable: str, value: str, fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BackendUnavailableError, match=f"{variable}={value} is set.*unset {variable}"):
        decode()()


def test_a_cpu_without_the_fake_is_no_amd_gpu() -> None:
    with pytest.raises(BackendUnavailableError, match="cpu is not an AMD GPU"):
        decode()()


def test_a_failed_import_is_refused_and_leaves_no_half_of_the_package(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str) -> object:
        raise SystemExit("[aiter] build failed")

    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # others may have imported it for good
    monkeypatch.setattr(importlib, "import_module", build)
    with pytest.raises(BackendUnavailableError, match=r"failed with SystemExit.*mla-warmup doctor"):
        _ = runtime.Runtime(installation).module


# --- select -----------------------------------------------------------------------------------------------------


@pytest.fixture
def rocm(fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")


def test_auto_on_rocm_is_aiter_with_its_kernel(rocm: None) -> None:
    choice = select(PRESET.shard(8), "cuda", torch.bfloat16)
    assert choice.name == "aiter"
    assert "0.1.7.post2.dev18 on gfx942, mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co" in choice.reason


def test_auto_says_which_heads_are_padded(rocm: None) -> None:
    assert "8 heads padded to 16" in select(PRESET.shard(16), "cuda", torch.bfloat16).reason


def test_auto_falls_on_with_aiters_reason(rocm: None) -> None:
    choice = select(PRESET.shard(4), "cuda", torch.bfloat16)
    assert choice.name == "triton"
    assert "no AITER kernel on gfx942 for 32 heads" in choice.reason


def test_asked_for_aiter_raises_where_it_does_not_serve(rocm: None) -> None:
    with pytest.raises(BackendUnavailableError, match="32 heads"):
        select(PRESET.shard(4), "cuda", torch.bfloat16, backend="aiter")


def test_prefill_is_chosen_by_its_own_limits(rocm: None) -> None:
    assert "flash_attn_varlen_func" in select(PRESET.shard(4), "cuda", torch.bfloat16, op="prefill").reason
    assert select(MLAConfig.preset("minicpm3"), "cuda", torch.bfloat16, op="prefill").name == "triton"


def test_a_plan_that_outgrows_int32_slots_is_refused(fake_gpu: Launches) -> None:
    with pytest.raises(ValueError, match="below 2\\*\\*31"):
        DecodePlan(
            PRESET.shard(8),
            max_batch_size=2**13,
            max_seq_len=2**18,
            page_size=2**18,
            device="cpu",
            dtype=torch.bfloat16,
            backend="aiter",
        )
