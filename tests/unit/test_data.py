"""Data sets: what a document is, long ones, labels, held-out documents, bad files."""

from __future__ import annotations

import ast
import itertools
import os
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import data


def read(documents: data.Documents) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of every piece."""
    out = []
    for piece in range(len(documents)):
        tokens, labels = np.empty((2, int(documents.lengths[piece])), np.int32)
        documents.write(piece, tokens, labels)
        out.append((tokens.tolist(), labels.tolist()))
    return out


def stdlib_documents() -> list[bytes]:
    """The definition of `--data stdlib`, line by line."""
    root = sysconfig.get_paths()["stdlib"]
    documents = []
    starts = (b"def ", b"class ", b"async def ", b"@")
    for folder, _, names in sorted(os.walk(root)):
        if {"site-packages", "test", "tests"} & set(Path(folder).relative_to(root).parts):
            continue
        for name in sorted(n for n in names if n.endswith(".py")):
            current, decorated = [], False
            for line in Path(folder, name).read_bytes().split(b"\n"):
                line += b"\n"
                if line.startswith(starts) and not decorated:
                    documents.append(b"".join(current))
                    current = []
                current.append(line)
                # a decorator may go on over lines that are indented or close a bracket
                decorated = line.startswith(b"@") or (
                    decorated and line.startswith((b" ", b"\t", b")", b"]", b"}"))
                )
            documents.append(b"".join(current)[:-1])
    return [d for d in documents if d]


def test_stdlib_is_as_defined() -> None:
    text = data.TextFiles("stdlib", max_length=1 << 30)
    wanted = stdlib_documents()
    assert text.lengths.tolist() == [len(d) for d in wanted]
    for piece in range(0, len(wanted), 97):
        tokens, labels = np.empty((2, len(wanted[piece])), np.int32)
        text.write(piece, tokens, labels)
        assert bytes(tokens.tolist()) == wanted[piece]
    quantiles = np.percentile(text.lengths, [50, 90, 99])
    assert 200 < quantiles[0] < 1000 and quantiles[1] < 8000 and quantiles[2] > 10_000


def test_definitions_are_cut_with_their_decorators(tmp_path: Path) -> None:
    source = (
        b"import os\n@one\n@two(\n    3,\n)\ndef f():\n    @inner\n    def g(): pass\n"
        b"x = 1\nasync def h(): pass\nclass C:\n    pass\n@last\nclass D: pass"
    )
    ast.parse(source)
    lengths = data._definitions(source)
    ends = np.cumsum([0, *lengths])
    parts = [source[a:b] for a, b in itertools.pairwise(ends)]
    assert b"".join(parts) == source
    assert [p.split(b"\n")[0] for p in parts] == [
        b"import os",
        b"@one",
        b"async def h(): pass",
        b"class C:",
        b"@last",
    ]
    assert data._definitions(b"") == [0]
    assert data._definitions(b"def f(): pass\n") == [14]
    assert data._definitions(b"@a\ndef f(): pass\n") == [17]


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_bytes(b"third \xff")
    (tmp_path / "a.txt").write_bytes(b"x")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"no")
    text = data.TextFiles(tmp_path)
    assert [bytes(t) for t, _ in read(text)] == [b"x", b"second", b"third \xff"]
    assert text.stats.documents == 3 and text.stats.empty == 1
    assert text.trainable.tolist() == [0, 5, 6]  # a document of one byte has no target
    assert data.TextFiles(tmp_path / "b.txt").lengths.tolist() == [6]


def test_bad_folders(tmp_path: Path) -> None:
    """Every message names the path."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(dcp.FileError, match="empty"):
        data.TextFiles(tmp_path / "empty")
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "a.txt").touch()
    with pytest.raises(dcp.FileError, match="void"):
        data.TextFiles(tmp_path / "void")
    with pytest.raises(dcp.FileError, match="nowhere"):
        data.TextFiles(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(dcp.FileError, match="loop"):
        data.TextFiles(tmp_path / "loop")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_bytes(b"x")

    def refuse(file: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("builtins.open", refuse)  # root may read every real file
    with pytest.raises(dcp.FileError, match=r"secret\.txt cannot be read: Permission denied"):
        data.TextFiles(tmp_path)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    max_length=st.integers(1, 30),
    long=st.sampled_from(["split", "drop", "error"]),
)
def test_policies_lose_nothing_uncounted(
    lengths: list[int], max_length: int, long: data.Long
) -> None:
    """Split keeps every token in order, drop counts what it leaves out, error says so."""
    tokens = np.arange(sum(lengths))
    offsets = np.cumsum([0, *lengths])
    longer = sum(n > max_length for n in lengths)
    kept = [n for n in lengths if n > 0 and (long != "drop" or n <= max_length)]
    make = lambda: data.Packed(tokens, offsets, max_length=max_length, long=long)  # noqa: E731
    if long == "error" and longer:
        with pytest.raises(dcp.ArgumentError, match=f"max_length = {max_length} "):
            make()
        return
    if not kept:
        with pytest.raises(dcp.FileError, match="no document"):
            make()
        return
    packed = make()
    pieces = read(packed)
    documents = [range(a, b) for a, b in itertools.pairwise(offsets) if b > a]
    wanted = [list(d) for d in documents if long != "drop" or len(d) <= max_length]
    assert [x for t, _ in pieces for x in t] == [x for d in wanted for x in d]
    for piece, (got, labels) in enumerate(pieces):
        assert len(got) <= max_length
        assert labels == [*got[1:], -100]
        assert set(got) <= set(documents[packed.document[piece]])
    stats = packed.stats
    assert stats.longer_than_max == longer == stats.split + stats.dropped
    assert stats.pieces == len(pieces) and stats.tokens == sum(len(d) for d in wanted)
    assert stats.documents == len(documents) and stats.empty == lengths.count(0)


def test_labels_of_the_data() -> None:
    labels = [-100, 3, -100, 9, 4]
    packed = data.Packed([1, 2, 3, 4, 5], [0, 3, 5], labels=labels, max_length=2)
    assert read(packed) == [([1, 2], [-100, 3]), ([3], [-100]), ([4, 5], [9, 4])]
    assert packed.trainable.tolist() == [1, 0, 2]
    assert packed.vocab_size == 10


def test_padding_is_one_segment_without_loss() -> None:
    """Case A-06: 8 real tokens and 24 of padding are two segments, not 25, and padding is free."""
    positions = [*range(8), *[0] * 24]
    with pytest.raises(dcp.ArgumentError, match="mask"):
        data.offsets_from_positions(positions)
    mask = [True] * 8 + [False] * 24
    offsets = data.offsets_from_positions(positions, mask=mask)
    assert offsets.tolist() == [0, 8, 32]
    tokens = np.arange(32)
    labels = np.where(mask, np.arange(1, 33), -100)
    labels[7] = -100
    packed = data.Packed(tokens, offsets, labels=labels)
    assert packed.trainable.tolist() == [7, 0]
    assert read(packed)[0] == ([*range(8)], [*range(1, 8), -100])


@pytest.mark.parametrize(
    ("positions", "offsets"),
    [
        ([2, 3, 4, 2, 3], [0, 3, 5]),
        ([0, 1, 2, 0, 1], [0, 3, 5]),
        ([0, 0, 1], [0, 1, 3]),
        ([5], [0, 1]),
        ([], [0]),
    ],
)
def test_offsets_from_positions(positions: list[int], offsets: list[int]) -> None:
    """Case A-07: a border is where the position does not increase, whatever it starts at."""
    assert data.offsets_from_positions(positions).tolist() == offsets


def test_ambiguous_positions_are_refused() -> None:
    """Case A-07: 3-D positions of one sequence are not packing."""
    with pytest.raises(dcp.ArgumentError, match="3 dimensions"):
        data.offsets_from_positions(np.zeros((3, 1, 5), int))
    with pytest.raises(dcp.ArgumentError, match="padding must come after"):
        data.offsets_from_positions([0, 1, 0], mask=[1, 0, 1])
    with pytest.raises(dcp.ArgumentError, match="shape"):
        data.offsets_from_positions([0, 1], mask=[1])


def test_held_out_documents_keep_together() -> None:
    """By content alone: all pieces and copies of a document on one side, order and seed aside."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 99, n) for n in rng.integers(5, 40, 300)]
    documents += documents[:50]  # copies
    offsets = np.cumsum([0, *map(len, documents)])
    packed = data.Packed(np.concatenate(documents), offsets, max_length=10)
    train, held = packed.held_out(0.2)
    assert sorted([*train, *held]) == list(range(len(packed)))
    side = {}
    for pieces, name in ((train, "train"), (held, "held")):
        for piece in pieces:
            content = documents[packed.document[piece]].tobytes()
            assert side.setdefault(content, name) == name
    assert 0.1 < len(held) / len(packed) < 0.3
    # reversed order, another type: the same documents are held out
    turned = data.Packed(
        np.concatenate(documents[::-1]).astype(np.uint16),
        np.cumsum([0, *map(len, documents[::-1])]),
        max_length=10,
    )
    again = {documents[::-1][turned.document[p]].tobytes() for p in turned.held_out(0.2)[1]}
    assert again == {content for content, name in side.items() if name == "held"}
    with pytest.raises(dcp.ArgumentError, match="eval_share"):
        packed.held_out(1.0)
    with pytest.raises(dcp.ArgumentError, match="all 1 documents"):
        data.Packed([1, 2], [0, 2]).held_out(1 - 1e-12)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", ">i8", "<u8"])
def test_token_files_of_every_integer_type(tmp_path: Path, dtype: str) -> None:
    """Cases E-04, E-05: read-only memory maps of any width and byte order."""
    np.save(tmp_path / "a.npy", np.array([5, 6, 0, 7, 8, 9, 0], dtype))
    np.save(tmp_path / "b.npy", np.array([1, 2], dtype))
    files = data.TokenFiles([tmp_path / "a.npy", tmp_path / "b.npy"], eos=0)
    assert [t for t, _ in read(files)] == [[5, 6, 0], [7, 8, 9, 0], [1, 2]]
    assert files.vocab_size == 10
    assert not files._sources[0].flags.writeable


def test_token_files_offsets_rows_and_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.int32))
    assert data.TokenFiles(tmp_path / "a.npy").lengths.tolist() == [6]
    np.save(tmp_path / "a.offsets.npy", np.array([0, 2, 2, 6], np.uint32))
    assert data.TokenFiles(tmp_path / "a.npy").lengths.tolist() == [2, 4]
    np.save(tmp_path / "a.labels.npy", np.array([9, -100, 1, 1, 1, -100]))
    files = data.TokenFiles(tmp_path / "a.npy", max_length=3)
    assert [x for _, x in read(files)] == [[9, -100], [1, 1, 1], [-100]]
    assert files.vocab_size == 10 and files.trainable.tolist() == [1, 3, 0]
    np.save(tmp_path / "rows.npy", np.ones((3, 4), np.uint16))
    assert data.TokenFiles(tmp_path / "rows.npy").lengths.tolist() == [4, 4, 4]
    np.save(tmp_path / "c.npy", np.arange(3))
    with pytest.raises(dcp.FileError, match=r"c\.npy"):
        data.TokenFiles([tmp_path / "a.npy", tmp_path / "c.npy"])


def test_token_files_travel_without_their_tokens(tmp_path: Path) -> None:
    """A rank gets the places of documents and maps the files itself."""
    np.save(tmp_path / "a.npy", np.arange(100_000, dtype=np.uint32).reshape(100, 1000))
    np.save(tmp_path / "a.labels.npy", np.arange(100_000, dtype=np.int32).reshape(100, 1000) + 1)
    files = data.TokenFiles(tmp_path / "a.npy")
    packet = pickle.dumps(files)
    assert len(packet) < 20_000
    again = pickle.loads(packet)
    assert read(again)[99] == read(files)[99]
    assert again.fingerprint() == files.fingerprint()
    text = data.TextFiles("stdlib")
    assert read(pickle.loads(pickle.dumps(text)))[5] == read(text)[5]


def test_a_document_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"short")
    (tmp_path / "c.txt").write_bytes(b"much too long")
    with pytest.raises(
        dcp.ArgumentError, match=r"c\.txt has 13 tokens, .* max_length = 5 \(1 such"
    ):
        data.TextFiles(tmp_path, max_length=5, long="error")
    with pytest.raises(dcp.ArgumentError, match=r"\.py, document \d+ has"):
        data.TextFiles("stdlib", max_length=5, long="error")
    with pytest.raises(dcp.ArgumentError, match="packed: document 2 has 3"):
        data.Packed([1, 2, 3, 4], [0, 1, 1, 4], max_length=2, long="error")


@pytest.mark.parametrize(
    ("array", "beside", "error", "words"),
    [
        (np.array([1.0, 2.0]), {}, dcp.DTypeError, "float64"),
        (np.array([True]), {}, dcp.DTypeError, "bool"),
        (np.ones((1, 1, 1), int), {}, dcp.ArgumentError, "3 dimensions"),
        (np.array([1, -1]), {}, dcp.ArgumentError, "value -1 at 1"),
        (np.array([1, -100]), {}, dcp.ArgumentError, "value -100 at 1"),
        (np.array([2**31]), {}, dcp.ArgumentError, "2147483648"),
        (np.zeros(0, int), {}, dcp.FileError, "no document"),
        (np.arange(4), {"offsets": [0, 3, 2, 4]}, dcp.ArgumentError, "decreases from 3 to 2"),
        (np.arange(4), {"offsets": [0, 5]}, dcp.ArgumentError, "past the 4 tokens"),
        (np.arange(4), {"offsets": [0, 3]}, dcp.ArgumentError, "ends at 3"),
        (np.arange(4), {"offsets": [1, 4]}, dcp.ArgumentError, "start with 0"),
        (np.arange(4), {"offsets": [0.0, 4.0]}, dcp.DTypeError, "float64"),
        (np.arange(4), {"labels": [1, 2]}, dcp.ArgumentError, "shape"),
        (np.arange(4), {"labels": [1, 2, 3, -7]}, dcp.ArgumentError, "value -7 at 3"),
    ],
)
def test_bad_token_files(
    tmp_path: Path, array: Any, beside: dict[str, Any], error: type[Exception], words: str
) -> None:
    np.save(tmp_path / "t.npy", array)
    for kind, values in beside.items():
        np.save(tmp_path / f"t.{kind}.npy", np.array(values))
    with pytest.raises(error, match=words) as found:
        data.TokenFiles(tmp_path / "t.npy")
    assert "t." in str(found.value)


def test_files_that_are_not_npy(tmp_path: Path) -> None:
    with pytest.raises(dcp.FileError, match="none"):
        data.TokenFiles(tmp_path / "none.npy")
    (tmp_path / "text.npy").write_bytes(b"hello")
    (tmp_path / "void.npy").touch()
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "zip.npz", a=np.arange(3))
    for name in ("text.npy", "void.npy", "object.npy", "zip.npz"):
        with pytest.raises(dcp.FileError, match=name):
            data.TokenFiles(tmp_path / name)
    whole = tmp_path / "whole.npy"
    np.save(whole, np.arange(1000))
    (tmp_path / "half.npy").write_bytes(whole.read_bytes()[:500])
    with pytest.raises(dcp.FileError, match="half"):
        data.TokenFiles(tmp_path / "half.npy")


def test_bad_options() -> None:
    with pytest.raises(dcp.ArgumentError, match="max_length = 0"):
        data.Packed([1], [0, 1], max_length=0)
    with pytest.raises(dcp.ArgumentError, match="splt"):
        data.Packed([1], [0, 1], long="splt")  # type: ignore[arg-type]
    with pytest.raises(dcp.ArgumentError, match="paths"):
        data.TokenFiles([])
    with pytest.raises(dcp.DTypeError, match="tokens"):
        data.Packed([1.5], [0, 1])
    with pytest.raises(dcp.ArgumentError, match="labels has 1"):
        data.Packed([1, 2], [0, 2], labels=[1])


def word_tokenizer(file: Path) -> Path:
    """Words of a small vocabulary; it would truncate, pad and add special tokens if let."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[CLS]": 1, "[PAD]": 2, "the": 3, "cat": 4, "sat": 5, "\ufffd": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.enable_truncation(max_length=2)
    made.enable_padding(pad_id=2, length=9)
    made.save(str(file))
    return file


def test_text_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document alone, whole, without what the tokenizer would add to it."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, content in {
        "a": b"the cat sat",
        "b": b"",
        "c": b"sat \xff dog",
        "d": b"   ",
        "e": b"the the the the the",
    }.items():
        (folder / name).write_bytes(content)
    file = word_tokenizer(tmp_path / "tokenizer.json")
    wanted = [[3, 4, 5], [5, 6, 0], [3, 3, 3], [3, 3]]
    for at_once in (1, 1 << 22):
        monkeypatch.setattr(data, "_ENCODE", at_once)
        text = data.TextFiles(folder, tokenizer=file, max_length=3)
        assert [t for t, _ in read(text)] == wanted
        assert text.vocab_size == 7 and text.stats.empty == 2
    again = pickle.loads(pickle.dumps(text))
    assert [t for t, _ in read(again)] == wanted
    with pytest.raises(dcp.ArgumentError, match="e has 5 tokens"):
        data.TextFiles(folder, tokenizer=file, max_length=3, long="error")


def test_bad_tokenizers(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(dcp.FileError, match=r"none\.json"):
        data.TextFiles(tmp_path / "a.txt", tokenizer=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(dcp.FileError, match=r"bad\.json cannot be read as a tokenizer"):
        data.TextFiles(tmp_path / "a.txt", tokenizer=tmp_path / "bad.json")
    (tmp_path / "torn.json").write_bytes(b"\xff")
    with pytest.raises(dcp.FileError, match=r"torn\.json"):
        data.TextFiles(tmp_path / "a.txt", tokenizer=tmp_path / "torn.json")


def test_without_the_tokenizers_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(dcp.UnsupportedError, match=r"t\.json.*pip install tokenizers"):
        data.TextFiles(tmp_path / "a.txt", tokenizer=tmp_path / "t.json")
    assert data.TextFiles(tmp_path / "a.txt").stats.tokens == 1


def test_a_folder_of_token_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("b.npy", "below/c.npy", "a.npy", "a.offsets.npy", "a.labels.npy"):
        np.save(tmp_path / name, np.array([0, 1]))
    names = [str(f.relative_to(tmp_path)) for f in data.token_files(tmp_path)]
    assert names == ["a.npy", "b.npy", "below/c.npy"]
    assert data.token_files(tmp_path / "b.npy") == [tmp_path / "b.npy"]
    assert data.token_files(tmp_path / "absent") == []
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(dcp.FileError, match=r"notes\.txt"):
        data.token_files(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "x").write_text("x")
    assert data.token_files(tmp_path / "text") == []
