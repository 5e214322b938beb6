"""Public functions that go past the dispatcher where it has nothing to do, and the signatures of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from layer_calls import CALLS, TOKENS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_ops
from mla_ops import InferenceOnlyError, functional, layer_functional, layer_ops, ops, signatures
from mla_ops.backends import kernels, reference
from mla_ops.testing import make_decode_inputs

Arguments = dict[str, Any]
WRITING = ["norm_rope_write", "write_latent_cache"]
AROUND = sorted(CALLS)


def decode(dtype: torch.dtype) -> Arguments:
    return make_decode_inputs([3, 0, 5], dtype=dtype, poison=False).arguments()


def write(dtype: torch.dtype) -> Arguments:
    rows = torch.randn(3, 48, dtype=dtype)
    return {
        "kv_c": rows[:, :32],
        "k_pe": rows[:, 32:],
        "kv_cache": torch.zeros(4, 4, 48, dtype=dtype),
        "slot_mapping": torch.tensor([3, -1, 9]),
    }


PUBLIC: dict[str, Callable[[torch.dtype], Arguments]] = {"mla_decode": decode, "write_latent_cache": write, **CALLS}


def call(op: str, arguments: Arguments) -> list[Any]:
    """What the public function returns, and what it has written."""
    result = getattr(mla_ops, op)(**arguments, backend="reference")
    results = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    return [*results, *([arguments["kv_cache"]] if op in WRITING else [])]


def copied(arguments: Arguments) -> Arguments:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.fixture(autouse=True)
def no_signatures() -> None:
    signatures.READY.clear()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that public functions call through the dispatcher."""
    names: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(torch.ops.mla_ops, name)

    for module in (functional, layer_functional):
        monkeypatch.setattr(module, "_ops", Noted())
    return names


# --- past the dispatcher ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_plain_call_skips_the_dispatcher(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = PUBLIC[op](torch.float32)
    expected = [x.clone() for x in call(op, copied(arguments))]
    for module in (functional, layer_functional):
        monkeypatch.setattr(module, "_ops", None)
    assert all(map(torch.equal, call(op, copied(arguments)), expected))
    with torch.inference_mode():
        assert all(map(torch.equal, call(op, copied(arguments)), expected))


@pytest.mark.parametrize("op", AROUND)
def test_parameters_are_plain_where_no_gradient_is_recorded(op: str, dispatched: list[str]) -> None:
    arguments = PUBLIC[op](torch.float32)
    weights = [name for name in arguments if name in ("second", "weight", "q_weight", "kv_weight", "w_uk", "w_uv")]
    expected = call(op, copied(arguments))
    dispatched.clear()
    parameters = {name: nn.Parameter(arguments[name]) for name in weights}
    with torch.no_grad():
        found = call(op, arguments | parameters)
    assert weights
    assert not dispatched
    assert all(map(torch.equal, found, expected))
    if op not in WRITING and "second" not in weights:
        assert call(op, arguments | parameters)[0].requires_grad
        assert dispatched == [op]


@pytest.mark.parametrize("op", AROUND)
def test_autocast_changes_nothing(op: str) -> None:
    arguments = PUBLIC[op](torch.float32)
    expected = call(op, copied(arguments))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(op, copied(arguments))
    assert all(x.dtype == y.dtype for x, y in zip(found, expected, strict=True))


# --- what the dispatcher has to do ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_dispatch_mode_sees_the_op(op: str) -> None:
    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        call(op, PUBLIC[op](torch.float32))
    assert f"mla_ops.{op}.default" in names


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_function_mode_sees_the_op(op: str) -> None:
    class Seen(TorchFunctionMode):
        names: ClassVar[list[str]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    arguments = PUBLIC[op](torch.float32)
    with Seen():
        call(op, arguments)
    assert any(op in name for name in Seen.names)


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_profiler_sees_the_op(op: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call(op, PUBLIC[op](torch.float32))
    assert f"mla_ops::{op}" in {event.name for event in profiler.events()}


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_subclass_of_tensor_sees_the_op(op: str, dispatched: list[str]) -> None:
    arguments = PUBLIC[op](torch.float32)
    for name, x in arguments.items():
        if isinstance(x, Tensor) and op not in WRITING:
            dispatched.clear()
            assert isinstance(call(op, arguments | {name: TwoTensor(x, x)})[0], TwoTensor)
            assert dispatched == [op]


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_fake_tensors_give_fake_tensors(op: str) -> None:
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in PUBLIC[op](torch.float32).items()}
    assert all(isinstance(x, FakeTensor) for x in call(op, fakes))
    with mode:
        assert all(isinstance(x, FakeTensor) for x in call(op, fakes))


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_negative_view_is_made_real_first(op: str) -> None:
    arguments = PUBLIC[op](torch.float32)
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name != "kv_cache":
            expected = call(op, copied(arguments) | {name: -x})
            found = call(op, copied(arguments) | {name: torch._neg_view(x)})
            assert all(map(torch.equal, found, expected)), name


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, at the first dual tensor
@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_forward_gradient_is_given_or_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = PUBLIC[op](torch.float32)
    first, x = next(iter(arguments.items()))
    with forward_ad.dual_level():
        arguments[first] = forward_ad.make_dual(x, torch.ones_like(x))
        if op in WRITING:
            with pytest.raises(InferenceOnlyError, match="writes in place and has no gradient"):
                call(op, arguments)
            return
        assert forward_ad.unpack_dual(call(op, arguments)[0]).tangent.any()
        monkeypatch.setitem(kernels._KERNELS, (op, "triton"), getattr(reference, op))
        with pytest.raises(InferenceOnlyError, match=f'{op} with backend="triton" is for inference'):
            getattr(mla_ops, op)(**arguments, backend="triton")


@pytest.mark.parametrize("op", sorted(set(AROUND) - set(WRITING)))
def test_vmap_sees_the_op(op: str) -> None:
    arguments = PUBLIC[op](torch.float32)
    rows = [name for name, x in arguments.items() if isinstance(x, Tensor) and name in ("x", "q", "latent")]
    (name,) = rows
    other = torch.randn_like(arguments[name])
    found = vmap(lambda x: call(op, arguments | {name: x})[0])(torch.stack([arguments[name], other]))
    for i, x in enumerate((arguments[name], other)):
        torch.testing.assert_close(found[i], call(op, arguments | {name: x})[0])


# --- signatures -------------------------------------------------------------------------------------------------


class Learning:
    """A bound kernel: what it saw in its first call it takes for granted in the next ones."""

    made = 0

    def __init__(self, op: str, backend: str) -> None:
        type(self).made += 1
        self.kernel = getattr(reference, op)
        self.first: Any = None

    def __call__(self, *args: Any) -> Any:
        seen = [
            (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x
            for x in args
            if not isinstance(x, list)
        ]
        self.first = self.first or seen
        assert seen == self.first
        return self.kernel(*args)


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> type[Learning]:
    for module in (ops, layer_ops):
        monkeypatch.setattr(module, "bound_kernel", Learning)
    Learning.made = 0
    return Learning


def unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def in_wider_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() > 1 else x.clone()


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_calls_of_one_signature_are_bound_once_and_others_apart(op: str, learning: type[Learning]) -> None:
    arguments = PUBLIC[op](torch.float32)
    for _ in range(3):
        call(op, copied(arguments))
    assert learning.made == 1
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            continue
        for change in (unaligned, in_wider_rows):
            changed = copied(arguments) | {name: change(x)}
            expected = [y.clone() for y in call(op, copied(arguments))]
            assert all(map(torch.equal, call(op, changed), expected)), name
    made = learning.made
    call(op, PUBLIC[op](torch.float64))
    assert learning.made == made + 1


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("mla_decode", {"softmax_scale": 0.5}),
        ("rms_norm", {"eps": 0.5}),
        ("norm_rope_write", {"eps": 0.5}),
        ("norm_rope_write", {"rope_scale": 0.5}),
        ("norm_rope_write", {"interleave": False}),
        ("absorb_query", {"rope_scale": 0.5}),
        ("absorb_query", {"interleave": True}),
        ("absorb_query", {"scaling_beta": 0.25}),
        ("absorb_query", {"scaling_window": 8}),
        ("linear", {"second": None, "residual": None}),
        ("linear", {"residual": None}),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_a_scalar_or_an_argument_left_out_is_a_signature_of_its_own(
    op: str, changes: Arguments, learning: type[Learning]
) -> None:
    arguments = PUBLIC[op](torch.float32)
    one, other = call(op, copied(arguments)), call(op, copied(arguments) | changes)
    assert learning.made == 2
    assert not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_a_bad_call_after_a_good_one_is_refused(op: str) -> None:
    arguments = PUBLIC[op](torch.float32)
    expected = call(op, copied(arguments))
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            for bad in (x[None], x.to(torch.complex64), x.to("meta")):
                with pytest.raises((ValueError, TypeError)):
                    call(op, copied(arguments) | {name: bad})
    assert all(map(torch.equal, call(op, copied(arguments)), expected))


@pytest.mark.parametrize(
    ("op", "name", "bad"),
    [
        ("mla_decode", "max_seqlen_q", 1.0),
        ("mla_decode", "num_kv_splits", 0.0),
        ("mla_decode", "num_kv_splits", None),
        ("mla_decode", "kv_lora_rank", 32.0),
        ("mla_decode", "softmax_scale", None),
        ("rms_norm", "eps", "1e-6"),
        ("norm_rope_write", "eps", None),
        ("norm_rope_write", "rope_scale", None),
        ("absorb_query", "rope_scale", None),
        ("absorb_query", "scaling_beta", "0"),
        ("absorb_query", "scaling_window", 4.0),
    ],
)
def test_a_scalar_of_a_wrong_type_is_named_and_spoils_no_good_call(op: str, name: str, bad: object) -> None:
    """32.0 is 32 as a key: what the bad call leaves behind must not serve the good one."""
    arguments = PUBLIC[op](torch.float32)
    with pytest.raises(RuntimeError, match=f"for argument '{name}' but instead found type '{type(bad).__name__}'"):
        call(op, copied(arguments) | {name: bad})
    call(op, copied(arguments))


@pytest.mark.parametrize("op", WRITING)
def test_autograd_learns_of_a_write_whoever_writes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write through addresses. A cache that a backward still needs must not change without a word."""

    def unseen(*args: Any) -> Any:
        return getattr(reference, op)(*[x.data if isinstance(x, Tensor) else x for x in args])

    for module in (ops, layer_ops):
        monkeypatch.setattr(module, "bound_kernel", lambda *_: unseen)
    arguments = PUBLIC[op](torch.float32)
    cache = arguments["kv_cache"]
    x = torch.ones(1, requires_grad=True)
    product = (x * cache).sum()
    call(op, arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("op", WRITING)
def test_rows_of_the_cache_itself_are_read_before_it_is_written(op: str, learning: type[Learning]) -> None:
    """They are copied, and a copy is dense where the rows of a call like it are not."""
    first, second = ("kv_c", "k_pe") if op == "write_latent_cache" else ("q_a", "latent")
    arguments = PUBLIC[op](torch.float32)
    widths = arguments[first].shape[1], arguments[second].shape[1]
    for lies_there in (True, False, True):
        cache = torch.randn_like(arguments["kv_cache"]).repeat(4, 1, 1)
        apart = cache.clone() if lies_there else cache
        given = cache if lies_there else cache.clone()
        rows = {
            first: given.view(-1)[: TOKENS * sum(widths)].view(TOKENS, -1)[:, : widths[0]],
            second: given.view(-1)[: TOKENS * sum(widths)].view(TOKENS, -1)[:, widths[0] :],
        }
        own = {name: x.clone() for name, x in rows.items()}
        expected = call(op, arguments | own | {"kv_cache": apart.clone()})
        assert all(map(torch.equal, call(op, arguments | rows | {"kv_cache": cache}), expected))


@pytest.mark.parametrize("op", sorted(CALLS))
def test_empty_calls_of_a_known_signature_give_empty_results(op: str) -> None:
    arguments = PUBLIC[op](torch.float32)
    rows = {name: x[:0] for name, x in arguments.items() if isinstance(x, Tensor) and x.shape[0] == TOKENS}
    for _ in range(2):
        assert all(x.shape[0] == 0 for x in call(op, copied(arguments) | rows)[: 2 if op in WRITING else 1])
