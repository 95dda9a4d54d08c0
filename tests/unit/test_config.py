"""Settings: four layers, types, rules, and messages that say what to write instead."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp import config
from dcp.config import load, parse_bytes, suggest


def test_defaults_are_the_documented_ones() -> None:
    settings = load()
    assert settings.preset == "tiny" and settings.steps == 60 and settings.seed == 0
    assert settings.ranks == min(8, config.core_count())
    assert settings.tokens_per_step == 16384 and settings.strategy == "dcp"
    assert settings.data.source == "stdlib" and settings.data.max_length == 4096
    assert settings.data.long == "split" and settings.train.eval_share == 0.01
    assert settings.train.weighting == "token" and settings.checkpoint.keep == 3
    adamw = settings.optimizer
    assert adamw.betas == (0.9, 0.95) and adamw.eps == 1e-8 and adamw.weight_decay == 0.1
    assert adamw.clip == 1.0 and adamw.warmup_steps == 10 and adamw.schedule == "constant"


def test_later_layers_win(tmp_path: Path) -> None:
    """Every subset of the layers file, --set, option: the last of those that are there decides."""
    file = tmp_path / "run.toml"
    file.write_text("steps = 11\n[data]\nmax_length = 1024\n")
    for use_file, use_set, use_option in itertools.product([False, True], repeat=3):
        settings = load(
            config=file if use_file else None,
            sets=["steps=12"] if use_set else [],
            options={"steps": 13 if use_option else None},
        )
        wanted = 13 if use_option else 12 if use_set else 11 if use_file else 60
        assert settings.steps == wanted
        assert settings.data.max_length == (1024 if use_file else 4096)


def test_preset_may_come_from_any_layer(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "tny"\n')
    with pytest.raises(dcp.ArgumentError, match="tiny"):
        load(config=file)
    assert load(config=file, preset="tiny").preset == "tiny"
    assert load(config=file, sets=["preset=tiny"]).preset == "tiny"


def test_printed_settings_read_back_equal(tmp_path: Path) -> None:
    settings = load(
        sets=[
            "model.num_hidden_layers=3",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.clip=none",
            "train.eval_every=5",
        ],
        options={"memory": "300MB", "data.source": "a folder/with 'quotes'"},
    )
    file = tmp_path / "printed.toml"
    file.write_text(settings.to_toml())
    assert load(config=file) == settings


def test_sections_given_as_one_word(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('data = "some/folder"\noptimizer = "adamw"\n')
    assert load(config=file).data.source == "some/folder"
    assert load(sets=["data=other"]).data.source == "other"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("data.max_length=2048", "data.max_length", 2048),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("optimizer.betas=0.8,0.9", "optimizer.betas", (0.8, 0.9)),
        ("optimizer.clip=none", "optimizer.clip", None),
        ("data.source=2024", "data.source", "2024"),
        ("data.long = drop", "data.long", "drop"),
        ("train.eval_share=0", "train.eval_share", 0.0),
        ("memory=1GiB", "memory", 2**30),
    ],
)
def test_set_values_get_the_type_of_their_key(text: str, key: str, value: Any) -> None:
    found: Any = load(sets=[text])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_booleans_of_the_model() -> None:
    assert load(sets=["model.tie_word_embeddings=true"]).model["tie_word_embeddings"] is True
    assert load(sets=["model.tie_word_embeddings=false"]).model["tie_word_embeddings"] is False
    with pytest.raises(dcp.ArgumentError, match="true or false"):
        load(sets=["model.tie_word_embeddings=1"])


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["model.hiden_size=64"], "'model.hidden_size'"),
        (["hiden_size=64"], "'model.hidden_size'"),
        (["data.maxlength=64"], "'data.max_length'"),
        (["step=64"], "'steps'"),
        (["strategy=paked"], "'packed'"),
        (["preset=tny"], "'tiny'"),
        (["optimizer.schedule=cosin"], "'cosine'"),
        (["optimizer=adam"], "'adamw'"),
        (["data.long=spilt"], "'split'"),
        (["train.weighting=tokens"], "'token'"),
        (["device=cpuu"], "'cpu'"),
        (["device=cuda"], "cuda.*CPU only"),
        (["steps=many"], "steps = 'many' must be an integer"),
        (["steps=1.5"], "steps = 1.5 must be an integer"),
        (["steps=true"], "must be an integer"),
        (["steps=-1"], "steps = -1 must be >= 0"),
        (["optimizer.lr=nan"], "optimizer.lr"),
        (["optimizer.betas=0.9"], "2 numbers"),
        (["steps"], "KEY=VALUE"),
        (["=3"], "KEY=VALUE"),
        (["ranks=0"], "ranks = 0 must lie in 1"),
        (["ranks=100000"], "ranks = 100000 must lie in"),
        (["tokens_per_step=100"], "tokens_per_step = 100 is less than data.max_length = 4096"),
        (["seed=-1"], "seed = -1"),
        (["seed=9223372036854775808"], "seed"),
        (["train.eval_share=1"], "eval_share"),
        (["train.eval_share=0", "train.target_loss=2"], "held-out"),
        (["checkpoint.save_every=2"], "--checkpoint"),
        (["checkpoint.keep=0"], "checkpoint.keep"),
        (["model.hidden_size=100", "model.num_attention_heads=3"], "num_attention_heads 3"),
        (["model.num_attention_heads=0"], "num_attention_heads"),
        (["model.max_position_embeddings=512"], "max_position_embeddings = 512"),
        (["memory=lots"], "memory = 'lots' must be a size"),
        (["memory=0"], "more than 0"),
    ],
)
def test_mistakes_are_named(sets: list[str], words: str) -> None:
    with pytest.raises((dcp.ArgumentError, dcp.UnsupportedError), match=words):
        load(sets=sets)


@pytest.mark.parametrize("text", ["steps = ", "steps = 3\nsteps = 4\n", "\x00"])
def test_files_that_are_no_toml(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(dcp.ArgumentError, match=r"broken\.toml: not TOML"):
        load(config=file)


def test_messages_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(dcp.ArgumentError, match=r"absent\.toml: No such file"):
        load(config=tmp_path / "absent.toml")
    file = tmp_path / "mine.toml"
    file.write_text("[model]\nhiden_size = 3\n")
    with pytest.raises(dcp.ArgumentError, match=r"mine\.toml: unknown key 'model\.hiden_size'"):
        load(config=file)


def test_sizes_that_follow_from_others() -> None:
    """Heads and width set without head_dim: head_dim follows; positions follow max_length."""
    model = load(sets=["model.hidden_size=256", "model.num_attention_heads=4"]).model
    assert model["head_dim"] == 64
    model = load(
        sets=["model.hidden_size=256", "model.num_attention_heads=4", "model.head_dim=32"]
    ).model
    assert model["head_dim"] == 32
    grouped = load(sets=["model.num_attention_heads=8"]).model
    assert grouped["num_key_value_heads"] == 8
    long = load(sets=["data.max_length=16384", "tokens_per_step=65536"]).model
    assert long["max_position_embeddings"] >= 16384


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("300MB", 300_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("141GB", 141_000_000_000),
        ("2T", 2 * 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "3XB", "1.2.3MB", "0", "iB", "3iB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(dcp.ArgumentError, match="memory"):
        parse_bytes(text)


def test_suggestions() -> None:
    assert "known: a, b" in suggest("zzz", ["a", "b"])
    assert suggest("zzz", [f"key{i}" for i in range(100)]) == ""


def test_one_fixed_setting() -> None:
    settings = load(
        sets=["plan.sp=2", "plan.recompute=full"], options={"strategy": "fixed", "ranks": 4}
    )
    assert settings.plan.sp == 2 and settings.plan.recompute == "full"
    counts = load(sets=["plan.recompute={layer = 1, mlp = 1}"], options={"strategy": "fixed"})
    assert counts.plan.recompute == {"layer": 1, "mlp": 1}
    bare = load(options={"strategy": "fixed"})
    assert bare.plan.sp is None and bare.plan.recompute is None


def test_recompute_counts_read_back_from_toml(tmp_path: Path) -> None:
    for value in ("none", "selective", "{mlp = 2}"):
        settings = load(sets=[f"plan.recompute={value}"], options={"strategy": "fixed"})
        file = tmp_path / "printed.toml"
        file.write_text(settings.to_toml())
        assert load(config=file) == settings


@pytest.mark.parametrize(
    ("sets", "options", "words"),
    [
        (["plan.sp=2"], {"strategy": "packed"}, "plan.sp = 2 .* strategy 'fixed'"),
        (["plan.recompute=full"], {"strategy": "packed"}, "plan.recompute = 'full' .* 'fixed'"),
        (["plan.sp=2"], {"ranks": 3}, r"plan\.sp = 2 does not divide ranks = 3 .* 1, 3"),
        (["plan.sp=4"], {"ranks": 2}, "plan.sp = 4 does not divide ranks = 2"),
        (["plan.sp=2", "plan.max_group=1"], {"ranks": 2}, "plan.max_group = 1"),
        (["plan.sp=0"], {}, "plan.sp = 0 must be >= 1"),
        (["plan.sp=two"], {}, "plan.sp = 'two' must be an integer"),
        (["plan.recompute=ful"], {}, "did you mean 'full'"),
        (["plan.recompute={layers = 1}"], {}, "did you mean 'layer'"),
        (["plan.recompute={layer = -1}"], {}, "layer = -1 must be an integer >= 0"),
        (["plan.recompute={layer = 99}"], {}, "99 layers, the model has"),
        (["plan.max_tokens=0"], {}, "plan.max_tokens = 0"),
        (["plan.max_group=0"], {}, "plan.max_group = 0"),
        (["plan.windows=maybe"], {}, "plan.windows = 'maybe' must be true or false"),
        (["plan.reduce=layers"], {}, "did you mean 'layer'"),
        (["plan.prefetch=2"], {}, "plan.prefetch = 2 must be 0 or 1"),
        (["plan.prefetch=-1"], {}, "plan.prefetch = -1 must be >= 0"),
        (["plan.sequence_parallel=rin"], {}, "did you mean 'ring'"),
        (["plan.spp=1"], {}, "did you mean 'plan.sp'"),
    ],
)
def test_plan_settings_that_cannot_work(sets: list[str], options: Any, words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        load(sets=sets, options={"strategy": "fixed", **options})


LINK = "50Mbit,background=3,dwell=10s"


def test_control_settings() -> None:
    bare = load()
    assert bare.control.policy is None and bare.link is None and bare.train.precision == "fp32"
    assert bare.plan.windows and bare.plan.reduce == "auto" and bare.plan.gather == "auto"
    settings = load(
        sets=["control.precisions=bf16,int8", "control.base=bf16", "control.batch_multiples=1,3"],
        options={"control.policy": "joint"},
    )
    assert settings.control.policy == "joint" and settings.control.base == "bf16"
    assert settings.control.precisions == ("bf16", "int8")
    assert settings.control.batch_multiples == (1, 3)
    one = load(sets=["control.batch_multiples=2", "control.precisions=['fp32']", "control=static"])
    assert one.control.batch_multiples == (2,) and one.control.precisions == ("fp32",)
    assert one.control.policy == "static"


def test_control_settings_read_back_from_toml(tmp_path: Path) -> None:
    for sets in (
        ["control=joint", "control.feedback=false", f"link={LINK}", "plan.gather=layer"],
        ["train.precision=int4", "control.hadamard=true"],
        ["link=none", "control=none"],
    ):
        settings = load(sets=sets)
        file = tmp_path / "printed.toml"
        file.write_text(settings.to_toml())
        assert load(config=file) == settings


def test_a_link_sets_what_it_needs() -> None:
    plan = load(options={"link": LINK}).plan
    assert not plan.windows and plan.reduce == "step" and plan.gather == "auto"
    agreed = load(sets=["plan.windows=false", "plan.reduce=auto"], options={"link": LINK})
    assert agreed.plan == plan
    with_windows = dataclasses.replace(load(), link=LINK)
    with pytest.raises(dcp.ArgumentError, match=r"needs plan\.windows = false"):
        with_windows.check()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["control=joined"], "control.policy = 'joined' is unknown; did you mean 'joint'"),
        (["control=oracle"], "dcp control simulate"),
        (["control=best_fixed"], "dcp control simulate"),
        (["control.precisions=fp32,int9"], "control.precisions: 'int9'.*did you mean 'int8'"),
        (["control.precisions=[]"], "control.precisions is empty"),
        (["control.precisions="], "control.precisions is empty"),
        (["control.precisions=[1]"], "must be a list of words"),
        (["control.precisions=fp32,fp32"], "twice"),
        (["control.precisions=bf16,int8"], "control.base = 'fp32' is not among"),
        (["control.base=fp16"], "control.base: 'fp16' is no precision; did you mean 'bf16'"),
        (["control.batch_multiples=[]"], "control.batch_multiples is empty"),
        (["control.batch_multiples=2,1"], "ascending"),
        (["control.batch_multiples=0,1"], "integers >= 1"),
        (["control.batch_multiples=1,1"], "twice"),
        (["control.batch_multiples=1,two"], "list of integers"),
        (["control.batch_multiples=[1.5]"], "list of integers"),
        ([f"control.batch_multiples={list(range(1, 18))}"], "at most 16"),
        (["control.feedbak=true"], "did you mean 'control.feedback'"),
        (["train.precision=int5"], "did you mean 'int"),
        (["train.precision=int4", "control=joint"], "train.precision = 'int4' fixes .*'joint'"),
        (["train.precision=int4", "plan.reduce=layer"], "train.precision = 'int4' .*plan.reduce"),
        (["control=joint", "plan.reduce=layer"], "control.policy = 'joint' .*plan.reduce"),
        ([f"link={LINK}", "plan.windows=true"], "link = '50Mbit.* plan.windows = true was given"),
        ([f"link={LINK}", "plan.reduce=layer"], "link = '50Mbit.* plan.reduce = 'layer' was"),
        (["link=0Mbit"], "0"),
        (["link=fast"], "fast"),
        (["plan.gather=step"], "plan.windows = false"),
        (["plan.gather=steps"], "did you mean 'step'"),
        (["plan.windows=false", "plan.gather=step", "plan.prefetch=1"], "plan.prefetch = 1"),
    ],
)
def test_control_settings_that_cannot_work(sets: list[str], words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        load(sets=sets)
