"""GraphRunner: a step captured once for each batch size, replayed for every batch that fits.

On CUDA and HIP devices each bucket is a graph. On other devices the same object calls the step on the same
static buffers, so that every rule but those of the device can be tried without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from capture.buckets import check_batch_sizes, smallest_fit
from capture.buffers import BatchDim, PadValue, StaticBuffers
from capture.errors import CaptureError, NotCapturedError
from capture.graphs import DeviceGraph, EagerGraph, capture_stream, explain, gc_paused
from capture.inputs import MakeInputs, RandomInputs
from capture.memory import CapturedBucket, CaptureReport, Memory, MemoryMeter, fit_budget
from capture.outputs import OutputShapes, StaticOutputs
from capture.ranks import Ranks

if TYPE_CHECKING:
    from capture.verification import VerifyReport

__all__ = ["GraphRunner"]


@dataclass(frozen=True, slots=True)
class _Call:
    """All that a call of one batch size needs, made once."""

    bucket: int
    replay: Callable[[], None]
    leaves: list[Tensor]
    unflatten: Callable[[list[Tensor]], Any]


class GraphRunner:
    """Captures ``step`` for each batch size and replays the smallest that fits.

    A call pads its inputs to the bucket, replays, and returns views of the first rows of the static
    outputs: the next call, of any batch size, overwrites them. ``clone=True`` returns copies. Calls must
    not overlap: one thread at a time. Calls from different streams are ordered one after the other.

    Warm-up and capture run with every row a pad row. The pad values must make a row inert (a slot
    of -1 that writes nothing, a length of 0), or else the warm-up writes into live memory.

    Args:
        step: called as ``step(**inputs)``, returns a tensor or a pytree of tensors whose rows go with the
            batch. Reads the batch size from its inputs' shapes. Must not write to its inputs.
        batch_sizes: buckets, counted in requests.
        example_inputs: for each input an example at the largest batch size. Shape, dtype and device are kept,
            the tensors are not. At least one input has a batch dimension.
        batch_dims: for each input a dimension (its rows per request follow from the example), a
            :class:`BatchDim`, or None.
        device: where the static buffers live; the first example's device if None.
        pool: memory pool (``torch.cuda.graph_pool_handle()``) to share with other runners that never replay at the
            same time, such as those of other query lengths; a new one if None.
        pad_values: what the pad rows of an input hold, 0 if not named; "last" repeats the last live row.
        state: tensors that the step changes in place (a paged KV cache), for verification and for
            :meth:`moved`. Looked up again at each check, so a mapping that the caller keeps current shows a
            tensor that was rebound.
        make_inputs: ``make_inputs(batch_size, generator)`` returns fresh valid inputs for verification;
            by default see :class:`capture.inputs.RandomInputs`.
        poison_state: ``poison_state(inputs)`` overwrites what the step must not read for these inputs (unused
            cache slots) with NaN, for verification.
        fallback: "eager" runs a batch above the largest bucket eagerly; None refuses it.
        memory_budget: bytes of device memory that the graphs may take; batch sizes that would exceed it, by what the
            graph of the largest took, are left out.
        process_group: of ranks whose steps run collectives together. All of them must make and capture runners with
            the same batch sizes; if one fails, all do.

    Raises:
        ValueError: batch sizes, names, batch dimensions or pad values do not fit the examples.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        batch_sizes: Iterable[int],
        example_inputs: Mapping[str, Tensor],
        batch_dims: Mapping[str, int | BatchDim | None],
        device: torch.device | str | None = None,
        pool: Any = None,
        pad_values: Mapping[str, PadValue] | None = None,
        state: Mapping[str, Tensor] | None = None,
        make_inputs: MakeInputs | None = None,
        poison_state: Callable[[Mapping[str, Tensor]], None] | None = None,
        fallback: Literal["eager"] | None = None,
        memory_budget: int | None = None,
        process_group: Any = None,
    ) -> None:
        if fallback not in (None, "eager"):
            raise ValueError(f'fallback must be "eager" or None, got {fallback!r}')
        if "clone" in example_inputs:
            raise ValueError("an input cannot be called 'clone': the runner's own argument has that name")
        self.step = step
        self.batch_sizes = check_batch_sizes(batch_sizes)
        self.device = _resolve_device(device, example_inputs)
        self.state: Mapping[str, Tensor] = {} if state is None else state
        self.poison_state = poison_state
        self.fallback = fallback
        self.memory_budget = memory_budget
        self.ranks = Ranks(process_group)
        largest = self.batch_sizes[-1]
        self.static_inputs = StaticBuffers(
            example_inputs, batch_dims, max_batch_size=largest, device=self.device, pad_values=pad_values
        )
        self.make_inputs = make_inputs or RandomInputs(example_inputs, self.static_inputs.slabs, largest)
        self._outputs: StaticOutputs | None = None
        self._graphs: dict[int, EagerGraph | DeviceGraph] = {}
        self._calls: dict[int, _Call] = {}
        self._addresses: dict[str, int] = {}
        self._held: tuple[Tensor, ...] = ()
        self._shared_pool = pool
        self._on_device = self.device.type == "cuda"
        self._last_stream: torch.cuda.Stream | None = None
        self._closed = False

    def capture(self, verify: bool = True) -> CaptureReport:
        """Warm up every batch size, capture largest first into one pool, and verify.

        Raises:
            GraphCaptureError: no memory, a call that no graph can hold (a host synchronization),
                results that cannot be stored, or a failure of another rank. Nothing stays captured.
            VerificationError: a graph does not give what eager gives. Nothing stays captured.
            CaptureError: captured already, or closed.
        """
        self._check_open()
        if self._graphs:
            raise CaptureError("this runner is captured already; make a new one for other batch sizes")
        start = time.perf_counter()
        self.ranks.same("batch_sizes", self.batch_sizes)
        try:
            with torch.no_grad(), self._on_capture_stream():
                buckets = self._capture_all(self._warm_up())
            self._held = tuple(self.state.values())
            self._addresses = self._current_addresses()
            verification = self._verify() if verify else None
        except BaseException:
            self._release()
            raise
        largest = buckets[0].memory
        return CaptureReport(
            buckets=tuple(replace(bucket, verified=verify) for bucket in buckets),
            seconds=time.perf_counter() - start,
            verification=verification,
            estimated_bytes=largest.pool + largest.graph * len(self.batch_sizes),
            dropped=tuple(sorted(set(self.batch_sizes) - set(self._graphs))),
        )

    def __call__(self, *, clone: bool = False, **inputs: Tensor) -> Any:
        """Run the step on ``inputs``, named and shaped as the examples but for the batch size.

        Returns:
            What the step returns, as views of the static outputs that the next call overwrites; copies if
            ``clone``.

        Raises:
            InputMismatchError: an input differs from the example in more than the batch size.
            NotCapturedError: not captured yet, or the batch is above the largest bucket and there is no
                fallback.
        """
        if self._closed:
            self._check_open()
        batch_size = self.static_inputs.check(inputs)
        call = self._calls.get(batch_size) or self._prepare(batch_size)
        if self._on_device:
            self._order_streams()
        if call is None:
            with torch.no_grad():
                return self.step(**inputs)
        self.static_inputs.fill(inputs, batch_size, call.bucket)
        call.replay()
        leaves = [leaf.clone() for leaf in call.leaves] if clone else call.leaves
        return call.unflatten(leaves)

    def replay(self, bucket: int) -> None:
        """Replay one bucket on the static inputs as they are, on the current stream.

        For a caller that writes ``static_inputs.views(bucket)`` itself, every row of it (verification leaves
        its own values there), and reads ``static_outputs``.

        Raises:
            NotCapturedError: ``bucket`` has no graph.
        """
        graph = self._graphs.get(bucket)
        if graph is None:
            raise NotCapturedError(bucket, self.captured)
        if self._on_device:
            self._order_streams()
        graph.replay()

    @property
    def captured(self) -> tuple[int, ...]:
        """The batch sizes that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    @property
    def static_outputs(self) -> StaticOutputs:
        """The static outputs; they exist once captured."""
        if self._outputs is None:
            raise CaptureError("the runner has no outputs before capture()")
        return self._outputs

    def moved(self) -> tuple[str, ...]:
        """Names of static buffers and ``state`` that no longer lie where the graphs use them. Cheap."""
        self._check_open()
        current = self._current_addresses()
        return tuple(name for name, address in self._addresses.items() if current.get(name) != address)

    def close(self) -> None:
        """Free the graphs, then their pool and the static buffers. Harmless when called twice.

        Views that calls returned stay readable, and keep the static outputs alive until they are dropped.
        """
        if self._closed:
            return
        self._closed = True
        if self._on_device and self._graphs:
            torch.cuda.synchronize(self.device)  # a replay may still be running
        self._release()
        del self.static_inputs
        if self._on_device:
            torch.cuda.empty_cache()  # the allocator keeps a pool without graphs until it is asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a GraphRunner cannot be pickled or copied: its graphs hold device addresses of this process; "
            "make a new runner and capture it there"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise CaptureError("this runner is closed; make a new one and capture it")

    def _prepare(self, batch_size: int) -> _Call | None:
        """The call of a new batch size; None if the fallback serves it."""
        bucket = smallest_fit(self.captured, batch_size)
        if bucket is None:
            if self._graphs and self.fallback == "eager":
                return None
            raise NotCapturedError(batch_size, self.captured)
        outputs = self.static_outputs
        leaves = outputs.live(bucket, batch_size)
        call = _Call(bucket, self._graphs[bucket].replay, leaves, outputs.unflatten)
        self._calls[batch_size] = call
        return call

    def _order_streams(self) -> None:
        """Let the current stream wait for the stream of the last call, whose replay uses the same buffers."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._last_stream:
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def _body(self, bucket: int) -> Callable[[], None]:
        """What the graph of a bucket holds. Reads nothing from Python that can change later."""
        views, outputs, step = self.static_inputs.views(bucket), self.static_outputs, self.step

        def body() -> None:
            with torch.no_grad():
                outputs.store(step(**views), bucket)

        return body

    def _warm_up(self) -> dict[int, float]:
        """Run the step at each size and copy its results; seconds by size, largest first.

        On the capture stream, because BLAS handles, workspaces and modules are made at first use, by stream,
        and cannot be made during a capture.
        """
        sizes = self.batch_sizes[::-1]
        # Two sizes show how the outputs grow; one bucket alone does not show which dimension is the batch.
        probes = (sizes[-1] if len(sizes) > 1 else 1, sizes[0])
        seconds = dict.fromkeys(sizes, 0.0)
        outputs: dict[int, tuple[Any, OutputShapes]] = {}
        for size in dict.fromkeys(probes):
            start = time.perf_counter()
            outputs[size] = self._run_padded(size)
            seconds[size] = time.perf_counter() - start
        with self._explain(sizes[0], "allocating the static outputs"):
            other, largest = (outputs[size][1] for size in probes)
            self._outputs = StaticOutputs(largest, None if other is largest else other)
        for size in sizes:
            start = time.perf_counter()
            output, found = outputs.pop(size) if size in outputs else self._run_padded(size)
            self.static_outputs.check(found)
            with self._explain(size, "warming up"):
                self.static_outputs.store(output, size)
                self._synchronize()
            seconds[size] += time.perf_counter() - start
        return seconds

    def _run_padded(self, size: int) -> tuple[Any, OutputShapes]:
        with self._explain(size, "warming up"):
            self.static_inputs.pad_all(size)
            output = self.step(**self.static_inputs.views(size))
            return output, OutputShapes.of(output, size, self.state)

    def _capture_all(self, warm_seconds: Mapping[int, float]) -> list[CapturedBucket]:
        """Largest first: the smaller graphs then live in the memory that the largest one left in the pool."""
        sizes = self.batch_sizes
        with gc_paused():
            if self._on_device:
                torch.cuda.empty_cache()  # the warm-up's blocks; the pool cannot use them
            pool = self._shared_pool
            if pool is None and self._on_device:
                pool = torch.cuda.graph_pool_handle()
            with self._all_ranks_or_none():
                buckets = [self._capture_one(sizes[-1], pool, warm_seconds)]
            # Every rank keeps the sizes that fit all of them: a replay on one is a replay on all.
            memory = Memory(*map(self.ranks.largest, (buckets[0].memory.pool, buckets[0].memory.graph)))
            kept = fit_budget(sizes, memory, self.memory_budget)
            with self._all_ranks_or_none():
                buckets += [self._capture_one(size, pool, warm_seconds) for size in kept[-2::-1]]
        return buckets

    def _capture_one(self, size: int, pool: Any, warm_seconds: Mapping[int, float]) -> CapturedBucket:
        self.static_inputs.pad_all(size)  # a runtime may run what it fails to record
        self._synchronize()
        start, meter = time.perf_counter(), MemoryMeter(self.device)
        with self._explain(size, "capturing"):
            body = self._body(size)
            self._graphs[size] = DeviceGraph(body, pool) if self._on_device else EagerGraph(body)
        return CapturedBucket(size, warm_seconds[size] + time.perf_counter() - start, meter.taken(), False)

    @contextmanager
    def _all_ranks_or_none(self) -> Iterator[None]:
        """A rank that fails in here tells the others, which would else wait for it in their next collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:
            error = failure
        self.ranks.agree(error, self.batch_sizes[-1])

    def _verify(self) -> VerifyReport:
        from capture.verification import verify  # here: capture.verification reads runners

        with self._all_ranks_or_none():
            report = verify(self)
            report.raise_if_failed()
        return report

    def _current_addresses(self) -> dict[str, int]:
        addresses = {f"input {name}": slab.flat.data_ptr() for name, slab in self.static_inputs.slabs.items()}
        addresses |= {slab.name: slab.flat.data_ptr() for slab in self.static_outputs.slabs}
        return addresses | {f"state {name}": tensor.data_ptr() for name, tensor in self.state.items()}

    def _release(self) -> None:
        """Graphs first: they point into the pool, which goes when its last graph does."""
        self._calls.clear()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._outputs = None
        self._held = ()
        self._addresses = {}
        self._last_stream = None

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        if not self._on_device:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        stream = capture_stream(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)
        self._last_stream = stream

    def _synchronize(self) -> None:
        if self._on_device:
            torch.cuda.current_stream(self.device).synchronize()

    def _explain(self, bucket: int, doing: str) -> AbstractContextManager[None]:
        return explain(self.step, bucket, doing, self.device, list(self._graphs))


def _resolve_device(device: torch.device | str | None, example_inputs: Mapping[str, Tensor]) -> torch.device:
    if device is None:
        if not example_inputs:
            raise ValueError("example_inputs is empty; a step needs at least one input with a batch dimension")
        return next(iter(example_inputs.values())).device
    return torch.empty(0, device=device).device  # with its index
