"""A profile that tools for one GPU print: the largest batch that fits, by length.

NeMo's OOMptimizer and its like measure, for some lengths, how many sequences of that length one
device holds. The table says how many of any length up to its last one fit, and what a micro-batch
may hold in tokens, which `dcp.plan` takes as ``max_tokens``.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from dcp._dcp import ArgumentError
from dcp.cost import whole

__all__ = ["BatchTable"]


@dataclass(frozen=True)
class BatchTable:
    """Largest batch by length, measured.

    Attributes
    ----------
    lengths : tuple of int
        Ascending, in tokens.
    batches : tuple of int
        Sequences of that length that one device holds, each >= 1.

    Raises
    ------
    dcp.ArgumentError
        Lengths that do not ascend, counts below 1, or nothing at all.

    Examples
    --------
    >>> from dcp.batch_table import BatchTable
    >>> table = BatchTable.parse("100:203 196:101 334:58")
    >>> table.batch(101), table.batch(196), table.max_tokens
    (101, 101, 19372)
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.batches):
            raise ArgumentError(
                f"{len(self.lengths)} lengths and {len(self.batches)} batches: a table needs as "
                "many of both, and at least one"
            )
        for i, (length, batch) in enumerate(zip(self.lengths, self.batches, strict=True)):
            whole(f"lengths[{i}]", length, 1)
            whole(f"batches[{i}]", batch, 1)
            if i > 0 and length <= self.lengths[i - 1]:
                raise ArgumentError(
                    f"lengths[{i}] = {length} must be more than the one before, "
                    f"{self.lengths[i - 1]}"
                )

    @classmethod
    def parse(cls, text: str) -> BatchTable:
        """Read ``length:batch`` pairs, separated by blanks.

        Examples
        --------
        >>> from dcp.batch_table import BatchTable
        >>> BatchTable.parse("8:4 16:2").lengths
        (8, 16)
        """
        pairs = []
        for word in text.split():
            length, colon, batch = word.partition(":")
            if not colon or not length.isdecimal() or not batch.isdecimal():
                raise ArgumentError(f"{word!r} must be length:batch, two whole numbers")
            pairs.append((int(length), int(batch)))
        return cls(tuple(length for length, _ in pairs), tuple(batch for _, batch in pairs))

    def batch(self, length: int) -> int:
        """Sequences of `length` tokens that fit: those of the next longer length measured.

        Raises
        ------
        dcp.ArgumentError
            Longer than anything that was measured.

        Examples
        --------
        See `BatchTable`.
        """
        at = bisect.bisect_left(self.lengths, whole("length", length, 1))
        if at == len(self.lengths):
            raise ArgumentError(
                f"length = {length} is beyond what was measured, {self.lengths[-1]} tokens at most"
            )
        return self.batches[at]

    @property
    def max_tokens(self) -> int:
        """Tokens that a micro-batch may have whatever its lengths: the least length x batch.

        Examples
        --------
        See `BatchTable`.
        """
        return min(n * b for n, b in zip(self.lengths, self.batches, strict=True))
