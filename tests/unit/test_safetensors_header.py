"""dcp.safetensors_header: what a file says is believed only where it is true."""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import dcp
from dcp import checkpoint
from dcp.safetensors_header import DTYPE_BITS, MAX_HEADER_BYTES, read_header


def write(path, header, data=b"", length=None):
    """A file with this header: bytes, or a document."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


def test_a_true_header(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(3, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(2.5),
    }
    path = tmp_path / "a.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    header = read_header(path)
    assert header.metadata == {"format": "np"} and header.bytes == path.stat().st_size
    content = path.read_bytes()
    assert header.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = header.tensors[name]
        assert tensor.shape == array.shape
        assert content[tensor.begin : tensor.end] == array.tobytes()
    begins = [tensor.begin for tensor in header.tensors.values()]
    assert begins == sorted(begins)
    assert read_header(write(tmp_path / "none", b"{}")).tensors == {}
    assert read_header(write(tmp_path / "spaces", b'{"__metadata__":{}}   ')).tensors == {}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype(tmp_path, dtype):
    size = DTYPE_BITS[dtype] * 8 // 8
    path = write(tmp_path / "x", {"w": entry(dtype, (2, 4), (0, size))}, bytes(size))
    assert read_header(path).tensors["w"].dtype == dtype
    write(path, {"w": entry(dtype, (2, 4), (0, size + 1))}, bytes(size + 1))
    with pytest.raises(dcp.FileError, match=r"x is not a safetensors file: 'w' is"):
        read_header(path)


LIES = {
    "beyond the file": ({"w": entry(shape=(4,), offsets=(0, 16))}, "'w' ends at byte"),
    "overlapping": (
        {"v": entry(), "w": entry(shape=(1,), offsets=(4, 8))},
        "'w' begins at byte .* overlaps",
    ),
    "the same bytes": ({"v": entry(), "w": entry()}, "overlaps"),
    "a hole": ({"v": entry(shape=(1,), offsets=(0, 4)), "w": entry("U8", (2,), (6, 8))}, "a hole"),
    "bytes of nobody": ({"w": entry(shape=(1,), offsets=(0, 4))}, "end at byte"),
    "begins late": ({"w": entry(shape=(1,), offsets=(4, 8))}, "a hole"),
    "wrong size": ({"w": entry(shape=(3,))}, r"'w' is F32 \[3\], which 8 bytes do not hold"),
    "reversed": ({"w": entry(offsets=(8, 0))}, "data_offsets of 'w'"),
    "negative offset": ({"w": entry(offsets=(-8, 0))}, "data_offsets of 'w'"),
    "negative extent": ({"w": entry(shape=(-2,))}, "shape of 'w'"),
    "two negative extents": ({"w": entry(shape=(-1, -2))}, "shape of 'w'"),
    "three offsets": ({"w": entry(offsets=(0, 4, 8))}, "data_offsets of 'w'"),
    "offset of 2^64": ({"w": entry(offsets=(0, 2**64 + 8))}, "data_offsets of 'w'"),
    "a product of 2^64": ({"w": entry(shape=(2**32, 2**32 + 1))}, "more than 2\\^63"),
    "a product that wraps": ({"w": entry(shape=(2**62, 4, 2))}, "more than 2\\^63"),
    "0 times much": ({"w": entry(shape=(0, 2**63))}, "shape of 'w'"),
    "many factors": ({"w": entry(shape=(2**40,) * 5000)}, "more than 2\\^63"),
    "a float": ({"w": entry(shape=(2.0,))}, "shape of 'w'"),
    "a boolean": ({"w": entry(shape=(True, 2))}, "shape of 'w'"),
    "a text": ({"w": entry() | {"shape": "2"}}, "shape of 'w'"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "'w' must have"),
    "something else": ({"w": entry(extra=1)}, "'w' must have"),
    "unknown dtype": ({"w": entry("F128")}, "'w' has unknown dtype 'F128'"),
    "dtype of another kind": ({"w": entry(["F32"])}, "'w' has unknown dtype"),
    "not an entry": ({"w": 3}, "'w' must have"),
    "not an object": ([1, 2], "must be an object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "w": entry()}, "__metadata__"),
    "metadata of another kind": ({"__metadata__": [], "w": entry()}, "__metadata__"),
    "twice": (
        b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
        b'"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "'w' comes twice",
    ),
    "not UTF-8": (b'{"\xff\xfe":1}', "no JSON"),
    "NaN": (b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}', "no JSON"),
    "digits": (b'{"w":{"shape":[' + b"9" * 5000 + b"]}}", "no JSON|shape"),
    "deep": (b"[" * 100_000, "no JSON"),
    "empty": (b"", "no JSON"),
    "cut": (b'{"w":', "no JSON"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(tmp_path, lie):
    """Each is an error that names the file, and where it is about one, the tensor; the library
    agrees that the file is none, so we refuse nothing that is right."""
    header, word = LIES[lie]
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    for call in (read_header, checkpoint.show, checkpoint.verify):
        with pytest.raises(dcp.FileError, match=rf"x\.safetensors .*{word}"):
            call(path)
    if lie not in ("something else", "twice", "a boolean", "0 times much"):
        with pytest.raises(SafetensorError), safe_open(path, "numpy"):
            pass


@pytest.mark.parametrize("length", [9, 1 << 20, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_header_length(tmp_path, length):
    """No more is read than there is, whatever the length says."""
    path = write(tmp_path / "x", b"{}", bytes(6), length=length)
    with pytest.raises(dcp.FileError, match=f"x is not .*do not hold a header of {length}"):
        read_header(path)


def test_a_header_of_too_much(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(dcp.FileError, match="at most 100000000 are read"):
        read_header(path)


def test_no_file(tmp_path):
    with pytest.raises(dcp.FileError, match="none cannot be read"):
        read_header(tmp_path / "none")
    with pytest.raises(dcp.FileError, match="cannot be read"):
        read_header(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of several tensors, and what it holds."""
    folder = tmp_path_factory.mktemp("whole")
    arrays = {
        "a": np.arange(5, dtype=np.float32),
        "b": np.arange(4, dtype=np.float16).reshape(2, 2),
        "c": np.zeros((0, 3), np.float32),
        "d": np.array(1.5, np.float32),
    }
    save_file(arrays, folder / "x.safetensors")
    return folder / "x.safetensors", arrays


def test_truncated_at_every_length(whole, tmp_path):
    content = whole[0].read_bytes()
    path = tmp_path / "x.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        for call in (read_header, checkpoint.verify):
            with pytest.raises(dcp.FileError, match=r"x\.safetensors"):
                call(path)


def check_bounds(path):
    """What the header gives lies in the file, apart, and has the size of its shape."""
    header = read_header(path)
    size = path.stat().st_size
    at = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for tensor in header.tensors.values():
        assert tensor.begin == at and tensor.end <= size
        assert 8 * (tensor.end - tensor.begin) == prod(tensor.shape) * DTYPE_BITS[tensor.dtype]
        at = tensor.end
    assert at == size
    return header


@given(data=st.data())
@settings(max_examples=50)
def test_damaged_headers(whole, tmp_path_factory, data):
    """Any bytes of the header changed, put in or taken out: an error, or ranges that are true; and
    what the library takes, we take with the same tensors."""
    content = bytearray(whole[0].read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_end - 1))
        change = data.draw(st.sampled_from(["set", "insert", "delete", "copy"]))
        if change == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif change == "insert":
            content[at:at] = data.draw(st.sampled_from([b"0", b"9", b"-", b"[", b'"', b"\\u0000"]))
        elif change == "delete":
            del content[at]
        else:
            content[at : at + 1] = content[at : at + data.draw(st.integers(0, 40))]
    if data.draw(st.booleans()):  # a length that fits
        grown = len(content) - whole[0].stat().st_size
        content[:8] = max(0, header_end - 8 + grown).to_bytes(8, "little")
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        ours = check_bounds(path)
    except dcp.FileError as error:
        assert "damaged.safetensors" in str(error)
        return
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == ours.tensors.keys()


@given(st.binary(max_size=80))
@settings(max_examples=50)
def test_any_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for text in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(text)
        try:
            check_bounds(path)
        except dcp.FileError as error:
            assert "any.safetensors" in str(error)


_SIZES = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64]))


@given(
    entries=st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(
            st.sampled_from(["F32", "U8", "F16", "I64"]),
            st.lists(_SIZES, max_size=3),
            st.tuples(_SIZES, _SIZES),
        ),
    ),
    size=st.integers(0, 40),
)
@settings(max_examples=50)
def test_any_entries(tmp_path_factory, entries, size):
    """Headers of the right form with any numbers: no range outside the file, ever."""
    path = tmp_path_factory.getbasetemp() / "entries.safetensors"
    document = {name: entry(dtype, shape, at) for name, (dtype, shape, at) in entries.items()}
    write(path, document, bytes(size))
    try:
        check_bounds(path)
    except dcp.FileError:
        try:
            with safe_open(path, "numpy"):
                raise AssertionError("the library takes what we refuse")
        except SafetensorError:
            pass
