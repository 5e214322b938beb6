# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the Hopper kernels share, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["LN_2", "barrier", "copy_async", "reinterpret", "signal", "weigh", "zero"]

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)

# Triton 3.9 renamed all three.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def signal(bar):
    """Arrive once for the warpgroup, behind all that its warps have done."""
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def weigh(scores, key, visible, m, l, qk_scale, MASKED: gl.constexpr):
    """Online softmax: the weights of a block, the factor of what was summed before, the new maximum and sum."""
    if MASKED:
        scores = gl.where(key[None, :] < visible[:, None], scores, -float("inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    # a row that sees no key yet has -inf here, and -inf - -inf is NaN
    shift = gl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(scores * qk_scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def zero():
    """0, of which the compiler cannot know that it is 0 each time.

    Added to an index in a loop it keeps the descriptors of all matrix instructions from being computed ahead of the
    loop, where they do not fit into the registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
