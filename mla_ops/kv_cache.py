"""The paged latent cache: one tensor per layer, one page list per sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from mla_ops.config import MLAConfig
from mla_ops.errors import OutOfPagesError

__all__ = ["PagedLatentCache"]


class PagedLatentCache:
    """Latent rows of all layers in pages, and who owns which page.

    Each layer has a tensor of its own: kernels with 32-bit offsets limit the size of one tensor, and a write to
    one layer can never look like a write to another. A page id means the same page in every layer.

    Args:
        config: dimensions.
        num_layers: layers.
        num_pages: pages per layer.
        page_size: rows per page.
        dtype: of the rows; an fp8 dtype needs ``kv_scale`` in the ops.
        device: of the rows and of the block tables.

    Attributes:
        layers: ``num_layers`` tensors ``[num_pages, page_size, latent_dim]``.

    Raises:
        ValueError: a size below 1; the message names it.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_layers", num_layers), ("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (num_pages, page_size, config.latent_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    def length(self, sequence: Hashable) -> int:
        """Rows of a sequence."""
        return self._lengths[self._known(sequence)]

    def allocate(self, sequence: Hashable, num_tokens: int) -> None:
        """Start a sequence with room for ``num_tokens`` rows.

        Raises:
            ValueError: the sequence has been started already, or a negative length.
            OutOfPagesError: too few free pages; nothing has changed.
        """
        if sequence in self._pages:
            raise ValueError(f"sequence {sequence!r} is in the cache already; extend it, or free it first")
        self._grow(sequence, num_tokens)

    def extend(self, sequence: Hashable, num_tokens: int = 1) -> None:
        """Make room for ``num_tokens`` more rows of a sequence.

        Raises:
            KeyError: no such sequence.
            OutOfPagesError: too few free pages; nothing has changed.
        """
        self._grow(self._known(sequence), num_tokens)

    def free(self, sequence: Hashable) -> None:
        """Give a sequence's pages back.

        Raises:
            KeyError: no such sequence.
        """
        self._free.extend(reversed(self._pages.pop(self._known(sequence))))
        del self._lengths[sequence]

    def block_table(self, sequences: Sequence[Hashable], width: int | None = None) -> Tensor:
        """``[B, width]`` int32 page ids of each sequence, filled up with 0.

        Args:
            sequences: B of them.
            width: columns; the most pages of any of them where ``None``.

        Raises:
            KeyError: no such sequence.
            ValueError: a sequence has more than ``width`` pages.
        """
        pages = [self._pages[self._known(sequence)] for sequence in sequences]
        longest = max(map(len, pages), default=0)
        if width is None:
            width = longest
        elif longest > width:
            raise ValueError(f"width must be at least {longest} (the most pages of a sequence), got {width}")
        table = torch.tensor([[*row, *[0] * (width - len(row))] for row in pages], dtype=torch.int32)
        return table.reshape(len(pages), width).to(self.layers[0].device)

    def seq_lens(self, sequences: Sequence[Hashable]) -> Tensor:
        """``[B]`` int32 rows of each sequence.

        Raises:
            KeyError: no such sequence.
        """
        return torch.tensor([self.length(sequence) for sequence in sequences], dtype=torch.int32).to(
            self.layers[0].device
        )

    def _known(self, sequence: Hashable) -> Hashable:
        if sequence not in self._pages:
            raise KeyError(f"sequence {sequence!r} is not in the cache; allocate it first")
        return sequence

    def _grow(self, sequence: Hashable, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        length = self._lengths.get(sequence, 0) + num_tokens
        needed = -(-length // self.page_size) - len(self._pages.get(sequence, ()))
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free))
        self._pages.setdefault(sequence, []).extend(self._free.pop() for _ in range(needed))
        self._lengths[sequence] = length
