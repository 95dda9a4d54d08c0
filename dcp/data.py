"""Data sets: documents as runs of tokens.

A data set is a list of *documents*, each cut by the policy for long ones into *pieces* of at most
`max_length` tokens. A piece is what is trained on as one sequence; nothing attends across its
borders, and its last token has no target. Tokens stay in their narrow form (bytes, memory maps)
until a micro-batch asks for them.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp._dcp import ArgumentError, DTypeError, FileError, UnsupportedError
from dcp.cost import whole

__all__ = [
    "Documents",
    "Packed",
    "Stats",
    "TextFiles",
    "TokenFiles",
    "offsets_from_positions",
    "token_files",
]

IGNORED = -100  # label of a position that is not trained on
Long = Literal["split", "drop", "error"]
IntArray = NDArray[np.signedinteger[Any]] | NDArray[np.unsignedinteger[Any]]

_ENCODE = 1 << 22  # bytes of text given to a tokenizer at once
_SCAN = 1 << 22  # tokens looked at together when a file's range is taken
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Stats:
    """What a data set found.

    Attributes
    ----------
    documents : int
        Documents with at least one token.
    empty : int
        Documents without a token, left out.
    longer_than_max : int
        Documents longer than `max_length`.
    split : int
        Of these, cut into pieces.
    dropped : int
        Of these, left out.
    pieces : int
        Sequences to train on.
    tokens : int
        Their tokens.

    Examples
    --------
    >>> import dcp
    >>> dcp.data.Packed([1, 2, 3, 4], [0, 3, 3, 4], max_length=2).stats.split
    1
    """

    documents: int
    empty: int
    longer_than_max: int
    split: int
    dropped: int
    pieces: int
    tokens: int


class Documents:
    """Documents that lie in arrays of tokens: the base of every data set.

    Parameters
    ----------
    sources : sequence of 1-D integer arrays
        Tokens; kept, not copied; may be read-only memory maps.
    source, start, length : arrays of int64, shape (documents,)
        Array, first token and number of tokens of each document.
    max_length : int
        Most tokens of a piece, >= 1.
    long : {"split", "drop", "error"}
        What to do with longer documents.
    labels : sequence of 1-D integer arrays, optional
        Target of each token, one array for each of `sources`; -100: not trained on. Default: the
        next token of the piece.
    name : str
        For messages.
    vocab_size : int
        Above every token and label.

    Attributes
    ----------
    lengths : ndarray of int64, shape (pieces,)
        Tokens of each piece.
    trainable : ndarray of int64, shape (pieces,)
        Of these, with a target.
    document : ndarray of int64, shape (pieces,)
        The document that each piece is of.
    stats : Stats
    vocab_size : int
        Largest token or label + 1.

    Examples
    --------
    >>> import numpy as np
    >>> from dcp import data
    >>> text = np.frombuffer(b"hello world", np.uint8)
    >>> documents = data.Documents([text], [0, 0], [0, 6], [5, 5], max_length=3)
    >>> documents.lengths.tolist(), documents.document.tolist()
    ([3, 2, 3, 2], [0, 0, 1, 1])
    """

    def __init__(
        self,
        sources: Sequence[IntArray],
        source: ArrayLike,
        start: ArrayLike,
        length: ArrayLike,
        *,
        max_length: int = 4096,
        long: Long = "split",
        labels: Sequence[IntArray] | None = None,
        name: str = "data",
        vocab_size: int = 256,
    ) -> None:
        if long not in ("split", "drop", "error"):
            raise ArgumentError(f"long = {long!r} must be 'split', 'drop' or 'error'")
        max_length = whole("max_length", max_length, 1)
        self.name, self.max_length, self.long = name, max_length, long
        self.vocab_size = vocab_size
        self._sources, self._labels = list(sources), None if labels is None else list(labels)
        self._hashes: NDArray[np.uint64] | None = None
        given = [np.asarray(a, np.int64) for a in (source, start, length)]
        filled = given[2] > 0
        self._given = np.flatnonzero(filled)  # number of each document before empty ones left
        self._documents = [a[filled] for a in given]
        self._cut(empty=int(np.count_nonzero(~filled)))
        if self.stats.pieces == 0:
            raise FileError(
                f"{name}: no document with a token of at most {max_length}"
                if self.stats.dropped
                else f"{name}: no document with a token"
            )

    def _cut(self, empty: int) -> None:
        """Cut documents into pieces by the policy."""
        source, start, length = self._documents
        longer = length > self.max_length
        count = int(np.count_nonzero(longer))
        keep = np.arange(len(length))
        if count and self.long == "error":
            first = int(np.flatnonzero(longer)[0])
            raise ArgumentError(
                f"{self._describe(first)} has {length[first]} tokens, more than max_length = "
                f"{self.max_length} ({count} such documents; long='split' or 'drop' accept them)"
            )
        if self.long == "drop":
            keep = keep[~longer]
        pieces = -(-length[keep] // self.max_length)
        self.document = np.repeat(keep, pieces)
        number = np.arange(len(self.document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = number * self.max_length
        self._source = source[self.document]
        self._start = start[self.document] + offset
        self.lengths = np.minimum(length[self.document] - offset, self.max_length)
        self.trainable = self._count_trainable()
        self.stats = Stats(
            documents=len(length),
            empty=empty,
            longer_than_max=count,
            split=count if self.long == "split" else 0,
            dropped=count if self.long == "drop" else 0,
            pieces=len(self.lengths),
            tokens=int(self.lengths.sum()),
        )

    def _describe(self, document: int) -> str:
        """Where a document is, for messages."""
        return f"{self.name}: document {self._given[document]}"

    def _count_trainable(self) -> NDArray[np.int64]:
        if self._labels is None:
            return np.asarray(self.lengths - 1)
        out = np.zeros(len(self.lengths), np.int64)
        for number, labels in enumerate(self._labels):
            mine = np.flatnonzero(self._source == number)
            if len(mine):
                before = np.zeros(len(labels) + 1, np.int64)
                np.cumsum(labels != IGNORED, out=before[1:])
                first = self._start[mine]
                out[mine] = before[first + self.lengths[mine]] - before[first]
        return out

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.lengths)

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"<dcp.data.{type(self).__name__} {self.name}: {s.pieces} sequences of {s.documents} "
            f"documents, {s.tokens} tokens, longest {int(self.lengths.max())}>"
        )

    def write(self, piece: int, tokens: NDArray[np.int32], labels: NDArray[np.int32]) -> None:
        """Write a piece's tokens and labels.

        Parameters
        ----------
        piece : int
        tokens, labels : ndarray of int32, shape (lengths[piece],)
            Written. A label is the target of its position, -100 where there is none.

        Examples
        --------
        >>> import numpy as np
        >>> from dcp import data
        >>> text = data.Packed([5, 6, 7, 8], [0, 3, 4])
        >>> tokens, labels = np.empty((2, 3), np.int32)
        >>> text.write(0, tokens, labels)
        >>> tokens.tolist(), labels.tolist()
        ([5, 6, 7], [6, 7, -100])
        """
        number, first = int(self._source[piece]), int(self._start[piece])
        last = first + int(self.lengths[piece])
        tokens[:] = self._sources[number][first:last]
        if self._labels is not None:
            labels[:] = self._labels[number][first:last]
        else:
            labels[:-1] = tokens[1:]
            labels[-1] = IGNORED

    def document_hashes(self) -> NDArray[np.uint64]:
        """64 bits of each document's tokens, whatever type they are stored in.

        Returns
        -------
        ndarray of uint64, shape (documents,)

        Examples
        --------
        >>> from dcp import data
        >>> a, b, c = data.Packed([5, 6, 5, 6, 7], [0, 2, 4, 5]).document_hashes()
        >>> bool(a == b), bool(a == c)
        (True, False)
        """
        if self._hashes is not None:  # kept: ranks get them with the documents
            return self._hashes
        out = np.empty(len(self._documents[0]), np.uint64)
        rows = zip(*(a.tolist() for a in self._documents), strict=True)
        for i, (source, start, length) in enumerate(rows):
            run = self._sources[source][start : start + length]
            content = run.tobytes() if run.dtype == np.uint8 else _narrow(run)
            digest = hashlib.blake2b(content, digest_size=8).digest()
            out[i] = int.from_bytes(digest, "little")
        out.flags.writeable = False
        self._hashes = out
        return out

    def held_out(self, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split into pieces to train on and pieces held out for evaluation.

        A document's side depends on its content alone: all of its pieces, and all of its copies,
        are on one side, in any order of files and for any seed.

        Parameters
        ----------
        share : float
            About how many of the documents are held out, 0 <= share < 1.

        Returns
        -------
        train, held_out : ndarray of int64
            Numbers of pieces: to train on in order of the data, held out in an order that is
            random but always the same.

        Raises
        ------
        dcp.ArgumentError
            Nothing would be left to train on.

        Examples
        --------
        >>> from dcp import data
        >>> text = data.Packed(range(3000), range(0, 3001, 3))
        >>> train, held_out = text.held_out(0.1)
        >>> len(train) + len(held_out), 50 < len(held_out) < 150
        (1000, True)
        """
        if not 0 <= share < 1:
            raise ArgumentError(f"eval_share = {share!r} must lie in [0, 1)")
        if share == 0:
            return np.arange(len(self)), np.zeros(0, np.int64)
        hashes = self.document_hashes()
        out = hashes.astype(np.float64) < share * 2.0**64
        of_piece = out[self.document]
        train, held = np.flatnonzero(~of_piece), np.flatnonzero(of_piece)
        if len(train) == 0:
            raise ArgumentError(
                f"eval_share = {share} holds out all {len(hashes)} documents of {self.name}: "
                "lower it"
            )
        return train, held[np.argsort(hashes[self.document[held]], kind="stable")]

    def fingerprint(self) -> str:
        """A short hash of the pieces' lengths and places: equal for the same data and options.

        Examples
        --------
        >>> from dcp import data
        >>> one, two = data.Packed([1, 2], [0, 2]), data.Packed([1, 2], [0, 1, 2])
        >>> one.fingerprint() == two.fingerprint()
        False
        """
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.lengths, self.trainable, self._start):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()


def _narrow(run: IntArray) -> bytes:
    """Bytes of tokens that do not depend on their stored type; those of bytes are themselves."""
    if len(run) and int(run.max()) < 256:
        return run.astype(np.uint8).tobytes()
    return run.astype("<i4").tobytes()


class TextFiles(Documents):
    """Text files, a byte a token: ids 0 to 255; or the tokens of a tokenizer.

    Parameters
    ----------
    path : str or Path
        A file (one document), a folder (every file in it and below, in sorted order, one document
        each; names that start with a dot are skipped), or "stdlib": the running Python's standard
        library without `site-packages` and folders named `test` or `tests`, a document a top-level
        definition (a cut before each line that starts with ``def ``, ``class `` or ``async def ``,
        or before the first of its decorators) and what lies between.
    max_length : int
        Most tokens of a sequence.
    long : {"split", "drop", "error"}
        What to do with longer documents: cut into pieces of `max_length`, leave out, or raise. How
        many there were is in `stats`.
    tokenizer : str or Path, optional
        A `tokenizer.json` of the tokenizers library, which must be installed. Each document is
        encoded alone, without special tokens, truncation or padding; bytes that are no UTF-8
        become U+FFFD.

    Raises
    ------
    dcp.FileError
        The path does not exist or cannot be read, or holds no text; names it. So for `tokenizer`.
    dcp.UnsupportedError
        `tokenizer` is given, and the tokenizers library is not installed.

    Examples
    --------
    >>> from dcp import data
    >>> text = data.TextFiles("stdlib", max_length=1024)
    >>> int(text.lengths.max()), text.vocab_size, text.stats.empty >= 0
    (1024, 256, True)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_length: int = 4096,
        long: Long = "split",
        tokenizer: str | Path | None = None,
    ) -> None:
        encode = None if tokenizer is None else _Tokenizer(Path(tokenizer))
        runs: list[bytes] = []
        lengths: list[int] = []
        self._files: list[Path] = []
        firsts: list[int] = []  # number of the first document of each file
        cut = str(path) == "stdlib"
        for file in _stdlib_files() if cut else _text_files(Path(path)):
            content = _read(file)
            self._files.append(file)
            firsts.append(len(lengths))
            runs.append(content)
            lengths.extend(_definitions(content) if cut else [len(content)])
        self._firsts = np.array(firsts, np.int64)
        content = b"".join(runs)
        store: IntArray = np.frombuffer(content, np.uint8)
        if encode is not None:
            store, lengths = encode(content, lengths)
        length = np.array(lengths, np.int64)
        super().__init__(
            [store],
            np.zeros(len(length), np.int64),
            np.cumsum(length) - length,
            length,
            max_length=max_length,
            long=long,
            name=str(path),
            vocab_size=256 if encode is None else encode.vocab_size,
        )

    def _describe(self, document: int) -> str:
        number = int(self._given[document])
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        place = f", document {number - int(self._firsts[file])}" if self.name == "stdlib" else ""
        return f"{self._files[file]}{place}"


class _Tokenizer:
    """A `tokenizer.json`, applied to documents that lie one after the other."""

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UnsupportedError(
                f"tokenizer = {str(file)!r} needs the tokenizers library: pip install tokenizers "
                "(or dcp[text])"
            ) from error
        content = _read(file)
        try:
            self._made = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise FileError(f"{file} cannot be read as a tokenizer.json: {error}") from error
        self._made.no_truncation()
        self._made.no_padding()
        self.vocab_size = int(self._made.get_vocab_size(with_added_tokens=True))

    def __call__(self, content: bytes, lengths: list[int]) -> tuple[IntArray, list[int]]:
        """(tokens of all documents, tokens of each) from their bytes."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        runs, counts = [np.zeros(0, dtype)], []
        texts: list[str] = []
        start = waiting = 0
        for number, length in enumerate(lengths):
            texts.append(content[start : start + length].decode("utf-8", errors="replace"))
            start, waiting = start + length, waiting + length
            if waiting >= _ENCODE or number + 1 == len(lengths):  # so much text at once
                for found in self._made.encode_batch(texts, add_special_tokens=False):
                    runs.append(np.array(found.ids, dtype))
                    counts.append(len(found.ids))
                texts, waiting = [], 0
        return np.concatenate(runs), counts


def _read(file: Path) -> bytes:
    try:
        with open(file, "rb", buffering=0) as handle:
            return handle.read()
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror or error}") from error


def _raise(error: OSError) -> None:
    raise FileError(f"{error.filename} cannot be read: {error.strerror}") from error


def _text_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        count = 0
        for folder, below, names in os.walk(path, onerror=_raise):
            below[:] = sorted(n for n in below if not n.startswith("."))
            for name in sorted(names):
                file = Path(folder, name)
                if not name.startswith(".") and file.is_file():
                    count += 1
                    yield file
        if count == 0:
            raise FileError(f"{path}: the folder holds no text files")
    elif path.exists():
        yield path
    else:
        raise FileError(f"{path}: no such file or folder")


def _stdlib_files() -> Iterator[Path]:
    root = sysconfig.get_paths()["stdlib"]
    folders = []
    for folder, below, names in os.walk(root):
        below[:] = [n for n in below if n not in ("site-packages", "test", "tests")]
        folders.append((folder, sorted(n for n in names if n.endswith(".py"))))
    for folder, names in sorted(folders):
        yield from (Path(folder, name) for name in names)


_CUT = re.compile(rb"\n(?:def |class |async def |@)")
# a decorator up to the line that it decorates: further lines are indented or close a bracket
_DECORATOR = re.compile(rb"@[^\n]*\n(?:[ \t)\]}][^\n]*\n)*")


def _definitions(content: bytes) -> list[int]:
    """Lengths of a module's documents: cut before each top-level definition."""
    cuts, decorator = [0], 0 if content.startswith(b"@") else -1
    for match in _CUT.finditer(content):
        at = match.start() + 1
        belongs = decorator >= 0 and _DECORATOR.fullmatch(content, decorator, at)
        if not belongs:
            cuts.append(at)
        decorator = at if content[at] == ord("@") else -1
    cuts.append(len(content))
    return [b - a for a, b in pairwise(cuts)]


class Packed(Documents):
    """Documents laid one after the other in an array, with the offsets of their borders.

    Parameters
    ----------
    tokens : array_like of int, shape (T,)
        Kept, not copied; a read-only memory map is fine.
    offsets : array_like of int, shape (documents + 1,)
        Starts at 0, ends at T, never decreases.
    labels : array_like of int, shape (T,), optional
        Target of each token, -100 where there is none. Default: the document's next token.
    max_length, long
        As `TextFiles`.

    Raises
    ------
    dcp.DTypeError
        Not integers.
    dcp.ArgumentError
        Offsets that decrease or do not end at T, a negative token, sizes that do not fit.

    Examples
    --------
    >>> from dcp import data
    >>> data.Packed([7, 8, 9, 7, 8], [0, 3, 5]).lengths.tolist()
    [3, 2]
    """

    def __init__(
        self,
        tokens: ArrayLike,
        offsets: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        max_length: int = 4096,
        long: Long = "split",
        name: str = "packed",
    ) -> None:
        array = _integers(tokens, "tokens")
        ends = _check_offsets(_integers(offsets, "offsets"), len(array), "offsets")
        targets = None if labels is None else [_integers(labels, "labels")]
        vocab = _vocab(array, "tokens")
        if targets is not None:
            if len(targets[0]) != len(array):
                raise ArgumentError(
                    f"labels has {len(targets[0])} items, tokens has {len(array)}: they must agree"
                )
            vocab = max(vocab, _vocab(targets[0], "labels", low=IGNORED))
        super().__init__(
            [array],
            np.zeros(len(ends) - 1, np.int64),
            ends[:-1],
            np.diff(ends),
            max_length=max_length,
            long=long,
            labels=targets,
            name=name,
            vocab_size=vocab,
        )


def token_files(path: str | Path) -> list[Path]:
    """The `.npy` files of tokens that a path names: itself, or those of a folder and below.

    Files of offsets and labels beside them do not count. In sorted order; none where the path is
    something else.

    Raises
    ------
    dcp.FileError
        A folder holds other files too; names one.

    Examples
    --------
    >>> from dcp import data
    >>> [str(file) for file in data.token_files("tokens.npy")], data.token_files("stdlib")
    (['tokens.npy'], [])
    """
    given = Path(path)
    if given.suffix == ".npy":
        return [given]
    if not given.is_dir():
        return []
    files = list(_text_files(given))
    arrays = [file for file in files if file.suffix == ".npy"]
    if arrays and len(arrays) < len(files):
        other = next(file for file in files if file.suffix != ".npy")
        raise FileError(f"{path}: holds .npy files of tokens and others, for example {other.name}")
    return [f for f in arrays if not f.name.endswith((".offsets.npy", ".labels.npy"))]


class TokenFiles(Documents):
    """Tokens in `.npy` files, memory-mapped.

    A file holds a 1-D array of an integer type, its documents marked in one of these ways, the
    first that applies: `eos` is given; a file `NAME.offsets.npy` lies beside `NAME.npy` (starts at
    0, ends at the number of tokens); else the whole file is one document. In a 2-D array every row
    is a document. Targets come from `NAME.labels.npy`, of the same shape, where there is one.

    Parameters
    ----------
    paths : str, Path or iterable of them
        Files, in the order of the data.
    eos : int, optional
        Token that ends a document (and belongs to it).
    max_length, long
        As `TextFiles`.

    Raises
    ------
    dcp.FileError
        A file is missing, unreadable or no `.npy` file; names it.
    dcp.DTypeError, dcp.ArgumentError
        Not integers, more than two dimensions, a token outside 0..2**31 - 1, offsets that decrease
        or pass the end; names the file.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib
    >>> from dcp import data
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(folder.name, "a.npy")
    >>> np.save(file, np.array([5, 6, 0, 7, 0], np.uint16))
    >>> data.TokenFiles(file, eos=0).lengths.tolist()
    [3, 2]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        eos: int | None = None,
        max_length: int = 4096,
        long: Long = "split",
    ) -> None:
        files = [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]
        if not files:
            raise ArgumentError("paths is empty: name at least one .npy file")
        self._files = [file.resolve() for file in files]
        parts = [_token_file(file, eos) for file in files]
        if len({labels is None for _, labels, _ in parts}) > 1:
            without = next(f for f, p in zip(files, parts, strict=True) if p[1] is None)
            raise FileError(f"{without}: it has no .labels.npy file, and others have")
        vocab = 1
        labels = []
        for file, (tokens, targets, _) in zip(files, parts, strict=True):
            vocab = max(vocab, _vocab(tokens, str(file)))
            if targets is not None:
                vocab = max(vocab, _vocab(targets, f"{file} (labels)", low=IGNORED))
                labels.append(targets)
        ends = [part[2] for part in parts]
        super().__init__(
            [part[0] for part in parts],
            np.concatenate([np.full(len(e) - 1, i, np.int64) for i, e in enumerate(ends)]),
            np.concatenate([e[:-1] for e in ends]),
            np.concatenate([np.diff(e) for e in ends]),
            max_length=max_length,
            long=long,
            labels=labels or None,
            name=str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more",
            vocab_size=vocab,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the tokens: they are mapped again from the files."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_sources", "_labels")} | {
            "_has_labels": self._labels is not None
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        has_labels = state.pop("_has_labels")
        self.__dict__.update(state)
        self._sources = [_load(file).reshape(-1) for file in self._files]
        beside = [file.with_suffix(".labels.npy") for file in self._files]
        self._labels = [_load(file).reshape(-1) for file in beside] if has_labels else None


def _load(file: Path) -> NDArray[Any]:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileError(f"{file}: no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{file} cannot be read as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise FileError(f"{file} cannot be read as a .npy file: it is an archive of several")
    return array


def _token_file(file: Path, eos: int | None) -> tuple[IntArray, IntArray | None, NDArray[np.int64]]:
    """(tokens, labels, offsets of the documents) of one file."""
    array = _load(file)
    if array.ndim not in (1, 2):
        raise ArgumentError(f"{file}: a 1-D or 2-D array is wanted, got {array.ndim} dimensions")
    tokens = _integers(array.reshape(-1), str(file))
    beside, label_file = file.with_suffix(".offsets.npy"), file.with_suffix(".labels.npy")
    labels = None
    if label_file.exists():
        targets = _load(label_file)
        if targets.shape != array.shape:
            raise ArgumentError(
                f"{label_file}: shape {targets.shape} must be that of {file.name}, {array.shape}"
            )
        labels = _integers(targets.reshape(-1), str(label_file))
    if array.ndim == 2:
        ends = np.arange(array.shape[0] + 1, dtype=np.int64) * array.shape[1]
    elif eos is not None:
        borders = np.flatnonzero(tokens == whole("eos", eos, 0)) + 1
        ends = np.unique(np.concatenate([[0], borders, [len(tokens)]])).astype(np.int64)
    elif beside.exists():
        found = _integers(_load(beside), str(beside))
        ends = _check_offsets(found, len(tokens), str(beside))
    else:
        ends = np.array([0, len(tokens)], np.int64)
    return tokens, labels, ends


def _integers(values: ArrayLike, what: str) -> IntArray:
    """A 1-D integer array, as it is where it is one already."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ArgumentError(f"{what}: a 1-D array is wanted, got {array.ndim} dimensions")
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{what}: integers are wanted, got {array.dtype}")
    return array


def _check_offsets(offsets: IntArray, count: int, what: str) -> NDArray[np.int64]:
    if len(offsets) == 0 or int(offsets[0]) != 0:
        raise ArgumentError(f"{what} must start with 0")
    if int(offsets.max()) > count:
        raise ArgumentError(f"{what} holds {int(offsets.max())}, past the {count} tokens")
    ends = offsets.astype(np.int64)
    wrong = np.flatnonzero(np.diff(ends) < 0)
    if len(wrong):
        i = int(wrong[0])
        raise ArgumentError(f"{what} decreases from {ends[i]} to {ends[i + 1]} at {i + 1}")
    if ends[-1] != count:
        raise ArgumentError(f"{what} ends at {ends[-1]}, there are {count} tokens")
    return ends


def _vocab(array: IntArray, what: str, low: int = 0) -> int:
    """Largest value + 1; an error where one lies outside low..2^31 - 1."""
    largest = 0
    for first in range(0, len(array), _SCAN):
        part = array[first : first + _SCAN]
        smallest, greatest = int(part.min()), int(part.max())
        bad = smallest if smallest < 0 and smallest != low else greatest
        wrong = smallest < 0 and (low == 0 or bool(np.any((part < 0) & (part != low))))
        if wrong or greatest > _INT32_MAX - 1:
            at = first + int(np.flatnonzero((part < 0) & (part != low) | (part == bad))[0])
            rule = "0..2^31 - 2" if low == 0 else f"0..2^31 - 2 or be {low}"
            raise ArgumentError(f"{what}: value {int(array[at])} at {at} must lie in {rule}")
        largest = max(largest, greatest)
    return largest + 1


def offsets_from_positions(
    positions: ArrayLike, *, mask: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Offsets of packed sequences from the position of each token in its sequence.

    A sequence begins where the position does not increase. Real offsets, where there are any, are
    better: a position alone cannot tell trailing padding from sequences of one token.

    Parameters
    ----------
    positions : array_like of int, shape (T,)
    mask : array_like of bool, shape (T,), optional
        False for padding, which must come last; it becomes one trailing segment.

    Returns
    -------
    ndarray of int64, shape (segments + 1,)

    Raises
    ------
    dcp.ArgumentError
        More than one dimension, padding that is not at the end, or a repeated last position
        without a mask.

    Examples
    --------
    >>> from dcp import data
    >>> data.offsets_from_positions([2, 3, 4, 2, 3]).tolist()
    [0, 3, 5]
    >>> data.offsets_from_positions([0, 1, 2, 0, 0, 0], mask=[1, 1, 1, 0, 0, 0]).tolist()
    [0, 3, 6]
    """
    array = _integers(positions, "positions")
    count = len(array)
    real = count
    if mask is not None:
        keep = np.asarray(mask).astype(bool)
        if keep.shape != array.shape:
            raise ArgumentError(f"mask has shape {keep.shape}, positions {array.shape}")
        real = int(np.count_nonzero(keep))
        if not keep[:real].all():
            raise ArgumentError("mask: padding must come after all tokens")
    elif count > 1 and array[-1] == array[-2]:
        raise ArgumentError(
            f"positions end with {int(array[-2])}, {int(array[-1])}: padding or sequences of one "
            "token? pass mask, or use offsets"
        )
    values = array[:real].astype(np.int64)
    starts = np.flatnonzero(np.diff(values) <= 0) + 1
    borders = [[0]] if count else []
    return np.unique(np.concatenate([*borders, starts, [real], [count]])).astype(np.int64)
