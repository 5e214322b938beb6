"""The widths of rows that our Triton kernels serve. Without Triton, which the choice of a backend does not import."""

from __future__ import annotations

__all__ = ["is_served", "split_width"]

_LEAST = 16  # what a matrix instruction takes


def is_served(width: int) -> bool:
    """Whether ``width`` is a power of two that the kernels take as one block."""
    return width >= _LEAST and not width & (width - 1)


def split_width(width: int) -> tuple[int, int] | None:
    """The two widths of blocks, the wider one first, of which ``width`` is the sum; the second 0 where one is enough.

    None where it is no such sum.
    """
    wide = 1 << width.bit_length() >> 1
    narrow = width - wide
    return (wide, narrow) if is_served(wide) and (narrow == 0 or is_served(narrow)) else None
