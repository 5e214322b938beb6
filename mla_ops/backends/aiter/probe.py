"""First use of a decode kernel, in a process of its own: AITER answers what it cannot do by ending the process.

``python -m mla_ops.backends.aiter.probe '{"num_heads": 16, ...}'`` decodes small random inputs on the GPU over
poisoned memory, compares with the reference, and prints a verdict as its last line. A process that ends without it,
whatever its exit code, has failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

__all__ = ["ProbeShape", "probe", "run_probe"]

_POISON_BYTES = 256 << 20
_LENGTHS = (1, 16, 65, 0, 130)


@dataclass(frozen=True)
class ProbeShape:
    """What to decode.

    Attributes:
        num_heads, query_len: of the queries.
        page_size: of the cache.
        splits: of each request's keys; 0 for the backend's choice.
    """

    num_heads: int
    query_len: int = 1
    page_size: int = 16
    splits: int = 0


def probe(shape: ProbeShape, device: str = "cuda") -> None:
    """Decode on ``device`` and compare.

    Raises:
        AssertionError: the numbers are wrong; says where.
    """
    import mla_ops
    from mla_ops.testing import assert_matches, make_decode_inputs

    inputs = make_decode_inputs(
        _LENGTHS,
        num_heads=shape.num_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        query_lens=shape.query_len,
        page_size=shape.page_size,
        dtype=torch.bfloat16,
        softmax_scale=192**-0.5,
        device=device,
    )
    # Past the end of a request the kernels give slot 0 the weight 0.
    inputs.kv_cache[0].nan_to_num_()
    inputs = inputs._replace(q=inputs.q[: len(_LENGTHS) * shape.query_len].contiguous())
    # What the allocator hands out next holds NaN: an element that is not written shows.
    poison = torch.full((_POISON_BYTES // 4,), torch.nan, device=device)
    del poison
    out, lse = mla_ops.mla_decode(**inputs.arguments(), num_kv_splits=shape.splits, backend="aiter")
    exact = inputs.arguments() | {"q": inputs.q.double(), "kv_cache": inputs.kv_cache.double()}
    expected, expected_lse = mla_ops.mla_decode(**exact, backend="reference")
    low, _ = mla_ops.mla_decode(**inputs.arguments(), backend="reference")
    assert_matches(out, expected, low_precision=low)
    assert_matches(lse, expected_lse, factor=16.0)


def run_probe(shape: ProbeShape, *, timeout: float = 600.0, command: tuple[str, ...] | None = None) -> None:
    """Probe in another process.

    Args:
        shape: what to decode.
        timeout: seconds; a first use may load and compile.
        command: what runs the probe, called with the shape as JSON.

    Raises:
        RuntimeError: it failed, ended without a verdict, or did not end.
    """
    command = command or (sys.executable, "-m", "mla_ops.backends.aiter.probe")
    try:
        done = subprocess.run(
            [*command, json.dumps(asdict(shape))], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the probe of {shape} did not end within {timeout:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or lines[-1] != _verdict(shape):
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"the probe of {shape} ended with exit code {done.returncode} and no good verdict\n{tail}")


def _verdict(shape: ProbeShape) -> str:
    return json.dumps({"probe": asdict(shape), "ok": True}, sort_keys=True)


if __name__ == "__main__":
    asked = ProbeShape(**json.loads(sys.argv[1]))
    probe(asked)
    print(_verdict(asked))
