"""dcp.checkpoint: any world saves, any world loads; killed or damaged, never a wrong number."""

import dataclasses
import doctest
import json
import os
import shutil
import sys
import threading
import tracemalloc
import warnings
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import dcp
from dcp import checkpoint, checkpoint_format
from dcp.checkpoint import Run

SHAPES = {
    "embed": (37, 6),
    "scalar": (),
    "norm": (11,),
    "three rows": (3, 8),
    "empty": (0, 4),
    "down_proj.weight": (5, 2, 9),
    "bias/odd [name]": (1,),
}
TRAINED = [name for name in SHAPES if name != "norm"]  # norm is frozen
KINDS = {"weights": list(SHAPES), "adamw.m": TRAINED, "adamw.v": TRAINED}
CONFIG = {"hidden_size": 6, "rope_theta": 1e4, "tie_word_embeddings": True}
STATE = {"step": 12, "loader": {"epoch": 2, "seen": [1, 2, 3]}, "ratio": 0.1, "none": None}


class ThreadWorld:
    """A rank of a world of threads."""

    def __init__(self, rank, size, meet):
        self.rank, self.size, self._meet = rank, size, meet

    def barrier(self):
        try:
            self._meet.wait()
        except threading.BrokenBarrierError:
            raise dcp.AbortedError("aborted") from None

    def abort(self, text):
        self._meet.abort()


def together(size, call):
    """The outcomes of call(world) on all ranks: results or exceptions."""
    meet, outcomes = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            outcomes[rank] = call(ThreadWorld(rank, size, meet))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


ALONE = ThreadWorld(0, 1, threading.Barrier(1))


def random_values(seed=0):
    """All tensors of all kinds, as random bits, NaNs among them."""
    rng = np.random.default_rng(seed)
    return {
        kind: {
            name: rng.integers(0, 2**32, prod(SHAPES[name]), dtype=np.uint32).view(np.float32)
            for name in names
        }
        for kind, names in KINDS.items()
    }


def shards_of(values, rank, size, block_rows=2):
    """The runs of one rank, as views."""
    layout = dcp.plan_layout(SHAPES, ranks=size, block_rows=block_rows)
    return {
        kind: [
            Run(name, first, tensors[name][first : first + count])
            for name, first, count in layout.runs(rank)
            if name in tensors
        ]
        for kind, tensors in values.items()
    }


def save(folder, values, *, size=1, step=12, **changes):
    arguments = {"shapes": SHAPES, "state": STATE, "config": CONFIG} | changes
    outcomes = together(
        size,
        lambda world: checkpoint.save(
            folder, step=step, world=world, shards=shards_of(values, world.rank, size), **arguments
        ),
    )
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes[0]


def load(path, *, size=1, **changes):
    """What all ranks of a world of this size load, put together."""
    values = {
        kind: {name: np.full(prod(SHAPES[name]), 7, np.float32) for name in names}
        for kind, names in KINDS.items()
    }
    arguments = {"shapes": SHAPES, "config": CONFIG} | changes
    for rank in range(size):
        state = checkpoint.load(path, shards=shards_of(values, rank, size), **arguments)
        assert state == STATE
    return values


def same(left, right):
    return left.keys() == right.keys() and all(
        left[kind].keys() == right[kind].keys()
        and all(left[kind][name].tobytes() == right[kind][name].tobytes() for name in left[kind])
        for kind in left
    )


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
    seen = 0
    for file in files:
        with safe_open(file, "numpy") as handle:
            for key in handle.keys():  # noqa: SIM118
                kind, rest = key.split("/", 1)
                name, span = rest[:-1].rsplit("[", 1)
                first, end = map(int, span.split(":"))
                tensor = handle.get_tensor(key)
                assert tensor.tobytes() == values[kind][name][first:end].tobytes()
                seen += tensor.size
    assert seen == sum(prod(SHAPES[name]) for names in KINDS.values() for name in names)


def test_show_and_gather(tmp_path):
    values = random_values()
    path = save(tmp_path, values, size=3)
    shown = checkpoint.show(tmp_path)
    assert shown == checkpoint.show(path)
    assert (shown["step"], shown["world"], shown["config"]) == (12, 3, CONFIG)
    assert shown["state"] == STATE
    assert shown["bytes"] == sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert shown["tensors"][2] == {"name": "norm", "shape": [11], "kinds": ["weights"]}
    assert shown["kinds"]["weights"] - shown["kinds"]["adamw.m"] == 11
    names = []
    for kind, name, array in checkpoint.gather(path):
        assert array.shape == SHAPES[name]
        assert array.tobytes() == values[kind][name].tobytes()
        names.append((kind, name))
    # no rank holds moments of a tensor without elements
    assert set(names) == {(k, n) for k in KINDS for n in KINDS[k] if k == "weights" or n != "empty"}
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


def test_keep_and_latest(tmp_path):
    values = random_values()
    assert not checkpoint.is_used(tmp_path / "none") and not checkpoint.is_used(tmp_path)
    for step in (1, 2, 3, 4):
        save(tmp_path, values, step=step, keep=2)
        assert checkpoint.latest(tmp_path).name == f"step-{step:08d}"
    assert sorted(p.name for p in tmp_path.glob("*")) == [".lock", "step-00000003", "step-00000004"]
    assert checkpoint.is_used(tmp_path)
    # a run that went back: the newest to be written stays, whatever its number
    save(tmp_path, values, step=2, keep=1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000002"]
    save(tmp_path, random_values(1), step=2)
    assert same(load(tmp_path), random_values(1))


def test_incomplete_is_skipped_with_a_warning(tmp_path):
    values = random_values()
    save(tmp_path, values, step=2)
    broken = [save(tmp_path, values, step=step, keep=9) for step in (3, 4, 5)]
    (broken[0] / "index.json").unlink()
    (broken[1] / "index.json").write_text('{"half": ')
    next(broken[2].glob("*.safetensors")).unlink()
    with pytest.warns(RuntimeWarning, match="step-0000000[345]") as caught:
        assert checkpoint.latest(tmp_path).name == "step-00000002"
    assert len(caught) == 3
    with pytest.warns(RuntimeWarning, match="step-00000005"):
        assert same(load(tmp_path), values)
    # what is not whole does not count for keep, and gives way to a new one of its number
    save(tmp_path, values, step=4, keep=1)
    with pytest.warns(RuntimeWarning, match="step-00000005"):
        assert checkpoint.latest(tmp_path).name == "step-00000004"
    assert not (tmp_path / "step-00000002").exists()


def test_none_is_whole(tmp_path):
    with pytest.raises(dcp.FileError, match="none"):
        checkpoint.latest(tmp_path / "none")
    with pytest.raises(dcp.FileError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "index.json").write_text('{"half": ')
    assert checkpoint.is_used(tmp_path)
    with pytest.raises(dcp.FileError, match="step-00000004"):
        checkpoint.latest(tmp_path)
    with pytest.raises(dcp.FileError, match="step-00000004"):
        checkpoint.show(tmp_path / "step-00000004")


def saved_until(folder, values, count):
    """Saves step 2 in a child process that dies at its count-th file operation; whether it died."""
    child = os.fork()
    if child == 0:
        left = count

        def die(event, _):
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"):
                left -= 1
                if left == 0:
                    os._exit(9)

        try:
            sys.addaudithook(die)
            checkpoint.save(
                folder, step=2, world=ALONE, shards=shards_of(values, 0, 1), shapes=SHAPES,
                state=STATE, config=CONFIG, keep=2,
            )  # fmt: skip
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("replace", [False, True])
def test_killed_anywhere(tmp_path, replace):
    """The last whole checkpoint is there after a death at any file operation, and the next save
    leaves nothing of the dead behind - also where a checkpoint of the same step is replaced."""
    before, after = random_values(1), random_values(2)
    count, died, old = 1, True, 0
    while died:
        folder = tmp_path / str(count)
        for step in (0, 1, 2) if replace else (0, 1):
            save(folder, before, step=step)
        died = saved_until(folder, after, count)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = load(folder)
        assert same(found, before) or same(found, after)
        assert died or same(found, after)
        old += same(found, before)
        save(folder, after, step=3, keep=2)
        names = sorted(p.name for p in folder.glob("*"))
        assert names == [".lock", "step-00000002", "step-00000003"] or (
            names == [".lock", "step-00000001", "step-00000003"] and not replace
        )
        shutil.rmtree(folder)
        count += 1
    assert old > 5 and count - old > 3


def test_another_writer(tmp_path):
    with (
        checkpoint._locked(tmp_path),
        pytest.raises(dcp.FileError, match="another run is writing"),
    ):
        save(tmp_path, random_values())


def test_full_disk(tmp_path, monkeypatch):
    """A failure on one rank is an error on all, and the checkpoint before stays."""
    values = random_values()
    save(tmp_path, values, size=3, step=1)
    write = checkpoint_format.write_shard

    def full(path, arrays):
        if "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, arrays)

    monkeypatch.setattr(checkpoint_format, "write_shard", full)
    outcomes = together(
        3,
        lambda world: checkpoint.save(
            tmp_path, step=2, world=world, shards=shards_of(values, world.rank, 3), shapes=SHAPES,
            state=STATE, config=CONFIG,
        ),
    )  # fmt: skip
    assert isinstance(outcomes[1], dcp.FileError) and "No space left" in str(outcomes[1])
    assert isinstance(outcomes[0], dcp.AbortedError) and isinstance(outcomes[2], dcp.AbortedError)
    assert checkpoint.latest(tmp_path).name == "step-00000001"


def test_ranks_that_disagree(tmp_path):
    values = random_values()

    def call(world):
        checkpoint.save(
            tmp_path, step=1, world=world, shards=shards_of(values, world.rank, 2), shapes=SHAPES,
            state=STATE, config=CONFIG | {"hidden_size": 6 + world.rank},
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
    with pytest.raises(dcp.FileError, match=r"no muon, only weights, adamw\.m, adamw\.v"):
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
        (Run("w", 0, np.zeros(12)), dcp.DTypeError, "float32"),
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
        with pytest.raises(dcp.FileError, match=r"rank-00000-of-00002.*adamw.v/.*is damaged"):
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
        (lambda d: d.update(schema=2), "schema 2"),
        (lambda d: d["files"][0].update(name="../rank-00000-of-00002.safetensors"), "file"),
        (lambda d: d["files"].pop(), "is missing"),
        (lambda d: d["files"][0]["pieces"].pop(0), "is missing"),
        (lambda d: d["files"].append(d["files"][0]), "comes twice"),
        (lambda d: d["kinds"].pop("adamw.v"), "surplus"),
        (lambda d: d["tensors"].update(norm=[10]), "surplus"),
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
    checkpoint_format.write_shard(path / "rank-00007-of-00002.safetensors", [("m", "x", 0, stray)])
    shutil.copy(path / "rank-00007-of-00002.safetensors", file)
    size = file.stat().st_size
    rewrite(path, lambda d: d["files"][0].update(bytes=size))
    with pytest.raises(dcp.FileError, match=r"is missing|is surplus"):
        checkpoint.verify(path)


def test_loading_needs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_format, "CHUNK_ELEMENTS", 1000)
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
        return checkpoint.load(path, shards=shards, shapes=SHAPES, config=config, world=world)

    outcomes = together(3, call)
    assert isinstance(outcomes[1], dcp.ArgumentError)
    assert isinstance(outcomes[0], dcp.AbortedError) and isinstance(outcomes[2], dcp.AbortedError)


def test_examples():
    result = doctest.testmod(checkpoint)
    assert result.attempted > 5 and result.failed == 0
