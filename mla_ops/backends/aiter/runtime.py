"""The installed AITER at work: imported when a call first needs it, and called through its contract."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_ops.backends.aiter import calls
from mla_ops.backends.aiter.capabilities import KernelTable, Refusal, read_table
from mla_ops.backends.aiter.contract import AiterNotFoundError, Installation, locate
from mla_ops.errors import BackendUnavailableError

__all__ = ["Runtime", "arch_of", "compute_units", "installed_runtime"]


def arch_of(device: torch.device) -> str | None:
    """``gfx942`` and the like; ``None`` for what is not an AMD GPU."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def compute_units(device: torch.device) -> int:
    """Compute units of an AMD GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Runtime:
    """One AITER.

    Args:
        installation: what was found.

    Attributes:
        installation: the same.
    """

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self._tables: dict[str, KernelTable | None] = {}

    def table(self, arch: str) -> KernelTable | None:
        """The decode kernels for ``arch``; ``None`` where the dispatcher is hard-coded."""
        if arch not in self._tables:
            path = self.installation.kernel_table(arch)
            self._tables[arch] = None if path is None else read_table(path)
        return self._tables[arch]

    def refusal(self, arch: str, units: int) -> Refusal | None:
        """Why this AITER must not be called in this process, whatever the shapes."""
        decode = self.installation.contract.functions.get("mla_decode_fwd")
        if decode is None or "num_kv_splits_indptr" not in decode:
            return Refusal(f"AITER {self.installation.version} is older than 0.1.7", "upgrade AITER")
        for variable, right in (("GPU_ARCHS", arch), ("CU_NUM", str(units))):
            value = os.environ.get(variable)
            if value not in (None, "", "native", right):
                return Refusal(
                    f"{variable}={value} is set and the device has {right}: AITER would choose kernels and sizes "
                    "for another machine",
                    f"unset {variable} (it is for building only)",
                )
        return None

    def prefill_refusal(self) -> Refusal | None:
        """Why ``flash_attn_varlen_func`` cannot be called."""
        if self.installation.contract.prefill_needs_flydsl and importlib.util.find_spec("flydsl") is None:
            return Refusal(
                f"AITER {self.installation.version} imports flydsl in every prefill, and it is not installed",
                'install the flydsl that this AITER asks for, or use backend="triton"',
            )
        return None

    @functools.cached_property
    def module(self) -> ModuleType:
        """The imported package. Importing it may build one of its modules, for minutes: warm up first."""
        try:
            module = importlib.import_module("aiter")
            importlib.import_module("aiter.mla")
        except (Exception, SystemExit) as error:  # a failed build is a SystemExit in versions before 0.1.12
            for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
                del sys.modules[name]  # a half-imported package would fail in a stranger way at the next call
            raise BackendUnavailableError(
                "aiter",
                f"importing AITER {self.installation.version} failed with {type(error).__name__}: {error}",
                "run `mla-warmup doctor`; it says what is missing",
            ) from error
        return module

    def decode(
        self,
        leading: Sequence[Any],
        *,
        sm_scale: float,
        num_kv_splits: int,
        splits_indptr: Tensor,
        q_scale: Tensor | None,
        kv_scale: Tensor | None,
    ) -> Tensor:
        """Non-persistent ``mla_decode_fwd``: writes ``leading[2]``, returns the LSE ``[T, H]``.

        Versions that would use a tensor of an ``lru_cache``, or that cannot return an LSE, run over a copy of their
        module's globals in which two names are ours: ``get_meta_param`` gives our splits, and ``aiter`` lets us see
        what stage 1 wrote. Nothing outside of the call notices.
        """
        contract = self.installation.contract
        # fp8 kernels split in blocks that stage 2 does not know: it may read splits that were never written.
        fp8 = leading[0].dtype.itemsize == 1
        as_it_is = contract.own_splits and contract.returns_lse and not fp8
        bound = calls.decode_call(
            contract,
            leading,
            sm_scale=sm_scale,
            num_kv_splits=num_kv_splits,
            num_kv_splits_indptr=splits_indptr if contract.own_splits else None,
            q_scale=q_scale,
            kv_scale=kv_scale,
            return_lse=as_it_is,
        )
        fwd: Callable[..., tuple[Tensor, Tensor]] = inspect.unwrap(self.module.mla.mla_decode_fwd)
        if as_it_is:
            return fwd(*bound.args, **bound.kwargs)[1]
        stage1 = _Stage1Tap(self.module, contract.functions["mla_decode_stage1_asm_fwd"].names, clear_data=fp8)
        replaced: dict[str, Any] = {"aiter": stage1}
        if not contract.own_splits:
            heads, query_len = leading[0].shape[1], leading[7]
            # A split takes blocks of this many keys; without one it writes nothing, and stage 2 must not read it.
            granularity = 64 if heads == 16 and query_len == 1 else 16
            values = {"num_kv_splits": num_kv_splits, "mgc": granularity, "num_kv_splits_indptr": splits_indptr}
            outputs = tuple(values[name] for name in contract.meta_outputs)
            replaced["get_meta_param"] = lambda *args: outputs
        assert isinstance(fwd, FunctionType)
        ours = FunctionType(fwd.__code__, {**fwd.__globals__, **replaced}, fwd.__name__, fwd.__defaults__)
        ours(*bound.args, **bound.kwargs)
        assert stage1.split_lse is not None
        return stage1.split_lse.squeeze(-1).logsumexp(1)

    def decode_persistent(
        self,
        leading: Sequence[Any],
        *,
        sm_scale: float,
        q_scale: Tensor | None,
        kv_scale: Tensor | None,
        work: Sequence[Tensor],
        return_lse: bool,
    ) -> Tensor | None:
        """Persistent ``mla_decode_fwd``: writes ``leading[2]``, returns the LSE ``[T, H]`` where asked for."""
        bound = calls.decode_call(
            self.installation.contract,
            leading,
            sm_scale=sm_scale,
            # Given, so that no version falls back to the other mode; its value is the grid's, as AITER's default.
            num_kv_splits=work[2].shape[0] - 1,
            num_kv_splits_indptr=None,
            q_scale=q_scale,
            kv_scale=kv_scale,
            work=work,
            return_lse=return_lse,
        )
        result: tuple[Tensor, Tensor] = self.module.mla.mla_decode_fwd(*bound.args, **bound.kwargs)
        return result[1] if return_lse else None

    def metadata_buffers(
        self, batch_size: int, query_len: int, num_heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the six buffers of persistent mode, in the order of :func:`calls.metadata_call`."""
        contract = self.installation.contract
        bound = calls.metadata_info_call(contract, batch_size, query_len, num_heads, q_dtype, kv_dtype)
        info = self.module.get_mla_metadata_info_v1(*bound.args, **bound.kwargs)
        pointers, indptr, info_set, *reduce = (
            (tuple(size) if isinstance(size, (tuple, list, torch.Size)) else (int(size),), dtype)
            for size, dtype in info
        )
        return [pointers, info_set, indptr, *reduce]

    def write_metadata(self, bound: calls.BoundCall) -> None:
        """``get_mla_metadata_v1``: plan the work of a persistent decode into its buffers, on the current stream."""
        self.module.get_mla_metadata_v1(*bound.args, **bound.kwargs)

    def prefill(self, leading: Sequence[Any], *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """``flash_attn_varlen_func``: out ``[T, H, V]`` and its LSE ``[H, T]``."""
        bound = calls.prefill_call(self.installation.contract, leading, softmax_scale=softmax_scale, causal=causal)
        with torch.no_grad():  # an autograd.Function, which gives no LSE where a gradient is wanted
            result: tuple[Tensor, Tensor] = self.module.flash_attn_varlen_func(*bound.args, **bound.kwargs)
        return result[0], result[1]

    def write(self, values: Sequence[Any]) -> None:
        """``concat_and_cache_mla``."""
        bound = calls.write_call(self.installation.contract, values)
        self.module.concat_and_cache_mla(*bound.args, **bound.kwargs)


class _Stage1Tap:
    """AITER's package as ``mla_decode_fwd`` sees it; keeps the split LSE of the stage 1 that passes through."""

    def __init__(self, module: ModuleType, parameters: tuple[str, ...], *, clear_data: bool) -> None:
        self._module = module
        self._parameters = parameters
        self._clear_data = clear_data
        self.split_lse: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def mla_decode_stage1_asm_fwd(self, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        self.split_lse = named["splitLse"]
        self.split_lse.fill_(-torch.inf)  # a split without keys writes nothing
        if self._clear_data:
            named["splitData"].zero_()
        self._module.mla_decode_stage1_asm_fwd(*args, **kwargs)


@functools.cache
def installed_runtime(root: Path | None = None) -> Runtime:
    """The AITER of this process.

    Raises:
        BackendUnavailableError: there is none.
    """
    try:
        return Runtime(locate(root))
    except AiterNotFoundError as error:
        raise BackendUnavailableError("aiter", error.reason, error.remedy) from error
