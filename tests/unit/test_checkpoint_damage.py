"""dcp.checkpoint: damaged or foreign, never a wrong number."""

import json
import os
import shutil

import numpy as np
import pytest
from checkpoint_cases import SHAPES, load, random_values, same, save
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import checkpoint, checkpoint_format, checkpoint_reader
from dcp.checkpoint import Run
from dcp.checkpoint_writer import ShardWriter


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    values = random_values()
    return save(tmp_path_factory.mktemp("good"), values, size=2), values


def damaged(good, folder):
    """A copy to damage, and its first file."""
    path = folder / good[0].name
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(good[0], path)
    return path, path / "rank-00000-of-00002.safetensors"


def test_truncated(good, tmp_path):
    path, file = damaged(good, tmp_path)
    whole = file.read_bytes()
    for size in (0, 7, 8, 100, len(whole) - 4, len(whole) - 1):
        file.write_bytes(whole[:size])
        for call in (load, checkpoint.verify):
            with pytest.raises(dcp.FileError, match="rank-00000-of-00002"):
                call(path)


def test_flipped_value_is_named(good, tmp_path):
    path, file = damaged(good, tmp_path)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    for call in (load, checkpoint.verify, lambda p: list(checkpoint.gather(p))):
        with pytest.raises(dcp.FileError, match=r"rank-00000-of-00002.*/.*is damaged"):
            call(path)
    # what is not read cannot be seen
    norm = np.zeros(11, np.float32)
    checkpoint.load(path, shards={"weights": [Run("norm", 0, norm)]}, shapes=SHAPES)
    assert norm.tobytes() == good[1]["weights"]["norm"].tobytes()


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_damage_is_an_error_or_harmless(good, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "flips"
    folder.mkdir(exist_ok=True)
    path, file = damaged(good, folder)
    if data.draw(st.booleans(), "index"):
        file = path / "index.json"
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    for _ in range(data.draw(st.integers(1, 3), "flips")):
        # half of them where the structure lies
        end = header if header and data.draw(st.booleans(), "in header") else len(content)
        content[data.draw(st.integers(0, end - 1), "place")] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        assert same(load(path), good[1])
        checkpoint.verify(path)
    except dcp.FileError as error:
        assert path.name in str(error)


@given(text=st.one_of(st.binary(max_size=60), st.sampled_from([b"{}", b"[]", b"1", b"[" * 9999])))
@settings(max_examples=30, deadline=None)
def test_foreign_index(good, tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp() / "foreign"
    folder.mkdir(exist_ok=True)
    path, _ = damaged(good, folder)
    (path / "index.json").write_bytes(text)
    for call in (load, checkpoint.show, checkpoint.verify):
        with pytest.raises(dcp.FileError, match=r"index\.json"):
            call(path)


def rewrite(path, change):
    """Changes the index and makes its checksum hold."""
    document = json.loads((path / "index.json").read_bytes())
    document.pop("crc32")
    change(document)
    document["crc32"] = checkpoint_format._checksum(document)
    (path / "index.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.update(schema=3), "schema 3"),
        (lambda d: d["files"][0].update(name="../rank-00000-of-00002.safetensors"), "file"),
        (lambda d: d["files"].pop(), "is missing"),
        (lambda d: d["files"][0]["pieces"].pop(0), "is missing"),
        (lambda d: d["files"].append(d["files"][0]), "comes twice"),
        (lambda d: d["kinds"].pop("adamw.v"), "surplus"),
        (lambda d: d["tensors"].update(norm=[10]), "surplus"),
        (lambda d: d["kinds"]["counts"]["tensors"].update(norm=[7]), r"counts/norm\[6:7\]"),
        (lambda d: d["kinds"]["counts"].update(dtype="I32"), "I64"),
        (lambda d: d["kinds"]["counts"].update(dtype="I33"), "I33"),
        (lambda d: d["files"][0]["pieces"][0][4].append(1), "2 checksums in the index, not 1"),
        (lambda d: d.update(chunk_bytes=8), "checksums in the index"),
        (lambda d: d.pop("state"), "index.json"),
    ],
)
def test_wrong_index(good, tmp_path, change, word):
    path, _ = damaged(good, tmp_path)
    rewrite(path, change)
    with pytest.raises(dcp.FileError, match=word):
        checkpoint.verify(path)


def test_files_of_another_checkpoint(good, tmp_path):
    path, file = damaged(good, tmp_path)
    other = path / "rank-00001-of-00002.safetensors"
    content = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(content)
    with pytest.raises(dcp.FileError, match="rank-0000"):
        load(path)
    path, file = damaged(good, tmp_path)
    stray = np.zeros(3, np.float32)
    parts = [checkpoint_format.Part("m", "x", 0, 3, "F32")]
    with ShardWriter(path / "rank-00007-of-00002.safetensors", parts) as writer:
        writer.write(next(writer.chunks()), stray.view(np.uint8).data)
    shutil.copy(path / "rank-00007-of-00002.safetensors", file)
    size = file.stat().st_size
    rewrite(path, lambda d: d["files"][0].update(bytes=size))
    with pytest.raises(dcp.FileError, match=r"is missing|is surplus"):
        checkpoint.verify(path)


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), number=st.integers(0, 1))
@settings(max_examples=50)
def test_any_changed_byte_of_data_is_seen(good, tmp_path_factory, place, flip, number):
    folder = tmp_path_factory.getbasetemp() / "bytes"
    folder.mkdir(exist_ok=True)
    path, _ = damaged(good, folder)
    file = path / f"rank-0000{number}-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + int(place * (len(content) - start))] ^= flip
    file.write_bytes(content)
    for call in (load, checkpoint.verify):
        with pytest.raises(dcp.FileError, match=f"rank-0000{number}.*is damaged"):
            call(path)


def test_truncated_and_the_index_agrees(good, tmp_path):
    """A file that is short where the index says so too, and one that shrinks while it is read."""
    path, file = damaged(good, tmp_path)
    whole = file.read_bytes()
    for cut in (1, 100, len(whole) // 2):
        file.write_bytes(whole[:-cut])
        size = file.stat().st_size
        rewrite(path, lambda d, size=size: d["files"][0].update(bytes=size))
        with pytest.raises(dcp.FileError, match=r"rank-00000.* is not a safetensors file"):
            checkpoint.verify(path)
    path, file = damaged(good, tmp_path)
    index = checkpoint_format.read_index(path)
    with checkpoint_reader.Reader(index) as reader:
        reader.verify()
        os.truncate(file, len(whole) - 1)
        with pytest.raises(dcp.FileError, match=r"rank-00000.* ends early: it was truncated"):
            reader.verify()
