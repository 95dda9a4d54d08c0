"""dcp.checkpoint: any world saves, any world loads, every kind of state."""

import dataclasses
import shutil
import tracemalloc
from math import prod
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import (
    ALONE,
    CONFIG,
    KIND_SHAPES,
    KINDS,
    SHAPES,
    STATE,
    arguments,
    load,
    random_values,
    same,
    save,
    shape_of,
    shards_of,
    together,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open

import dcp
from dcp import checkpoint, checkpoint_format, checkpoint_reader
from dcp.checkpoint import Run

OLD = Path(__file__).parent / "checkpoint_schema1"


@pytest.mark.parametrize("saved", range(1, 7))
def test_saved_on_n_loaded_on_m(tmp_path, saved):
    """cases F-03, F-04, F-02, F-07: bitwise on any world, scalars and empty tensors included, a
    frozen tensor without state."""
    values = random_values(saved)
    path = save(tmp_path, values, size=saved)
    assert path == tmp_path / "step-00000012"
    for loaded in range(1, 7):
        assert same(load(path, size=loaded), values)
    checkpoint.verify(path)


def test_no_padding_is_stored(tmp_path):
    """case F-03: the files hold each element once and nothing else; the library opens them."""
    values = random_values()
    path = save(tmp_path, values, size=4)
    files = sorted(path.glob("*.safetensors"))
    assert [f.name for f in files] == [f"rank-0000{r}-of-00004.safetensors" for r in range(4)]
    seen, dtypes = 0, set()
    for file in files:
        content = dict(deserialize(file.read_bytes()))
        for key, tensor in content.items():
            kind, rest = key.split("/", 1)
            name, span = rest[:-1].rsplit("[", 1)
            first, end = map(int, span.split(":"))
            assert tensor["data"] == values[kind][name][first:end].tobytes()
            assert tensor["shape"] == [end - first]
            seen += end - first
        dtypes |= {tensor["dtype"] for tensor in content.values()}
    assert dtypes == {"F64", "F32", "BF16", "U8", "I32", "I64"}
    assert seen == sum(prod(shape_of(kind, name)) for kind in KINDS for name in KINDS[kind])


def test_show_and_gather(tmp_path):
    values = random_values()
    path = save(tmp_path, values, size=3)
    shown = checkpoint.show(tmp_path)
    assert shown == checkpoint.show(path)
    assert (shown["step"], shown["world"], shown["config"]) == (12, 3, CONFIG)
    assert shown["state"] == STATE
    assert shown["bytes"] == sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert shown["tensors"][2] == {
        "name": "norm",
        "shape": [11],
        "kinds": ["weights", "counts", "copy"],
        "kind_shapes": {"counts": [2, 3]},
    }
    kinds = shown["kinds"]
    assert kinds["weights"]["elements"] - kinds["adamw.m"]["elements"] == 11
    assert kinds["shampoo.left"] == {"dtype": "F64", "elements": 37**2 + 9, "tensors": 3}
    assert [kinds[kind]["dtype"] for kind in ("counts", "copy", "adamw.m")] == [
        "I64",
        "BF16",
        "F32",
    ]
    names = []
    for kind, name, array in checkpoint.gather(path):
        assert array.shape == shape_of(kind, name)
        assert array.dtype == values[kind][name].dtype
        assert array.tobytes() == values[kind][name].tobytes()
        names.append((kind, name))
    # no rank holds moments of a tensor without elements
    layout_kinds = KINDS.keys() - KIND_SHAPES.keys() - {"weights"}
    assert set(names) == {
        (k, n) for k in KINDS for n in KINDS[k] if k not in layout_kinds or n != "empty"
    }
    assert [k for k, _, _ in checkpoint.gather(path, kinds=["weights"])] == ["weights"] * 7
    with pytest.raises(dcp.FileError, match="muon"):
        list(checkpoint.gather(path, kinds=["muon"]))


def test_tied_tensor_is_stored_once(tmp_path):
    """case F-06: one name, one copy; a second copy of it on another rank is an error."""
    value = np.arange(12, dtype=np.float32)

    def call(world):
        shards = {"weights": [Run("embed", 0, value if world.rank == 0 else value + 1)]}
        checkpoint.save(
            tmp_path, step=1, world=world, shards=shards, shapes={"embed": (3, 4)}, state={},
            config={},
        )  # fmt: skip

    assert together(1, call) == [None]
    [file] = tmp_path.glob("*/*.safetensors")
    with safe_open(file, "numpy") as handle:
        assert list(handle.keys()) == ["weights/embed[0:12]"]
    first, second = together(2, call)
    assert isinstance(first, dcp.FileError) and "embed[0:12] comes twice" in str(first)
    assert isinstance(second, dcp.AbortedError)


def test_ranks_that_disagree(tmp_path):
    values = random_values()

    def call(world):
        checkpoint.save(
            tmp_path, step=1, world=world, shards=shards_of(values, world.rank, 2),
            **arguments(state=STATE, config=CONFIG | {"hidden_size": 6 + world.rank}),
        )  # fmt: skip

    first, second = together(2, call)
    assert isinstance(first, dcp.MismatchError) and "rank 1" in str(first)
    assert isinstance(second, dcp.AbortedError)


def test_another_model(tmp_path):
    path = save(tmp_path, random_values())
    with pytest.raises(dcp.ArgumentError, match="hidden_size is 6 there and 8 here"):
        load(path, config=CONFIG | {"hidden_size": 8})

    @dataclasses.dataclass
    class Config:
        hidden_size: int
        rope_theta: float = 1e4
        tie_word_embeddings: bool = True

    load(path, config=Config(6))
    with pytest.raises(dcp.ArgumentError, match="hidden_size is 6 there and 7 here"):
        load(path, config=Config(7))
    with pytest.raises(dcp.ArgumentError, match=r"embed has shape \(37, 6\) there.*\(6, 37\) here"):
        load(path, shapes=SHAPES | {"embed": (6, 37)})
    with pytest.raises(dcp.ArgumentError, match="head is missing there and has shape"):
        load(path, shapes=SHAPES | {"head": (2,)})
    with pytest.raises(dcp.ArgumentError, match=r"norm has shape .* there and is missing here"):
        checkpoint.load(path, shards={}, shapes={k: v for k, v in SHAPES.items() if k != "norm"})


def test_missing_state(tmp_path):
    """case F-04: state that is not there is an error, never silently fresh."""
    path = save(tmp_path, random_values())
    norm = [Run("norm", 0, np.zeros(11, np.float32))]
    with pytest.raises(dcp.FileError, match=r"no muon, only weights, adamw\.m, "):
        checkpoint.load(path, shards={"muon": norm}, shapes=SHAPES)
    with pytest.raises(dcp.FileError, match=r"no adamw\.m of norm"):
        checkpoint.load(path, shards={"adamw.m": norm}, shapes=SHAPES)


@pytest.mark.parametrize(
    ("drop", "word"),
    [((0, 4), r"w\[0:4\] is missing"), ((4, 9), r"w\[4:9\] is missing"), ((9, 12), r"w\[9:12\]")],
)
def test_holes(tmp_path, drop, word):
    value = np.zeros(12, np.float32)
    cuts = [(first, end) for first, end in ((0, 4), (4, 9), (9, 12)) if (first, end) != drop]
    with pytest.raises(dcp.FileError, match=word):
        checkpoint.save(
            tmp_path, step=1, world=ALONE, shapes={"w": (3, 4)}, state={}, config={},
            shards={"weights": [Run("w", first, value[first:end]) for first, end in cuts]},
        )  # fmt: skip
    assert not checkpoint.is_used(tmp_path)


@pytest.mark.parametrize(
    ("run", "error", "word"),
    [
        (Run("w", 0, np.zeros(12, np.float16)), dcp.DTypeError, "float32"),
        (Run("w", 0, np.zeros((3, 4), np.float32)), dcp.DTypeError, "1-D"),
        (Run("w", 0, np.zeros(24, np.float32)[::2]), dcp.DTypeError, "contiguous"),
        (Run("w", 1, np.zeros(12, np.float32)), dcp.ArgumentError, "pass the end"),
        (Run("w", -1, np.zeros(2, np.float32)), dcp.ArgumentError, "pass the end"),
        (Run("x", 0, np.zeros(12, np.float32)), dcp.ArgumentError, "no such tensor"),
    ],
)
def test_bad_shards(tmp_path, run, error, word):
    with pytest.raises(error, match=word):
        checkpoint.save(
            tmp_path, step=1, world=ALONE, shards={"weights": [run]}, shapes={"w": (3, 4)},
            state={}, config={},
        )  # fmt: skip


def test_other_bad_arguments(tmp_path):
    values = random_values()
    for changes, word in [
        ({"state": {"x": object()}}, "state"),
        ({"state": {"x": float("nan")}}, "state"),
        ({"config": 3}, "config"),
        ({"keep": 0}, "keep 0"),
        ({"step": -1}, "step -1"),
    ]:
        with pytest.raises(dcp.ArgumentError, match=word):
            save(tmp_path, values, **changes)
    (tmp_path / "file").write_text("")
    with pytest.raises(dcp.FileError, match="file"):
        save(tmp_path / "file", values)
    path = save(tmp_path, values)
    fixed = np.zeros(11, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(dcp.ArgumentError, match="norm: array is read-only"):
        checkpoint.load(path, shards={"weights": [Run("norm", 0, fixed)]}, shapes=SHAPES)


def test_loading_needs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "BLOCK_BYTES", 4000)
    value = np.random.default_rng(0).random(400_000, np.float32)
    shards = {"weights": [Run("w", 0, value)]}
    shapes = {"w": (400_000,)}
    tracemalloc.start()
    try:
        path = checkpoint.save(
            tmp_path, step=1, world=ALONE, shards=shards, shapes=shapes, state={}, config={}
        )
        wanted = value.copy()
        value[:] = 0
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        checkpoint.load(path, shards=shards, shapes=shapes)
        assert tracemalloc.get_traced_memory()[1] - held < 400_000
    finally:
        tracemalloc.stop()
    assert (value == wanted).all()


def test_load_of_a_world(tmp_path):
    """A failure on one rank ends the wait of the others."""
    values = random_values()
    path = save(tmp_path, values)

    def call(world):
        config = CONFIG if world.rank != 1 else {"hidden_size": 3}
        shards = shards_of(random_values(5), world.rank, 3)
        return checkpoint.load(path, shards=shards, **arguments(config=config, world=world))

    outcomes = together(3, call)
    assert isinstance(outcomes[1], dcp.ArgumentError)
    assert isinstance(outcomes[0], dcp.AbortedError) and isinstance(outcomes[2], dcp.AbortedError)


def test_schema_1(tmp_path):
    """What the version before wrote (float32, one checksum a piece) loads, on any world, whole or
    in part, and a damage is seen."""
    kinds = ("weights", "adamw.m", "adamw.v")
    rng = np.random.default_rng(1)
    values = {
        kind: {
            name: rng.integers(0, 2**32, prod(SHAPES[name]), dtype=np.uint32).view(np.float32)
            for name in KINDS[kind]
        }
        for kind in kinds
    }
    checkpoint.verify(OLD)
    assert checkpoint.show(OLD)["kinds"]["adamw.m"]["dtype"] == "F32"
    for size in (1, 2, 3, 5):
        found = {k: {n: np.zeros_like(a) for n, a in values[k].items()} for k in kinds}
        for rank in range(size):
            shards = shards_of(found, rank, size)
            assert checkpoint.load(OLD, shards=shards, shapes=SHAPES, config=CONFIG) == STATE
        assert same(found, values)
    copy = shutil.copytree(OLD / "step-00000012", tmp_path / "step-00000012")
    file = copy / "rank-00000-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(dcp.FileError, match=r"rank-00000-of-00002.*is damaged"):
        checkpoint.verify(copy)


def test_ranks_with_other_kinds(tmp_path):
    """rows 10, 12, 13 of the peers' reports: ranks that hold no state, another kind, or nothing;
    6 elements on 4 ranks as 2, 2, 2, 0; the state that one rank alone holds is found by all."""
    weights = np.arange(6, dtype=np.float32)
    left = np.arange(9, dtype=np.float64)

    def shards_of(rank, weights, left):
        first = min(2 * rank, 6)
        shards = {"weights": [Run("w", first, weights[first : first + 2])]}
        if rank == 2:
            shards["shampoo.left"] = [Run("w", 0, left)]
        return shards if rank < 3 else {}

    call = {"shapes": {"w": (3, 2)}, "kind_shapes": {"shampoo.left": {"w": (3, 3)}}}
    outcomes = together(
        5,
        lambda world: checkpoint.save(
            tmp_path, step=1, world=world, state={}, config={}, **call,
            shards=shards_of(world.rank, weights, left),
        ),
    )  # fmt: skip
    assert outcomes == [tmp_path / "step-00000001"] * 5
    found = np.zeros_like(weights), np.zeros_like(left)
    for rank in range(4):
        checkpoint.load(tmp_path, shards=shards_of(rank, *found), **call)
    assert (found[0] == weights).all() and (found[1] == left).all()


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"dtype": np.float64}, dcp.MismatchError, "m is F64 on rank 1 and F32 before"),
        ({"shape": (3, 2)}, dcp.MismatchError, r"m of w has shape \(3, 2\) on rank 1"),
        ({"first": 2, "size": 4}, dcp.FileError, r"m/w\[2:3\] comes twice"),
        ({"first": 4, "size": 2}, dcp.FileError, r"m/w\[3:4\] is missing"),
        ({"size": 2}, dcp.FileError, r"m/w\[5:6\] is missing"),
    ],
)
def test_kinds_that_do_not_fit(tmp_path, change, error, word):
    """Coverage of a kind is checked against its own shape; dtype and shape agree over ranks."""

    def call(world):
        mine = {"dtype": np.float32, "shape": (2, 3), "first": 3 * world.rank, "size": 3}
        mine |= change if world.rank == 1 else {}
        shards = {"m": [Run("w", mine["first"], np.zeros(mine["size"], mine["dtype"]))]}
        if world.rank == 0:
            shards["weights"] = [Run("w", 0, np.zeros(40, np.float32))]
        checkpoint.save(
            tmp_path, step=1, world=world, shards=shards, state={}, config={},
            shapes={"w": (40,)}, kind_shapes={"m": {"w": mine["shape"]}},
        )  # fmt: skip

    first, _ = together(2, call)
    assert type(first) is error
    with pytest.raises(error, match=word):
        raise first
    assert not checkpoint.is_used(tmp_path)


def test_state_of_another_layout(tmp_path):
    """Another dtype, another shape of a kind's tensor, two dtypes in a kind: by name."""
    path = save(tmp_path, random_values())

    def load_one(kind, name, array, shape=None):
        shapes = {kind: {name: shape}} if shape else None
        shards = {kind: [Run(name, 0, array)]}
        checkpoint.load(path, shards=shards, shapes=SHAPES, kind_shapes=shapes)

    with pytest.raises(dcp.DTypeError, match=r"adamw8bit\.m is U8 there and F32 here"):
        load_one("adamw8bit.m", "embed", np.zeros(4, np.float32))
    with pytest.raises(
        dcp.ArgumentError,
        match=r"shampoo.left of embed has shape \(37, 37\) there and \(36, 36\) here",
    ):
        load_one("shampoo.left", "embed", np.zeros(4), (36, 36))
    with pytest.raises(dcp.ArgumentError, match=r"adamw8bit.m_scale of embed has shape \(14,\)"):
        load_one("adamw8bit.m_scale", "embed", np.zeros(4, np.float32))
    with pytest.raises(dcp.DTypeError, match="norm: array is F64, the kind has F32 too"):
        shards = [Run("embed", 0, np.zeros(4, np.float32)), Run("norm", 0, np.zeros(4))]
        checkpoint.load(path, shards={"adamw.m": shards}, shapes=SHAPES)
    with pytest.raises(dcp.ArgumentError, match="weights have the shapes of the tensors"):
        load_one("weights", "norm", np.zeros(4, np.float32), (4,))


def test_only_the_chunks_of_a_range_are_read(tmp_path, monkeypatch):
    """Resharding reads what it needs and at most two chunk ends a piece, and checks that."""
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(checkpoint_reader, "BLOCK_BYTES", 1000)
    value = np.random.default_rng(0).random(1_000_000, np.float32)
    path = checkpoint.save(
        tmp_path, step=1, world=ALONE, shapes={"w": (1_000_000,)}, state={}, config={},
        shards={"weights": [Run("w", 0, value)]},
    )  # fmt: skip
    index = checkpoint_format.read_index(path)
    for first, count in ((0, 1), (1023, 2), (1024, 1024), (999, 5000), (999_999, 1), (7, 999_993)):
        out = np.zeros(count, np.float32)
        with checkpoint_reader.Reader(index) as reader:
            reader.read([checkpoint_reader.Request("weights", "w", first, out)])
            assert reader.read_bytes <= 4 * count + 2 * 4096
        assert (out == value[first : first + count]).all()
    file = path / "rank-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-4 * 500_000] ^= 1  # in chunk 488
    file.write_bytes(content)
    out = np.zeros(100, np.float32)
    shards = {"weights": [Run("w", 499_800, out)]}
    with pytest.raises(
        dcp.FileError, match=r"weights/w\[0:1000000\] is damaged.* 1998848 to 2002944"
    ):
        checkpoint.load(path, shards=shards, shapes={"w": (1_000_000,)})
    checkpoint.load(path, shards={"weights": [Run("w", 0, out)]}, shapes={"w": (1_000_000,)})
    assert (out == value[:100]).all()


@st.composite
def cut_tensors(draw, kinds):
    """Runs of each kind over some ranks: uneven, in any order, some ranks without any."""
    size = draw(st.integers(1, 6))
    ranks = [{} for _ in range(size)]
    for kind, names in kinds.items():
        for name in names:
            count = prod(shape_of(kind, name))
            cuts = sorted(draw(st.lists(st.integers(0, count), max_size=5)))
            for first, end in zip([0, *cuts], [*cuts, count], strict=True):
                rank = draw(st.integers(0, size - 1))
                ranks[rank].setdefault(kind, []).append((name, first, end))
    return ranks


@given(data=st.data())
@settings(max_examples=25)
def test_any_cut_saves_and_any_loads(tmp_path_factory, data):
    """cases F-02, F-03, F-04 and rows 10, 11, 13, 22 of the peers' reports: bitwise, whatever ranks
    hold, in chunks of any size."""
    kinds = {kind: KINDS[kind] for kind in ("weights", "adamw8bit.m_scale", "shampoo.age", "copy")}
    saved, loaded = data.draw(cut_tensors(kinds)), data.draw(cut_tensors(kinds))
    values = {kind: {n: random_values(5)[kind][n] for n in names} for kind, names in kinds.items()}
    found = {k: {n: np.zeros_like(a) for n, a in tensors.items()} for k, tensors in values.items()}

    def runs(rank, of):
        return {
            kind: [Run(name, first, of[kind][name][first:end]) for name, first, end in cuts]
            for kind, cuts in rank.items()
        }

    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint_format, "CHUNK_BYTES", data.draw(st.sampled_from([8, 72, 1 << 20]))
        )
        outcomes = together(
            len(saved),
            lambda world: checkpoint.save(
                folder, step=1, world=world, shards=runs(saved[world.rank], values),
                **arguments(state=STATE),
            ),
        )  # fmt: skip
    assert outcomes == [folder / "step-00000001"] * len(saved)
    for rank in loaded:
        checkpoint.load(folder, shards=runs(rank, found), **arguments())
    assert same(found, values)
