"""`dcp layout`: models by name, tensor lists from files, simulation, the command."""

from __future__ import annotations

import functools
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import dcp
from dcp import cli
from dcp.layout import group_tensors, plan_groups
from dcp.layout_files import read_tensors
from dcp.layout_models import model_names, model_tensors
from dcp.layout_peers import fsdp2_elements, megatron_elements, padding_of
from dcp.layout_simulate import (
    COMPONENTS,
    SYSTEMS,
    dcp_traffic,
    footprints,
    has_tied_head,
    optimizer_names,
)

sys.path.insert(0, str(Path(__file__).parent))
from test_promises import Case

# As published: model cards, or the sizes of the checkpoints in bf16 over two.
TOTALS = {
    "gpt-oss-20b": 20_914_757_184,  # 20.91B
    "gpt-oss-120b": 116_829_156_672,  # 116.83B
    "deepseek-v3": 671_026_419_200,  # 671B
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_as_published(name: str) -> None:
    tensors = model_tensors(name)
    assert sum(math.prod(shape) for _, shape in tensors) == TOTALS[name]
    assert len({name for name, _ in tensors}) == len(tensors)


def test_every_model_has_groups() -> None:
    for name in model_names():
        groups = group_tensors(model_tensors(name))
        layers = [g for g in groups if ".layers." in g.name or ".h." in g.name]
        assert len(layers) >= 4 and len(groups) == len(layers) + 2
        assert has_tied_head(groups) == ("lm_head.weight" not in groups[-1].shapes)
    with pytest.raises(dcp.ArgumentError, match="did you mean 'deepseek-v3'"):
        model_tensors("deepseekv3")


def test_layers_that_the_figures_are_about() -> None:
    deepseek = group_tensors(model_tensors("deepseek-v3"))
    assert [len(g.shapes) for g in deepseek[1:5]] == [12, 12, 12, 782]
    assert round(deepseek[4].elements / 1e9, 3) == 11.507
    gpt = group_tensors(model_tensors("gpt-oss-120b"))[1]
    assert len(gpt.shapes) == 17 and round(gpt.elements / 1e9, 3) == 3.213


@pytest.mark.parametrize(
    ("model", "rows", "most"),
    [
        ("gpt-oss-120b", 1, 0.01),
        ("gpt-oss-120b", 16, 0.03),
        ("deepseek-v3", 1, 0.01),
        ("deepseek-v3", 16, 0.03),
        ("llama-3-70b", 1, 0.01),
        ("llama-3-70b", 16, 0.03),
        ("llama-3.1-405b", 1, 0.01),
        ("qwen3-235b-a22b", 16, 0.03),
    ],
)
def test_whole_models_on_256_ranks(model: str, rows: int, most: float) -> None:
    buffers = plan_groups(model_tensors(model), ranks=256, block_rows=rows)
    used = sum(b.count * b.layout.used_elements for b in buffers)
    held = sum(b.count * 256 * b.layout.shard_elements for b in buffers)
    assert used == sum(math.prod(shape) for _, shape in model_tensors(model))
    assert held / used - 1 < most


def test_peers_as_published() -> None:
    """FSDP2 doubles GPT-OSS at 256 ranks, Megatron pads a third at 64 to 256, from shapes alone."""
    shapes = list(group_tensors(model_tensors("gpt-oss-120b"))[1].shapes.values())
    even = {m: padding_of(fsdp2_elements(shapes, m), shapes) for m in (64, 128, 256, 512)}
    assert even[64] <= even[128] < 0.001 and round(even[256], 3) == 0.992
    assert round(even[512], 2) == 2.98
    lcm = {m: padding_of(megatron_elements(shapes, m), shapes) for m in (64, 128, 256, 512)}
    assert {round(lcm[m], 3) for m in (64, 128, 256)} == {0.322} and round(lcm[512], 2) == 1.64
    assert fsdp2_elements([(), (0, 4)], 3) == 3 and megatron_elements([(0, 4)], 3) == 0


# Files


def test_lists_in_json(tmp_path: Path) -> None:
    path = tmp_path / "tensors.json"
    forms: list[Any] = [
        [{"name": "w", "shape": [4, 8]}, {"name": "b", "shape": [8], "dtype": "BF16"}],
        {"tensors": [{"name": "w", "shape": [4, 8]}, {"name": "b", "shape": [8]}], "tied": {}},
        {"w": [4, 8], "b": [8]},
    ]
    for form in forms:
        path.write_text(json.dumps(form))
        assert [entry[:2] for entry in read_tensors(path)] == [("w", (4, 8)), ("b", (8,))]
    path.write_text(json.dumps(forms[0]))
    assert read_tensors(path)[1][2] == "bfloat16"
    path.write_text(json.dumps({"tensors": forms[0], "tied": {"b": "w"}}))
    assert read_tensors(path).tied == {"b": "w"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no JSON"),
        ("[1", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"a": [1], "a": [1]}', "'a' comes twice"),
        ("7", "must hold a list"),
        ("[7]", "tensor 0"),
        ('[{"name": "w"}]', "shape None of 'w'"),
        ('[{"name": "w", "shape": [-1]}]', "'w'"),
        ('[{"name": "w", "shape": [1.5]}]', "'w'"),
        ('[{"name": "w", "shape": [true]}]', "'w'"),
        ('[{"name": "w", "shape": [1], "dtype": 3}]', "dtype 3"),
        ('{"tensors": [], "tied": []}', "tied"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "same folder"),
        ('{"weight_map": {"w": 3}}', "same folder"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors, which is missing"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "tensors.json"
    path.write_text(text)
    with pytest.raises(dcp.FileError) as caught:
        read_tensors(path)
    assert word in str(caught.value) and "tensors.json" in str(caught.value)


def checkpoint_of_two_files(folder: Path) -> dict[str, str]:
    first = {f"model.layers.{i}.w": np.zeros((2, 3), np.float32) for i in range(0, 12, 2)}
    second = {f"model.layers.{i}.w": np.zeros((2, 3), np.float16) for i in range(1, 12, 2)}
    where = {}
    for file, tensors in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


def test_index_of_several_files(tmp_path: Path) -> None:
    """Layers in their order, though the index is sorted as text; a missing file is named."""
    checkpoint_of_two_files(tmp_path)
    tensors = read_tensors(tmp_path / "model.safetensors.index.json")
    assert [name for name, _, _ in tensors] == [f"model.layers.{i}.w" for i in range(12)]
    assert [dtype for _, _, dtype in tensors] == ["float32", "float16"] * 6
    assert read_tensors(tmp_path) == tensors
    assert len(read_tensors(tmp_path / "a.safetensors")) == 6
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(dcp.FileError, match=r"b\.safetensors, which is missing"):
        read_tensors(tmp_path)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(dcp.FileError, match=r"a\.safetensors, which does not hold it"):
        read_tensors(tmp_path)
    with pytest.raises(dcp.FileError, match="neither"):
        read_tensors(tmp_path.parent)


def test_order_of_a_pass(tmp_path: Path) -> None:
    """Files hold their tensors sorted as text, head first."""
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.w" for i in (0, 1, 10, 11, 2)]
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, tmp_path / "a.safetensors")
    groups = group_tensors(read_tensors(tmp_path / "a.safetensors"))
    assert [g.name for g in groups] == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in (0, 1, 2, 10, 11)),
        "lm_head+model.norm",
    ]


def header_of(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes
    text = json.dumps({"w": entry}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2, 4]},
        {"shape": [2**40, 2**40]},
        {"shape": [-2, -3]},
        {"dtype": "F64"},
        {"dtype": "X9"},
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [8, 32]},
        {"data_offsets": [0]},
    ],
)
def test_headers_that_lie(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "lies.safetensors"
    path.write_bytes(header_of() + bytes(24))
    assert read_tensors(path) == [("w", (2, 3), "float32")]
    path.write_bytes(header_of(**changes) + bytes(24))
    with pytest.raises(dcp.FileError, match=r"lies\.safetensors"):
        read_tensors(path)


@given(data=st.data())
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_are_a_list_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped, cut, inserted bytes: what comes out is what the file can hold, or dcp.FileError."""
    valid = header_of() + bytes(24)
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip" and at < len(content):
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 30))]
        else:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_tensors(path)
    except dcp.FileError as error:
        assert "fuzzed.safetensors" in str(error)
        return
    assert sum(math.prod(shape) for _, shape, _ in tensors) <= len(content)


# Simulation


SETTINGS = (  # reduce, micro-batches, prefetch
    ("layer", 1, 0),
    ("layer", 3, 0),
    ("step", 2, 0),
    ("step", 1, 1),
    ("layer", 3, 1),
)


class Counted(NamedTuple):
    gathered: int
    reduced: int
    held: int


def steps(world: Any, config: Any) -> list[Counted]:
    tokens = [np.arange(9, dtype=np.int32)]
    case = Case(config, tokens, tokens, None, 0)
    counted = []
    for reduce, micro_batches, prefetch in SETTINGS:
        options = {"reduce": reduce, "prefetch": prefetch}
        with dcp.fully_shard(config, world, block_rows=3, windows=False, **options) as model:
            result = model.step(
                [case.micro_batch([0])] * micro_batches,
                scale=1.0,
                trainable=9,
                lr=0.1,
                step=0,
                optimizer=dcp.optim.AdamW(lr=0.1),
            )
            held = model.memory()["held"]
        counted.append(Counted(result.gathered_bytes, result.reduced_bytes, held))
    return counted


def config_of(tied: bool) -> dcp.Transformer1D:
    return dcp.Transformer1D(
        vocab_size=257,
        hidden_size=120,
        intermediate_size=340,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


@functools.cache
def counted_by_dcp(tied: bool, ranks: int) -> list[list[Counted]]:
    return dcp.launch(steps, ranks, (config_of(tied),))


def planned(tied: bool, ranks: int) -> tuple[list[Any], list[Any], list[int]]:
    """Groups, buffers and elements of each group as dcp trains them."""
    config = config_of(tied)
    groups = group_tensors(config.tensors(), by=config.groups())
    buffers = plan_groups(groups, ranks=ranks, block_rows=3, split_above=math.inf)
    padded = {name: b.layout.shard_elements * ranks for b in buffers for name in b.groups}
    return groups, buffers, [padded[group.name] for group in groups]


@pytest.mark.parametrize(("tied", "ranks"), [(False, 3), (True, 3), (False, 2)])
def test_traffic_is_what_real_steps_count(tied: bool, ranks: int) -> None:
    groups, buffers, padded = planned(tied, ranks)
    wanted = [
        dcp_traffic(
            padded, ranks=ranks, micro_batches=count, tied=tied, reduce=reduce, prefetch=prefetch
        )
        for reduce, count, prefetch in SETTINGS
    ]
    for rank in counted_by_dcp(tied, ranks):
        assert [(c.gathered, c.reduced) for c in rank] == wanted
    ours = footprints(groups, buffers, ranks=ranks, compute_bytes=4, micro_batches=3, tied=tied)[0]
    assert (ours.gathered, ours.reduced) == wanted[1]


def test_memory_is_what_real_ranks_hold() -> None:
    """Activations, packed copies and the runtime do not depend on the ranks; the rest does."""
    left, totals = [], []
    for ranks in (2, 3):
        groups, buffers, _ = planned(False, ranks)
        ours = footprints(groups, buffers, ranks=ranks, compute_bytes=4)[0]
        held = [rank[0].held for rank in counted_by_dcp(False, ranks)]
        totals.append(ours.total)
        left += [bytes_held - ours.total for bytes_held in held]
    assert min(left) > 0
    assert max(left) - min(left) < 0.02 * (totals[0] - totals[1])


def test_figures_by_hand() -> None:
    """Four groups of 32 elements on two ranks: nothing is padded, everything can be counted."""
    names = ("embed.weight", "model.layers.0.w", "model.layers.1.w", "lm_head.weight")
    groups = group_tensors([(name, (8, 4)) for name in names])
    entries = footprints(groups, plan_groups(groups, ranks=2), ranks=2)
    #            weights  compute       gradients       optimizer  communication
    wanted = {
        "dcp": (4 * 64, 2 * 32, 4 * 64 + 4 * 32, 8 * 64, 0),
        "fsdp2": (4 * 64, 2 * (64 + 32), 4 * 64 + 2 * 32, 8 * 64, (2 + 4) * 32),
        "megatron": (6 * 64, 2 * (64 + 32), 4 * 64 + 4 * 32, 8 * 64, (2 + 4) * 32),
        "zero3": (6 * 64, 2 * 128, 2 * 64, 8 * 64, 2 * 128),
    }
    layers_twice = (2 * 64 + 64) // 2 * 2
    traffic = {
        "dcp": (layers_twice, 4 * 64),
        "fsdp2": (layers_twice, 4 * 64),
        "megatron": (layers_twice, 4 * 64),
        "zero3": (2 * 64, 2 * 64),
    }
    for entry in entries:
        assert tuple(entry.memory[c] for c in COMPONENTS) == (*wanted[entry.system], 0)
        assert (entry.gathered, entry.reduced) == traffic[entry.system]
    # 12 ranks: FSDP2 has a row on each, Megatron rows of 4, ZeRO-3 elements, dcp units of 16
    entries = footprints(groups, plan_groups(groups, ranks=12), ranks=12)
    stay = {"dcp": (16, 16), "fsdp2": (4, 16), "megatron": (4, 18), "zero3": (3, 16)}
    for entry in entries:
        shard, item_bytes = stay[entry.system]
        assert entry.memory["padding"] == pytest.approx(item_bytes * 4 * (shard - 32 / 12))


@pytest.mark.parametrize("optimizer", optimizer_names())
def test_footprints_add_up(optimizer: str) -> None:
    for name in ("gpt2-large", "gpt-oss-20b", "llama-3-8b"):
        groups = group_tensors(model_tensors(name))
        used = sum(group.elements for group in groups)
        found = {}
        for ranks in (1, 8, 64):
            buffers = plan_groups(groups, ranks=ranks)
            entries = footprints(groups, buffers, ranks=ranks, optimizer=optimizer)
            assert tuple(e.system for e in entries) == SYSTEMS
            for entry in entries:
                document = entry.to_json()
                memory: Any = document["memory_bytes"]
                assert memory["total"] == sum(memory[c] for c in COMPONENTS)
                assert min(entry.memory.values()) >= 0
                assert entry.memory["weights"] >= 4 * used / ranks
                if ranks == 1:
                    assert entry.gathered == entry.reduced == 0
                found[entry.system, ranks] = entry
        for system in SYSTEMS:
            assert found[system, 64].total < found[system, 8].total < found[system, 1].total
        state = found["dcp", 1].memory["optimizer"] / used
        low, high = {
            "adamw": (8, 8),
            "adamw8bit": (2, 2.5),
            "muon": (4, 7),
            "shampoo": (12, 24.1),
            "sgd": (4, 4),
        }[optimizer]
        assert low <= state <= high


def test_state_of_optimizers() -> None:
    """One matrix of 300 x 200 and one vector of 64, on one rank."""
    groups = group_tensors([("layers.0.w", (300, 200)), ("layers.0.b", (64,))])
    buffers = plan_groups(groups, ranks=1)
    blocks = 3 * 2  # Shampoo's, of 100 x 100
    wanted = {
        "adamw": 8 * 60064,
        "adamw8bit": 2 * 60000 + 8 * 300 + 8 * 64,
        "muon": 4 * 60000 + 8 * 64,
        "shampoo": 8 * 60064 + blocks * 4 * 4 * 100 * 100,
        "sgd": 4 * 60064,
    }
    assert list(wanted) == optimizer_names()
    for name, count in wanted.items():
        entry = footprints(groups, buffers, ranks=1, optimizer=name)[0]
        assert entry.memory["optimizer"] == count


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "shampoo"])
def test_state_is_what_optimizers_make(name: str) -> None:
    optimizers = {
        "adamw": dcp.optim.AdamW,
        "adamw8bit": dcp.optim.AdamW8bit,
        "muon": dcp.optim.Muon,
        "shampoo": dcp.optim.Shampoo,
    }
    groups, buffers, _ = planned(False, 1)
    ours = footprints(groups, buffers, ranks=1, optimizer=name)[0]
    with dcp.init("self") as world, dcp.fully_shard(config_of(False), world) as model:
        model.set_optimizer(optimizers[name]())
        runs = [run for kind, runs in model.shards().items() if kind != "weights" for run in runs]
        made = sum(run.array.nbytes for run in runs)
        del runs
    assert ours.memory["optimizer"] == made


def test_figures_of_no_optimizer() -> None:
    groups = group_tensors([("w", (8, 8))])
    with pytest.raises(dcp.ArgumentError, match="did you mean 'adamw'"):
        footprints(groups, plan_groups(groups, ranks=2), ranks=2, optimizer="adam")
    with pytest.raises(dcp.ArgumentError, match="no group 'v'"):
        footprints(groups, plan_groups([("v", (8, 8))], ranks=2), ranks=2)
    with pytest.raises(dcp.ArgumentError, match="0 of 64 elements"):
        footprints(groups, [], ranks=2)


# The command


def run(*args: Any) -> tuple[int, str, str]:
    from _pytest.capture import MultiCapture, SysCapture

    capture: MultiCapture[str] = MultiCapture(in_=None, out=SysCapture(1), err=SysCapture(2))
    capture.start_capturing()
    try:
        code = cli.run(["layout", *map(str, args)])
        out, err = capture.readouterr()
    finally:
        capture.stop_capturing()
    return code, out, err


def document_of(*args: Any) -> dict[str, Any]:
    code, out, err = run(*args, "--json", "-")
    assert code == 0, err
    result: dict[str, Any] = json.load(io.StringIO(out))
    return result


def test_published_figures_from_the_command() -> None:
    document = document_of("--model", "gpt-oss-120b", "--ranks", "128,256", "--rows", "1,16,128")
    assert document["schema"] == 1 and document["command"] == "layout"
    rows = {(r["group"], r["ranks"], r["rows"]): r for r in document["layouts"]}
    most = {1: 0.0005, 16: 0.006, 128: 0.058}
    for block_rows in most:
        layer = rows["model.layers.0", 256, block_rows]
        assert layer["count"] == 36 and layer["groups"][35] == "model.layers.35"
        assert layer["padding"] <= most[block_rows]
        assert layer["padding"] == 256 * layer["shard_elements"] / layer["used_elements"] - 1
        assert round(layer["peers"]["fsdp2"], 3) == 0.992
        assert round(layer["peers"]["megatron"], 3) == 0.322
        assert rows["model.layers.0", 128, block_rows]["peers"]["fsdp2"] < 0.001
        assert layer["seconds"] >= 0 and "tensors" not in layer
    assert [(w["ranks"], w["rows"]) for w in document["whole"]] == [
        (ranks, block_rows) for ranks in (128, 256) for block_rows in (1, 16, 128)
    ]
    assert document["whole"][3]["padding"] < 0.001


def test_places_in_the_document() -> None:
    for order in dcp.layout.ORDERS:
        arguments = ("--model", "tiny", "--ranks", 3, "--rows", 4, "--order", order, "--layouts")
        for row in document_of(*arguments)["layouts"]:
            end = 0
            for tensor in sorted(row["tensors"], key=lambda t: t["start"]):
                assert tensor["start"] >= end and tensor["start"] % 16 == 0
                end = tensor["start"] + math.prod(tensor["shape"])
                shape = tensor["shape"]
                wanted = 1 if len(shape) == 1 else min(4, shape[0]) * shape[-1]
                assert tensor["block_elements"] == wanted
            assert end <= 3 * row["shard_elements"]


def test_simulation_and_table() -> None:
    arguments = ("--model", "llama-3-8b", "--ranks", "8,64", "--rows", "1,16", "--simulate")
    entries = document_of(*arguments)["simulate"]
    assert len(entries) == 2 * (2 + 3)
    assert {e["system"] for e in entries} == set(SYSTEMS)
    assert all((e["rows"] is None) == (e["system"] != "dcp") for e in entries)
    code, out, err = run(*arguments)
    assert code == 0 and err == ""
    for word in ("model.layers.0", "whole model", "Megatron", "memory of a rank", "zero3"):
        assert word in out
    code, out, _ = run("--model", "llama-3-70b", "--ranks", 256, "--rows", 128)
    assert code == 0 and "replicas" in out and "tiles of 128 x 128" in out


def test_groups_by_size_and_all_together() -> None:
    together = document_of("--model", "tiny", "--ranks", 2, "--rows", 1, "--by", "model")
    assert {row["groups"][0] for row in together["layouts"]} == {"model"}
    pieces = document_of("--model", "tiny", "--ranks", 2, "--rows", 1, "--by", "500kB")
    assert len(pieces["layouts"]) > 3


def test_files_in_the_command(tmp_path: Path) -> None:
    checkpoint_of_two_files(tmp_path)
    for place in (tmp_path, tmp_path / "model.safetensors.index.json", tmp_path / "a.safetensors"):
        rows = document_of("--model", place, "--ranks", 2, "--rows", 1)["layouts"]
        assert rows[0]["group"] == "model.layers.0" and rows[0]["used_elements"] == 6
    tied = {"tensors": [{"name": n, "shape": [8, s]} for n, s in (("a", 4), ("b", 5))]}
    path = tmp_path / "tied.json"
    path.write_text(json.dumps(tied | {"tied": {"b": "a"}}))
    code, out, err = run("--model", path, "--ranks", 2)
    assert code == 2 and out == "" and "'b' is float32 of shape (8, 5)" in err
    path.write_text(json.dumps([{"name": "a", "shape": [8, size]} for size in (4, 5)]))
    code, out, err = run("--model", path, "--ranks", 2)
    assert code == 2 and out == "" and "tied.json: tensor 'a' is given twice" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ranks", "0"), "--ranks 0"),
        (("--ranks", "2,x"), "'x'"),
        (("--ranks", ","), "no number"),
        (("--rows", "-1"), "'-1'"),
        (("--order", "modle"), "did you mean 'model'"),
        (("--by", "layers"), "--by"),
        (("--model", "gpt-oss-120"), "did you mean 'gpt-oss-120b'"),
        (("--model", "gone.json"), "gone.json"),
        (("--model", "a/b.txt"), "must end in"),
        (("--plot", "no/such/folder/a.png"), "no such folder"),
        (("--simulate", "--optimizer", "adam"), "did you mean 'adamw'"),
    ],
)
def test_bad_input_to_the_command(arguments: tuple[str, ...], word: str) -> None:
    code, out, err = run("--model", "tiny", *arguments)
    assert code == 2 and out == "" and word in err
    assert len(err.strip().splitlines()) == 1


def test_pictures_of_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    for name in ("a.png", "a.svg"):
        path = tmp_path / name
        code, _, err = run("--model", "gpt2", "--ranks", "4,96", "--rows", "1,16", "--plot", path)
        assert code == 0, err
        assert path.stat().st_size > 10_000
    code, _, err = run("--model", "gpt2", "--ranks", 4, "--plot", tmp_path / "a.xyz")
    assert code == 2 and "a.xyz" in err


def test_picture_without_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from dcp import cli\n"
        f"sys.exit(cli.run(['layout', '--model', 'tiny', '--plot', {str(tmp_path / 'a.png')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "dcp[viz]" in done.stderr
