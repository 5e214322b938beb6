"""A graph for the CPU with the semantics of a device graph: it records operators and replays them.

Like a device graph it runs no Python on replay, keeps the addresses that the recorded operators used, and
refuses to move a value to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _HOST_READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view:
            self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """Takes the place of :class:`capture.graphs.EagerGraph`."""

    def __init__(self, body: Callable[[], None]) -> None:
        recorder = _Recorder()
        with recorder:
            body()
        self._calls = recorder.calls

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, recorded in self._calls:
                result = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(result), strict=True):
                        if isinstance(old, Tensor):
                            old.copy_(new)

    def reset(self) -> None:
        self._calls.clear()
