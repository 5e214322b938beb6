"""One recorded graph, on a device that has graphs and on one that has none, and why recording one failed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from capture.errors import CaptureError, GraphCaptureError

__all__ = ["DeviceGraph", "EagerGraph", "capture_stream", "explain", "gc_paused"]


class EagerGraph:
    """Stands in for a graph on a device that has none: a replay runs the body."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body

    def reset(self) -> None:
        """Let go of the body and all that it holds."""
        del self.replay


class DeviceGraph:
    """A CUDA or HIP graph of ``body``, recorded on the current stream, which is not the default stream."""

    def __init__(self, body: Callable[[], None], pool: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it synchronizes and empties the allocator's cache for each of many captures.
        # thread_local: another thread (a watchdog, a second worker) may synchronize meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            body()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool)
            raise
        self.replay = graph.replay
        self.reset = graph.reset


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Leave capture mode after a failure, so that the process can go on without graphs, or with smaller ones.

    torch ends its own part of a capture only after the driver has ended it well, which it does not
    after an illegal call. What is left open then: the allocator's redirection to the pool, and the
    default generator, which refuses to draw numbers until some capture that it takes part in has ended.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph may be empty
            graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # not open: the driver failed after torch had closed it
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        mark = torch.zeros(1, device="cuda")
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        mark.zero_()
        graph.capture_end()
    graph.reset()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process on which all runners of a device warm up and capture.

    One, because a pool that runners share serves blocks by stream, and because BLAS libraries
    keep a handle and a workspace of tens of megabytes for each stream that ever used them.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection: a finalizer that unloads a device module would abort the capture."""
    enabled = gc.isenabled()
    gc.collect(1)  # what is young; all that a large process holds would take longer than the captures
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def explain(
    step: Callable[..., Any], bucket: int, doing: str, device: torch.device, captured: Iterable[int]
) -> Iterator[None]:
    """Turn what goes wrong in the block into a GraphCaptureError.

    The step's own error outside a capture stays what it is, with a note that names the bucket.
    """
    name = getattr(step, "__qualname__", type(step).__qualname__)
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise GraphCaptureError(bucket, _out_of_memory(bucket, doing, device, captured)) from error
        if doing != "capturing":
            error.add_note(f"while {doing} {name} for a batch of {bucket}, every row a pad row")
            raise
        raise GraphCaptureError(bucket, _illegal_call(name, bucket, error)) from error


def _out_of_memory(bucket: int, doing: str, device: torch.device, captured: Iterable[int]) -> str:
    memory = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = f" ({free:,} of {total:,} bytes free on {device})"
    done = ", ".join(map(str, captured)) or "none"
    return (
        f"out of memory while {doing} a batch of {bucket}{memory}; captured before it: {done}. Remedies: "
        "(1) a smaller largest batch size, or fewer sizes: GraphRunner(..., memory_budget=...); "
        "(2) leave more memory free: a smaller KV cache, allocated before the capture; "
        "(3) share pool= with runners that never replay at the same time; "
        '(4) capture only small batches and run the rest with fallback="eager"'
    )


def _illegal_call(name: str, bucket: int, error: Exception) -> str:
    cause = (str(error).strip().splitlines() or [""])[0]
    return (
        f"capturing {name} for a batch of {bucket} failed: {type(error).__name__}: {cause}. A captured step "
        "must not wait for the device or move data to the host (.item(), .tolist(), .cpu(), bool(tensor), "
        "torch.nonzero, printing a tensor), and must not build or autotune a kernel; the traceback of the "
        "cause shows where it did"
    )
