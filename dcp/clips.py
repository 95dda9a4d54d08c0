"""Clips and the buckets they go to: shapes of images and videos.

A *clip* has a height, a width and a number of frames. A *bucket* is one shape, a resolution and a
number of frames, to which clips are brought before they are trained on. Each clip goes to the
highest resolution that it fills and that keeps it; what a bucket does not keep cascades to lower
ones. Where a clip lands is a pure function of (seed, epoch, clip), so every rank knows it of all
clips without a word.
"""

from __future__ import annotations

import csv
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp._dcp import ArgumentError, DTypeError, FileError, UnsupportedError
from dcp.config import suggest
from dcp.cost import whole

__all__ = ["SIZES", "Bucket", "Buckets", "Clips", "Latent", "words"]

SIZES: Mapping[str, tuple[int, int]] = {
    "144p": (144, 256),
    "240p": (240, 426),
    "256": (256, 256),
    "360p": (360, 640),
    "480p": (480, 854),
    "512": (512, 512),
    "720p": (720, 1280),
    "768": (768, 768),
    "1024": (1024, 1024),
    "1080p": (1080, 1920),
    "2k": (1440, 2560),
    "2048": (2048, 2048),
    "4k": (2160, 3840),
}
"""(height, width) of the resolutions that need no `size`; case does not matter."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """How a clip becomes tokens: what the encoder keeps, cut into patches.

    Attributes
    ----------
    frames : tuple of two ints
        (a, b): f frames become ``max(1, f * a // b)`` latent frames.
    size : tuple of two ints
        Pixels of height and of width for each latent row and column, rounded down.
    patch : tuple of three ints
        Latent frames, rows and columns of a token, rounded up.
    extra_tokens : int
        Tokens of every clip beside these, for example of its text.

    Examples
    --------
    >>> from dcp.clips import Latent
    >>> Latent().tokens(51, 480, 854)
    23850
    """

    frames: tuple[int, int] = (5, 17)
    size: tuple[int, int] = (8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)
    extra_tokens: int = 0

    def __post_init__(self) -> None:
        for name, count in (("frames", 2), ("size", 2), ("patch", 3)):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or len(value) != count:
                raise ArgumentError(f"latent.{name} = {value!r} must be {count} integers")
            whole_ones = tuple(whole(f"latent.{name}", v, 1) for v in value)
            object.__setattr__(self, name, whole_ones)
        whole("latent.extra_tokens", self.extra_tokens, 0)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a clip of this shape.

        Examples
        --------
        >>> from dcp.clips import Latent
        >>> Latent(patch=(1, 1, 1)).tokens(1, 80, 160)
        200
        """
        latent = (
            max(1, frames * self.frames[0] // self.frames[1]),
            height // self.size[0],
            width // self.size[1],
        )
        count = 1
        for extent, patch in zip(latent, self.patch, strict=True):
            count *= -(-extent // patch)
        return count + self.extra_tokens


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One shape.

    Attributes
    ----------
    resolution : str
    height, width, frames : int
        What a clip of this bucket is brought to.
    keep : float
        Share of the clips that come here which stay; the others go on to lower resolutions.
    batch : int
        Most clips of one micro-batch.
    tokens : int
        Of each clip.
    """

    resolution: str
    height: int
    width: int
    frames: int
    keep: float
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """For people, for example ``480p x 51``.

        Examples
        --------
        >>> from dcp.clips import Buckets
        >>> [bucket.name for bucket in Buckets({"480p": {51: (1.0, 8)}})]
        ['480p x 51']
        """
        return f"{self.resolution} x {self.frames}"


class Clips:
    """The shapes of the clips of a data set, in its order.

    Parameters
    ----------
    heights, widths, frames : array_like of int, shape (clips,)
        In pixels and frames, each >= 1; an image has one frame.
    name : str
        For messages.

    Raises
    ------
    dcp.DTypeError
        Not integers.
    dcp.ArgumentError
        Sizes that do not agree, or a value below 1; names the first.

    Examples
    --------
    >>> from dcp.clips import Clips
    >>> len(Clips([720, 480], [1280, 854], [51, 1]))
    2
    """

    def __init__(
        self,
        heights: ArrayLike,
        widths: ArrayLike,
        frames: ArrayLike,
        *,
        name: str = "clips",
    ) -> None:
        self.name = name
        arrays = []
        for what, values in (("heights", heights), ("widths", widths), ("frames", frames)):
            array = np.asarray(values)
            if array.ndim != 1:
                raise ArgumentError(f"{name}: {what} must be 1-D, got {array.ndim} dimensions")
            if array.size and array.dtype.kind not in "iu":
                raise DTypeError(f"{name}: {what} must be integers, got {array.dtype}")
            wrong = np.flatnonzero((array < 1) | (array > np.iinfo(np.int32).max))
            if len(wrong):
                at = int(wrong[0])
                raise ArgumentError(
                    f"{name}: {what}[{at}] = {int(array[at])} must lie in 1..2^31 - 1"
                )
            arrays.append(array.astype(np.int64))
        if len({len(array) for array in arrays}) > 1:
            raise ArgumentError(
                f"{name}: heights, widths and frames must agree, got "
                f"{', '.join(str(len(array)) for array in arrays)} of them"
            )
        self.heights, self.widths, self.frames = arrays

    @classmethod
    def read_csv(cls, path: str | Path) -> Clips:
        """Read a table with the columns `height`, `width` and `frames` (or `num_frames`).

        Other columns are left alone. A row is a clip; numbers are counted from 0.

        Raises
        ------
        dcp.FileError
            The file cannot be read or lacks a column.
        dcp.ArgumentError
            A value is no integer >= 1; names the line.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> from dcp.clips import Clips
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "clips.csv")
        >>> _ = file.write_text("path,num_frames,height,width\\na.mp4,51,480,854\\n")
        >>> Clips.read_csv(file).frames.tolist()
        [51]
        >>> folder.cleanup()
        """
        columns: dict[str, list[int]] = {"height": [], "width": [], "frames": []}
        try:
            with open(path, newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                given = {(n or "").strip().lower(): n for n in rows.fieldnames or ()}
                given.setdefault("frames", given.get("num_frames", ""))
                missing = [name for name in columns if not given.get(name)]
                if missing:
                    raise FileError(f"{path} lacks the column {missing[0]!r}")
                for row in rows:
                    for name, values in columns.items():
                        text = str(row[given[name]] or "").strip()
                        if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
                            raise ArgumentError(
                                f"{path}, line {rows.line_num}: {name} = {text!r} must be an "
                                "integer >= 1"
                            )
                        values.append(int(text))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"{path} cannot be read: {error}") from error
        return cls(columns["height"], columns["width"], columns["frames"], name=str(path))

    def __len__(self) -> int:
        return len(self.frames)

    def fingerprint(self) -> str:
        """A short hash: equal for the same clips in the same order.

        Examples
        --------
        >>> from dcp.clips import Clips
        >>> Clips([9], [9], [1]).fingerprint() == Clips([9], [9], [2]).fingerprint()
        False
        """
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.heights, self.widths, self.frames):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()


class Buckets:
    """The buckets of a run, from the highest resolution and the most frames down.

    Parameters
    ----------
    table : mapping
        ``{resolution: {frames: (keep, batch)}}``; a resolution that is not in `SIZES` has its
        `size` (height, width) beside the frames.
    latent : Latent
        How many tokens a shape has.

    Raises
    ------
    dcp.ArgumentError
        An unknown resolution, a keep probability outside 0..1, a batch below 1; names the bucket.
    dcp.UnsupportedError
        A keep probability of two numbers.

    Examples
    --------
    >>> from dcp.clips import Buckets, Clips
    >>> buckets = Buckets({"480p": {1: (1.0, 32), 51: (1.0, 4)}, "720p": {51: (0.5, 2)}})
    >>> [bucket.name for bucket in buckets]
    ['720p x 51', '480p x 51', '480p x 1']
    >>> clips = Clips([1080, 480, 100], [1920, 854, 100], [60, 1, 60])
    >>> buckets.assign(clips, seed=0, epoch=0)[1:].tolist()  # -1: no bucket takes it
    [2, -1]
    """

    def __init__(self, table: Mapping[str, Mapping[Any, Any]], *, latent: Latent | None = None):
        self.latent = latent or Latent()
        if not isinstance(table, Mapping):
            raise ArgumentError(f"buckets = {table!r} must be a table")
        found: list[Bucket] = []
        for resolution, row in table.items():
            if not isinstance(row, Mapping):
                raise ArgumentError(f"buckets.{resolution} = {row!r} must be a table")
            height, width = _size(str(resolution), row.get("size"))
            found += [
                self._bucket(str(resolution), height, width, frames, setting)
                for frames, setting in row.items()
                if frames != "size"
            ]
        if not found:
            raise ArgumentError("buckets: there is none")
        found.sort(key=lambda b: (-b.height * b.width, b.resolution, -b.frames))
        shapes: dict[tuple[int, int, int], str] = {}
        for bucket in found:
            other = shapes.setdefault((bucket.height, bucket.width, bucket.frames), bucket.name)
            if other != bucket.name or sum(b.name == bucket.name for b in found) > 1:
                raise ArgumentError(f"buckets: {other} and {bucket.name} are one shape")
        self._buckets = found

    def _bucket(
        self, resolution: str, height: int, width: int, frames: Any, setting: Any
    ) -> Bucket:
        text = str(frames)
        where = f"buckets.{resolution}.{text}"
        if not text.isdecimal() or int(text) < 1:
            raise ArgumentError(f"{where}: the key must be a number of frames >= 1, or size")
        if not isinstance(setting, list | tuple) or len(setting) != 2:
            raise ArgumentError(f"{where} = {setting!r} must be [keep probability, batch]")
        keep, batch = setting
        if isinstance(keep, list | tuple):
            raise UnsupportedError(
                f"{where}: a keep probability of two numbers, {list(keep)}; give one"
            )
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0.0 <= keep <= 1.0:
            raise ArgumentError(f"{where}: keep probability {keep!r} must lie in 0..1")
        return Bucket(
            resolution=resolution,
            height=height,
            width=width,
            frames=int(text),
            keep=float(keep),
            batch=whole(f"{where}: batch", batch, 1),
            tokens=self.latent.tokens(int(text), height, width),
        )

    @classmethod
    def load(cls, path: str | Path) -> Buckets:
        """Read buckets from TOML: tables ``[buckets."480p"]`` and, optionally, ``[latent]``.

        Raises
        ------
        dcp.FileError
            The file cannot be read or is no TOML.
        dcp.ArgumentError, dcp.UnsupportedError
            As `Buckets`; names the file.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> from dcp.clips import Buckets
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "video.toml")
        >>> _ = file.write_text('''
        ... [buckets."480p"]
        ... 1 = [1.0, 16]     # frames = [keep probability, clips of a micro-batch at most]
        ... 51 = [0.5, 4]
        ... [buckets.square]
        ... size = [96, 96]
        ... 1 = [1.0, 64]
        ... [latent]
        ... patch = [1, 2, 2]
        ... ''')
        >>> [(bucket.name, bucket.tokens) for bucket in Buckets.load(file)]
        [('480p x 51', 23850), ('480p x 1', 1590), ('square x 1', 36)]
        >>> folder.cleanup()
        """
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise FileError(f"{path} is not TOML: {error}") from error
        try:
            return cls.from_dict(tree)
        except (ArgumentError, UnsupportedError) as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Buckets:
        """Make buckets of what the TOML file holds.

        Examples
        --------
        >>> from dcp.clips import Buckets
        >>> len(Buckets.from_dict({"buckets": {"144p": {"1": [1.0, 8]}}}))
        1
        """
        for key in tree:
            if key not in ("buckets", "latent"):
                raise ArgumentError(f"unknown table {key!r}{suggest(key, ('buckets', 'latent'))}")
        settings = tree.get("latent", {})
        if not isinstance(settings, Mapping):
            raise ArgumentError(f"latent = {settings!r} must be a table")
        names = tuple(Latent.__dataclass_fields__)
        for key in settings:
            if key not in names:
                raise ArgumentError(f"unknown key 'latent.{key}'{suggest(key, names)}")
        latent = Latent(**settings)
        return cls(tree.get("buckets", {}), latent=latent)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def fingerprint(self) -> str:
        """A short hash of everything that decides where clips go.

        Examples
        --------
        >>> from dcp.clips import Buckets
        >>> one, two = (Buckets({"144p": {1: (keep, 8)}}) for keep in (1.0, 0.5))
        >>> one.fingerprint() == two.fingerprint()
        False
        """
        return hashlib.blake2b(repr(self._buckets).encode(), digest_size=8).hexdigest()

    def fits(self, clips: Clips) -> NDArray[np.bool_]:
        """Which clips each bucket would take, probabilities aside.

        A clip fits a resolution that has no more pixels than itself. Of its buckets it takes the
        one with most frames that it can fill; an image goes to buckets of one frame, a video to
        the others.

        Returns
        -------
        ndarray of bool, shape (buckets, clips)

        Examples
        --------
        >>> from dcp.clips import Buckets, Clips
        >>> buckets = Buckets({"144p": {1: (1.0, 8), 16: (1.0, 8), 51: (1.0, 8)}})
        >>> buckets.fits(Clips([144, 144, 144, 144], [256] * 4, [1, 15, 50, 90])).tolist()
        [[False, False, False, True], [False, False, True, False], [True, False, False, False]]
        """
        area = clips.heights * clips.widths
        out = np.zeros((len(self), len(clips)), bool)
        taken: dict[str, NDArray[np.bool_]] = {}  # by resolution
        for i, bucket in enumerate(self._buckets):
            before = taken.setdefault(bucket.resolution, np.zeros(len(clips), bool))
            right = clips.frames == 1 if bucket.frames == 1 else clips.frames >= bucket.frames
            out[i] = right & (area >= bucket.height * bucket.width) & ~before
            before |= out[i]
        return out

    def assign(self, clips: Clips, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The bucket of every clip in an epoch: a pure function of (seed, epoch, clip).

        Returns
        -------
        ndarray of int64, shape (clips,)
            Index of a bucket; -1 where none takes the clip.

        Examples
        --------
        See `Buckets`.
        """
        fits = self.fits(clips)
        # one word a (clip, bucket) of the counter-based generator, away from the orders' words
        drawn = words(seed, epoch, 1, len(clips) * len(self)).reshape(len(clips), len(self))
        out = np.full(len(clips), -1, np.int64)
        for i, bucket in enumerate(self._buckets):
            draw = (drawn[:, i] >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
            out[fits[i] & (draw < bucket.keep) & (out < 0)] = i
        return out

    def __repr__(self) -> str:
        return f"<dcp.buckets.Buckets {', '.join(b.name for b in self._buckets)}>"


def _size(resolution: str, given: Any) -> tuple[int, int]:
    if given is None:
        if resolution.lower() not in SIZES:
            raise ArgumentError(
                f"buckets.{resolution}: unknown resolution, give its size = [height, width]"
                f"{suggest(resolution.lower(), SIZES)}"
            )
        return SIZES[resolution.lower()]
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ArgumentError(f"buckets.{resolution}.size = {given!r} must be [height, width]")
    height, width = (whole(f"buckets.{resolution}.size", v, 1, 1 << 20) for v in given)
    return height, width


def words(seed: int, epoch: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Raw words of Philox, a generator that NumPy keeps for good; `stream` tells uses apart.

    Examples
    --------
    >>> from dcp.clips import words
    >>> bool((words(1, 0, 0, 2) == words(1, 0, 0, 3)[:2]).all()), len(words(1, 0, 1, 5))
    (True, 5)
    """
    generator = np.random.Philox(key=seed + (epoch << 64), counter=stream << 192)
    return np.asarray(generator.random_raw(count), np.uint64)
