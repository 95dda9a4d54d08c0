"""Distributions of sequence lengths: where a simulation gets its sequences from.

Named ones state their source; files hold a histogram or a list of lengths. Drawing is a pure
function of the seed, from a stream of random words that NumPy keeps for good.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp._dcp import ArgumentError, DTypeError, FileError
from dcp.cost import whole

__all__ = ["DISTRIBUTIONS", "PAPER", "Distribution", "distribution", "read_lengths"]

LONGEST = 131_072  # tokens; longer draws are cut to it


@dataclass(frozen=True)
class Distribution:
    """How long sequences are.

    Made by `lognormal`, `histogram`, `of_lengths`, or by name or file with `distribution`.

    Attributes
    ----------
    name : str
    source : str
        Where its figures come from.

    Examples
    --------
    >>> from dcp.distributions import Distribution
    >>> short = Distribution.lognormal("mine", 5.5, 0.8)
    >>> lengths = short.sample(1000, seed=1)
    >>> 220 < float(np.median(lengths)) < 270
    True
    """

    name: str
    source: str = ""
    _normal: tuple[float, float, int] | None = None  # of the logarithm, and the longest
    _edges: tuple[int, ...] = field(default=(), repr=False)  # of a histogram, from 0
    _sums: tuple[float, ...] = field(default=(), repr=False)  # of its shares, up to 1
    _lengths: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def lognormal(
        cls, name: str, mean: float, sd: float, *, longest: int = LONGEST, source: str = ""
    ) -> Distribution:
        """Log-normal lengths.

        Parameters
        ----------
        name : str
        mean, sd : float
            Of the natural logarithm of the length.
        longest : int
            Longer draws are cut to it.
        source : str

        Examples
        --------
        >>> from dcp.distributions import Distribution
        >>> int(Distribution.lognormal("x", 9.0, 2.0, longest=4096).sample(100).max())
        4096
        """
        if not math.isfinite(mean) or not math.isfinite(sd) or sd < 0:
            raise ArgumentError(f"log-normal ({mean}, {sd}) needs finite numbers and sd >= 0")
        return cls(name, source, _normal=(mean, sd, whole("longest", longest, 1)))

    @classmethod
    def histogram(
        cls, name: str, uppers: Sequence[int], shares: Sequence[float], *, source: str = ""
    ) -> Distribution:
        """Lengths by bins; inside a bin their logarithms are spread evenly.

        Parameters
        ----------
        name : str
        uppers : sequence of int
            Longest length of each bin, ascending; a bin starts after the one before it.
        shares : sequence of float
            Of all sequences, >= 0; they are scaled to sum to 1.
        source : str

        Examples
        --------
        >>> from dcp.distributions import Distribution
        >>> two = Distribution.histogram("two", [10, 20], [0, 100])
        >>> sample = two.sample(1000)
        >>> int(sample.min()), int(sample.max())
        (11, 20)
        """
        edges = (0, *(whole("upper bound", u, 1) for u in uppers))
        if len(edges) < 2 or len(shares) != len(uppers):
            raise ArgumentError(
                f"histogram {name!r} has {len(uppers)} upper bounds and {len(shares)} shares"
            )
        for low, high in itertools.pairwise(edges):
            if high <= low:
                raise ArgumentError(f"histogram {name!r}: upper bound {high} comes after {low}")
        for share in shares:
            if not math.isfinite(share) or share < 0:
                raise ArgumentError(f"histogram {name!r}: share {share} must be finite and >= 0")
        total = math.fsum(shares)
        if total <= 0:
            raise ArgumentError(f"histogram {name!r}: the shares add up to 0")
        sums = np.cumsum(np.asarray(shares, np.float64) / total)
        sums[-1] = 1.0
        return cls(name, source, _edges=edges, _sums=tuple(sums.tolist()))

    @classmethod
    def of_lengths(cls, name: str, lengths: ArrayLike, *, source: str = "") -> Distribution:
        """Lengths drawn from a list, each as likely as any other, with repetition.

        Examples
        --------
        >>> from dcp.distributions import Distribution
        >>> sorted(set(Distribution.of_lengths("mine", [7, 9]).sample(50).tolist()))
        [7, 9]
        """
        array = _checked_lengths(lengths, name)
        array.flags.writeable = False
        return cls(name, source, _lengths=array)

    def sample(self, count: int, *, seed: int = 0) -> NDArray[np.int64]:
        """Draw lengths; the first of a longer sample of the same seed are the same.

        Parameters
        ----------
        count : int
        seed : int
            0 to 2**64 - 1.

        Returns
        -------
        ndarray of int64, shape (count,)

        Examples
        --------
        >>> from dcp.distributions import distribution
        >>> few, more = (distribution("long").sample(n, seed=3) for n in (5, 9))
        >>> few.tolist() == more[:5].tolist()
        True
        """
        count = whole("count", count, 0)
        key = whole("seed", seed, 0, (1 << 64) - 1)
        words = np.random.Philox(key=key).random_raw(2 * count).reshape(count, 2)
        u = (words[:, 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53  # [0, 1)
        if self._normal is not None:
            mean, sd, longest = self._normal
            v = (words[:, 1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
            z = np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v)  # Box-Muller
            return np.clip(np.exp(mean + sd * z), 1, longest).astype(np.int64)
        if self._lengths is not None:
            return np.asarray(self._lengths[(u * len(self._lengths)).astype(np.int64)])
        sums, edges = np.array([0.0, *self._sums]), np.array(self._edges, np.float64)
        bins = np.clip(np.searchsorted(sums, u, side="right") - 1, 0, len(self._sums) - 1)
        inside = (u - sums[bins]) / (sums[bins + 1] - sums[bins])
        low, high = edges[bins] + 1, edges[bins + 1] + 1
        drawn = np.minimum(low * (high / low) ** inside, high - 1)
        return np.asarray(drawn, np.int64)


_PAPER_SOURCE = "log-normal ({}, {}) of the natural logarithm, cut at 131,072"
PAPER = ("short", "balanced", "long")

DISTRIBUTIONS: dict[str, Distribution] = {
    # the paper's three sets are synthetic and their parameters were not published: these are ours
    **{
        name: Distribution.lognormal(name, mean, sd, source=_PAPER_SOURCE.format(mean, sd))
        for name, mean, sd in (("short", 5.5, 0.8), ("balanced", 7.0, 1.0), ("long", 7.5, 1.6))
    },
    "flexsp-wikipedia": Distribution.lognormal(
        "flexsp-wikipedia",
        5.95,
        1.258,
        source="log-normal with the mean and spread of FlexSP's wikipedia.txt (1M lengths), "
        "PKU-DAIR/Hetu-Galvatron, branch flexsp, cut at 131,072",
    ),
    "magi-documents": Distribution.histogram(
        "magi-documents",
        (10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608),
        (0.22, 2.91, 5.2, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14),
        source="doc_length_distribution.csv (13.46M documents), SandAI-org/MagiAttention",
    ),
}


def distribution(spec: str | os.PathLike[str] | Distribution | ArrayLike) -> Distribution:
    """A distribution by name, from a file or a list of lengths.

    Parameters
    ----------
    spec : str, path, Distribution or array_like of int
        A name of `DISTRIBUTIONS`; a file with a histogram (CSV: upper bound, share; a first line
        of words is a heading) or with lengths (one a line, or .npy); or lengths themselves.

    Returns
    -------
    Distribution

    Raises
    ------
    dcp.ArgumentError
        No such name, with the nearest one; lengths or bins that break a rule.
    dcp.FileError
        The file cannot be read.

    Examples
    --------
    >>> from dcp.distributions import distribution
    >>> distribution("magi-documents").source
    'doc_length_distribution.csv (13.46M documents), SandAI-org/MagiAttention'
    """
    if isinstance(spec, Distribution):
        return spec
    if not isinstance(spec, str | os.PathLike):
        return Distribution.of_lengths("lengths", spec, source="a list")
    if isinstance(spec, str) and spec in DISTRIBUTIONS:
        return DISTRIBUTIONS[spec]
    path = Path(spec)
    if not path.exists():
        near = difflib.get_close_matches(str(spec), DISTRIBUTIONS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(DISTRIBUTIONS)}"
        raise ArgumentError(f"distribution {str(spec)!r} is neither a file nor a name: {hint}")
    if path.suffix == ".csv":
        uppers, shares = _read_histogram(path)
        return Distribution.histogram(path.stem, uppers, shares, source=str(path))
    return Distribution.of_lengths(path.stem, read_lengths(path), source=str(path))


def read_lengths(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """Read lengths from a file: one whole number a line (empty lines do not count), or .npy.

    Raises
    ------
    dcp.ArgumentError
        A length that is no whole number >= 1, with its line; a file without lengths.
    dcp.FileError
        The file cannot be read.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from dcp.distributions import read_lengths
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "lengths.txt")
    ...     _ = file.write_text("512\\n64\\n")
    ...     read_lengths(file).tolist()
    [512, 64]
    """
    path = Path(path)
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise FileError(f"{path} cannot be read: {error}") from error
        return _checked_lengths(array, str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    return parse_lengths(text, str(path))


def parse_lengths(text: str, name: str) -> NDArray[np.int64]:
    """Lengths of a text, one a line, blank lines passed over; `name` is said in errors."""
    lengths = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        try:
            value = int(word)
        except ValueError:
            raise ArgumentError(f"{name}:{number}: {word[:40]!r} is no whole number") from None
        if value < 1:
            rule = "must be >= 1: drop empty sequences before planning"
            raise ArgumentError(f"{name}:{number}: length {value} {rule}")
        if value >= 1 << 63:
            raise ArgumentError(f"{name}:{number}: length {value} does not fit 64 bits")
        lengths.append(value)
    if not lengths:
        raise ArgumentError(f"{name} holds no lengths")
    return np.array(lengths, np.int64)


def _checked_lengths(lengths: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0:
        raise ArgumentError(f"{name} must hold lengths in one dimension, has shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{name} must hold whole numbers, has {array.dtype}")
    wrong = np.flatnonzero((array < 1) | (array > (1 << 62)))
    if wrong.size:
        raise ArgumentError(f"{name}: length {wrong[0]} is {array[wrong[0]]}, must be >= 1")
    return array.astype(np.int64)


def _read_histogram(path: Path) -> tuple[list[int], list[float]]:
    uppers: list[int] = []
    shares: list[float] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if not any(cell.strip() for cell in row):
                    continue
                try:
                    upper, share = (cell.strip().rstrip("%") for cell in row)
                    uppers.append(int(upper))
                    shares.append(float(share))
                except ValueError:
                    if number == 1:  # a heading
                        continue
                    raise ArgumentError(
                        f"{path}:{number}: needs 'upper bound,share', got {','.join(row)[:60]!r}"
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    return uppers, shares
