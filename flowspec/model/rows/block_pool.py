"""KV rows in blocks: which block of a stage is whose, and how many of its texts share it.

A block has room for ``BLOCK_ROWS`` rows in all layers of a stage. A job's rows lie in the blocks of
its table (``paged``). Blocks are counted by reference: a kept beginning and the jobs that begin
with it have the same ones. A block of several references is never written; who has to gets a copy.
"""

from __future__ import annotations

from flowspec.core.run.limits import BLOCK_ROWS
from flowspec.errors import StateError

#: Blocks that a text has a claim to, as long as there are others.
RANGE = 8


class BlockPool:
    """The references to each of ``blocks`` blocks."""

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._free = blocks

    def __len__(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that nothing refers to."""
        return self._free

    @property
    def shared(self) -> int:
        """Blocks of more than one reference."""
        return sum(count > 1 for count in self._references)

    def take(self, after: int | None) -> int:
        """A free block, now of one reference: the one behind ``after`` if possible.

        Rows of neighbouring blocks are read without a copy. So a text goes on at the first
        ``RANGE`` free blocks in a row, where others leave it room to grow. The lowest ones come
        first, as memory pages that were never written cost nothing. StateError as from ``require``.
        """
        self.require(1)
        following = len(self) if after is None else after + 1
        block = following if self._is_free(following) else self._roomy()
        self._references[block] = 1
        self._free -= 1
        return block

    def require(self, blocks: int) -> None:
        """StateError unless ``blocks`` blocks are free."""
        if blocks > self._free:
            raise StateError(
                f"{blocks} blocks of {BLOCK_ROWS} KV rows are needed, and {self._free} of "
                f"{len(self)} are free; run fewer jobs, or give the pipeline more by --most-rows"
            )

    def _is_free(self, block: int) -> bool:
        return block < len(self._references) and not self._references[block]

    def _roomy(self) -> int:
        """The first free block of those that have only free ones behind them, or of all."""
        counts = self._references
        for first in range(0, len(counts), RANGE):
            if not any(counts[first : first + RANGE]):
                return first
        return counts.index(0)

    def share(self, block: int) -> None:
        """Count another reference to ``block``, which has one."""
        self._references[block] += 1

    def drop(self, block: int) -> None:
        """Count a reference less."""
        self._references[block] -= 1
        self._free += not self._references[block]

    def is_shared(self, block: int) -> bool:
        """Whether ``block`` has more than one reference."""
        return self._references[block] > 1
