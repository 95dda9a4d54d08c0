"""dcp.checkpoint: to and from Hugging Face's files, to other numbers of files, range by range."""

import hashlib
import json
import tracemalloc
from math import prod

import numpy as np
import pytest
from checkpoint_cases import (
    ALONE,
    CONFIG,
    KINDS,
    STATE,
    load,
    random_values,
    same,
    save,
    shape_of,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import dcp
from dcp import checkpoint, checkpoint_exchange, checkpoint_format
from dcp.checkpoint import Run
from dcp.cli import run

TINY = {"vocab_size": 37, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}


def model_of(**changes):
    """A small model with weights that no two tensors share."""
    fields = TINY | {"num_attention_heads": 2, "num_key_value_heads": 1} | changes
    return dcp.Model(dcp.Transformer1D(**fields), seed=3)


def saved(model, folder, step=7):
    shapes = {name: array.shape for name, array in model.parameters().items()}
    runs = [Run(name, 0, array.ravel()) for name, array in model.parameters().items()]
    return checkpoint.save(
        folder, step=step, world=ALONE, shards={"weights": runs}, shapes=shapes, state=STATE,
        config=model.config,
    )  # fmt: skip


def bits_of(values):
    """float32 rounded to bfloat16, one at a time in exact arithmetic."""
    out = []
    for value in values.tolist():
        bits = int(np.float32(value).view(np.uint32))
        low, high = bits & 0xFFFF, bits >> 16
        out.append(high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1)))
    return np.array(out, np.uint16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("most", [10**9, 1000])
def test_export_and_back(tmp_path, tied, most):
    """case F-06: a tied head is stored once; the folder opens as a model with the same weights."""
    model = model_of(tie_word_embeddings=tied)
    where = saved(model, tmp_path / "run")
    written = checkpoint.export(where, tmp_path / "out", max_shard_bytes=most)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == written["files"]
    assert (len(files) > 3) == (most == 1000)
    tensors = {}
    for file in files:
        part = load_file(file)
        assert sum(array.nbytes for array in part.values()) <= most or len(part) == 1
        assert not part.keys() & tensors.keys()
        tensors |= part
    assert ("lm_head.weight" in tensors) == (not tied)
    assert tensors.keys() == model.parameters().keys()
    assert written["bytes"] == sum(array.nbytes for array in tensors.values())
    again = dcp.Model.from_pretrained(tmp_path / "out")
    for name, array in model.parameters().items():
        assert array.tobytes() == again.parameters()[name].tobytes()
    # and in again, as a checkpoint of several files
    path = checkpoint.convert(tmp_path / "out", tmp_path / "in", ranks=3)
    assert checkpoint.show(path)["step"] == 0 and checkpoint.show(path)["world"] == 3
    for _, name, array in checkpoint.gather(path):
        assert array.tobytes() == model.parameters()[name].tobytes()
    config = checkpoint.show(path)["config"]
    assert dcp.Transformer1D(**config) == model.config


def test_export_to_transformers(tmp_path):
    """What transformers computes with an exported checkpoint is what dcp computes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = model_of()
    where = saved(model, tmp_path / "run")
    tokens = np.arange(20, dtype=np.int32)
    wanted = model.logits(tokens, np.array([0, 20], np.int32))
    for name, changes, most in [
        ("one", {}, 1e-5),
        ("several", {"max_shard_bytes": 2000}, 1e-5),
        ("half", {"dtype": "bfloat16"}, 3e-2),
    ]:
        checkpoint.export(where, tmp_path / name, **changes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            got = theirs.float()(torch.tensor(tokens)[None].long()).logits[0].numpy()
        assert np.abs(got - wanted).max() <= most * np.abs(wanted).max()


def test_export_in_bfloat16(tmp_path):
    model = model_of()
    where = saved(model, tmp_path / "run")
    checkpoint.export(where, tmp_path / "half", dtype="bfloat16")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    for name, array in model.parameters().items():
        got = checkpoint.read(tmp_path / "half", name)
        bits = bits_of(array.ravel()).astype(np.uint32) << 16
        assert got.tobytes() == bits.view(np.float32).tobytes()


@given(st.lists(st.floats(width=32), max_size=20))
def test_rounding_to_bfloat16(values):
    values = np.array(values, np.float32)
    got = checkpoint_exchange.to_bfloat16(values)
    wide = (got.astype(np.uint32) << 16).view(np.float32)
    assert (np.isnan(wide) == np.isnan(values)).all()
    finite = ~np.isnan(values)
    assert (got[finite] == bits_of(values[finite])).all()


def test_export_needs_a_model_and_an_empty_folder(tmp_path):
    where = save(tmp_path / "run", random_values(), config={})
    with pytest.raises(dcp.ArgumentError, match="no configuration"):
        checkpoint.export(where, tmp_path / "out")
    where = saved(model_of(), tmp_path / "model")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(dcp.ArgumentError, match="not empty"):
        checkpoint.export(where, tmp_path / "out")
    for changes in ({"dtype": "float16"}, {"max_shard_bytes": 0}):
        with pytest.raises(dcp.ArgumentError, match=next(iter(changes))):
            checkpoint.export(where, tmp_path / "new", **changes)
    with pytest.raises(dcp.FileError, match="mine"):
        checkpoint.export(where, tmp_path / "out" / "mine")


def test_divergent_head(tmp_path):
    """case F-06: stored copies of tied weights that differ are an error, equal ones are one."""
    model = model_of(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in [t["name"] for t in checkpoint.show(tmp_path)["tensors"]]
    path = checkpoint.convert(tmp_path, tmp_path / "run")
    assert len(checkpoint.show(path)["tensors"]) == len(tensors)
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(dcp.ArgumentError, match=r"lm_head\.weight differs"):
        checkpoint.convert(tmp_path, tmp_path / "other")
    save_file(tensors | {"lm_head.weight": head[1:]}, tmp_path / "model.safetensors")
    with pytest.raises(dcp.ArgumentError, match=r"lm_head\.weight differs"):
        checkpoint.show(tmp_path)


@pytest.mark.parametrize("saved_by", [1, 2, 3, 6])
def test_convert_to_other_numbers_of_files(tmp_path, saved_by, monkeypatch):
    """All kinds and the state are kept; chunks of source and target do not meet."""
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 40)
    monkeypatch.setattr(checkpoint_exchange, "BLOCK_BYTES", 100)
    values = random_values(saved_by)
    path = save(tmp_path / "run", values, size=saved_by)
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 48)
    for ranks in (1, 2, 5, None):
        made = checkpoint.convert(path, tmp_path / str(ranks), ranks=ranks)
        checkpoint.verify(made)
        shown = checkpoint.show(made)
        assert shown["world"] == (ranks or saved_by) == len(shown["files"])
        assert (shown["step"], shown["config"]) == (12, CONFIG)
        for size in (1, 4):
            assert same(load(made, size=size), values)
        sizes = [file["bytes"] for file in shown["files"]]
        assert max(sizes) - min(sizes) < 4000  # headers
    with pytest.raises(dcp.ArgumentError, match="holds checkpoints already"):
        checkpoint.convert(path, tmp_path / "5")
    with pytest.raises(dcp.ArgumentError, match="ranks 0"):
        checkpoint.convert(path, tmp_path / "none", ranks=0)


def test_converting_needs_little_memory(tmp_path, monkeypatch):
    """Bounded by blocks, not by tensors."""
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(checkpoint_exchange, "BLOCK_BYTES", 16384)
    value = np.random.default_rng(0).random((1000, 1000), np.float32)
    path = checkpoint.save(
        tmp_path / "run", step=1, world=ALONE, shards={"weights": [Run("w", 0, value.ravel())]},
        shapes={"w": value.shape}, state={}, config={},
    )  # fmt: skip
    tracemalloc.start()
    try:
        made = checkpoint.convert(path, tmp_path / "five", ranks=5)
        assert tracemalloc.get_traced_memory()[1] < 1_500_000  # of 4 MB
    finally:
        tracemalloc.stop()
    assert (checkpoint.read(made, "w") == value).all()


def test_read(tmp_path):
    values = random_values()
    path = save(tmp_path, values, size=3)
    for kind, names in KINDS.items():
        for name in names:
            if name == "empty" and kind != "weights":
                continue
            whole = checkpoint.read(path, name, kind=kind)
            assert whole.shape == shape_of(kind, name)
            assert whole.tobytes() == values[kind][name].tobytes()
    for first, count in ((0, 5), (3, 200), (221, 1), (222, 0), (17, None), (0, 222)):
        part = checkpoint.read(tmp_path, "embed", first=first, count=count)
        assert part.ndim == 1
        end = None if count is None else first + count
        assert part.tobytes() == values["weights"]["embed"][first:end].tobytes()
    for first, count in ((-1, 1), (0, 223), (223, None), (5, -1)):
        with pytest.raises(dcp.ArgumentError, match="do not lie in embed, which has 222"):
            checkpoint.read(path, "embed", first=first, count=count)
    with pytest.raises(dcp.FileError, match="no weights of other"):
        checkpoint.read(path, "other")
    with pytest.raises(dcp.FileError, match="holds no muon"):
        checkpoint.read(path, "embed", kind="muon")


def test_foreign_files(tmp_path):
    """One file, an index of several, float16 and bfloat16; loaded on any world."""
    rng = np.random.default_rng(0)
    one = {"a": rng.random((30, 20), np.float32), "b": rng.random(7).astype(np.float16)}
    two = {"c": rng.random((3, 3), np.float32), "d": np.zeros((0, 2), np.float32)}
    save_file(one, tmp_path / "one.safetensors")
    save_file(two | {"unused": np.ones(2, np.int64)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    where = {name: file for file, part in (("one", one), ("two", two)) for name in part}
    names = {name: f"{file}.safetensors" for name, file in where.items()}
    index.write_text(json.dumps({"weight_map": names}))
    for path, tensors in ((index, one | two), (tmp_path / "one.safetensors", one)):
        shown = checkpoint.show(path)
        assert {t["name"]: tuple(t["shape"]) for t in shown["tensors"]} == {
            name: array.shape for name, array in tensors.items()
        }
        checkpoint.verify(path)
        shapes = {name: array.shape for name, array in tensors.items()}
        for size in (1, 3):
            layout = dcp.plan_layout(shapes, ranks=size)
            flat = {name: np.zeros(prod(shape), np.float32) for name, shape in shapes.items()}
            for rank in range(size):
                runs = [Run(n, at, flat[n][at : at + k]) for n, at, k in layout.runs(rank)]
                assert checkpoint.load(path, shards={"weights": runs}, shapes=shapes) == {}
            for name, array in tensors.items():
                assert (flat[name] == array.astype(np.float32).ravel()).all()
    with pytest.raises(dcp.UnsupportedError, match=r"unused, I64"):
        checkpoint.show(tmp_path / "two.safetensors")
    for bad in ("../one.safetensors", "", "sub/x.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {"a": bad}}))
        with pytest.raises(dcp.FileError, match="no file's name"):
            checkpoint.show(index)
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10**5):
        index.write_text(text)
        with pytest.raises(dcp.FileError, match=r"index\.json"):
            checkpoint.show(index)
    index.write_text(json.dumps({"weight_map": {"z": "one.safetensors"}}))
    with pytest.raises(dcp.FileError, match="does not hold z"):
        checkpoint.show(index)


def json_of(capsys, *arguments):
    assert run(["checkpoint", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands(tmp_path, capsys):
    model = model_of()
    saved(model, tmp_path / "run")
    shown = json_of(capsys, "show", tmp_path / "run")
    assert (shown["command"], shown["step"], shown["world"]) == ("checkpoint", 7, 1)
    exported = json_of(
        capsys, "export", tmp_path / "run", "--out", tmp_path / "hf", "--max-shard-size", "2KB"
    )
    assert len(exported["files"]) > 1 and exported["tensors"] == shown["tensors"]
    assert (exported["world"], exported["step"]) == (1, 7)
    converted = json_of(capsys, "convert", tmp_path / "hf", "--out", tmp_path / "in", "--ranks", 4)
    assert (converted["step"], converted["world"]) == (0, 4)
    assert converted["bytes"] == sum(
        file.stat().st_size for file in (tmp_path / "in").glob("*/*.safetensors")
    )
    assert json_of(capsys, "verify", tmp_path / "in")["world"] == 4
    assert json_of(capsys, "show", tmp_path / "hf")["tensors"] == shown["tensors"]
    for command in ("show", "verify"):
        assert run(["checkpoint", command, str(tmp_path / "in")]) == 0
    assert "weights" in capsys.readouterr().out
    for arguments, code, word in [
        (["export", tmp_path / "run", "--out", tmp_path / "hf"], 2, "not empty"),
        (["export", tmp_path / "none", "--out", tmp_path / "x"], 2, "no such"),
        (["export", tmp_path / "run", "--out", tmp_path / "x", "--max-shard-size", "x"], 2, "size"),
        (["convert", tmp_path / "hf", "--out", tmp_path / "in"], 2, "holds checkpoints"),
        (["convert", tmp_path / "hf", "--out", tmp_path / "y", "--ranks", "0"], 2, "--ranks 0"),
        (["show", tmp_path / "hf" / "config.json"], 2, "must be a folder, .safetensors"),
    ]:
        assert run(["checkpoint", *map(str, arguments)]) == code
        assert word in capsys.readouterr().err
    file = next((tmp_path / "in").glob("*/rank-00002*"))
    file.write_bytes(file.read_bytes()[:-3] + b"???")
    assert run(["checkpoint", "verify", str(tmp_path / "in")]) == 1
    said = capsys.readouterr().err
    assert "rank-00002-of-00004.safetensors" in said and "weights/model." in said
    assert run(["checkpoint", "export", str(tmp_path / "in"), "--out", str(tmp_path / "z")]) == 1
    assert "is damaged" in capsys.readouterr().err
    file.unlink()
    for command, code in (("show", 2), ("verify", 1)):
        assert run(["checkpoint", command, str(next((tmp_path / "in").glob("step-*")))]) == code
        assert "rank-00002-of-00004.safetensors cannot be read: No such" in capsys.readouterr().err


def test_sample_from_any_form(tmp_path, capsys):
    model = model_of(vocab_size=256)
    saved(model, tmp_path / "run")
    checkpoint.export(tmp_path / "run", tmp_path / "hf")
    checkpoint.convert(tmp_path / "hf", tmp_path / "in", ranks=2)
    texts = []
    for name in ("run", "hf", "in"):
        arguments = ["sample", "--checkpoint", str(tmp_path / name), "--prompt", "def "]
        assert run([*arguments, "--tokens", "5"]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    file = tmp_path / "hf" / "model.safetensors"
    assert run(["sample", "--checkpoint", str(file), "--prompt", "def "]) == 2
    assert "no settings of a model" in capsys.readouterr().err


def test_training_from_given_weights(tmp_path, capsys):
    """Without a step the weights are those given, in any form; the model's settings come along."""
    model = model_of(vocab_size=257, tie_word_embeddings=True, max_position_embeddings=4096)
    saved(model, tmp_path / "run")
    checkpoint.export(tmp_path / "run", tmp_path / "hf")
    small = ["train", "--ranks", "2", "--steps", "0", "--json", "-", "--tokens-per-step", "4096"]
    digests = set()
    for name in ("run", "hf"):
        assert run([*small, "--init", str(tmp_path / name)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["model"]["intermediate_size"] == 12
        digests.add(document["parameters_sha256"])
    digest = hashlib.sha256()
    for _, array in sorted(model.parameters().items()):
        digest.update(array.data)
    assert digests == {digest.hexdigest()}
    for arguments, word in [
        (["--set", "model.hidden_size=16"], "hidden_size is 8 there and 16 here"),
        (["--preset", "tiny"], "is a checkpoint of another model"),
        (["--resume", "--checkpoint", str(tmp_path / "run")], "leave --init out"),
    ]:
        assert run([*small, "--init", str(tmp_path / "run"), *arguments]) == 2
        assert word in capsys.readouterr().err
    file = str(tmp_path / "hf" / "model.safetensors")
    assert run([*small, "--init", file]) == 2
    assert "there, and has shape" in capsys.readouterr().err
    assert run([*small, "--init", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
