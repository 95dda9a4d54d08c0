"""The emulated link: the same data as without it, later; and what cannot be a link."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dcp
from dcp.link import Link, cost_under

LINK = Link.parse("800Mbit,latency=1ms")


def everything(world: Any) -> dict[str, Any]:
    """The results of all collectives, on ragged data that differs by rank."""
    size, rank = world.size, world.rank
    rng = np.random.default_rng(rank)
    counts = [(3 * r) % 5 + (r == size - 1) for r in range(size)]
    total = sum(counts)
    x = rng.standard_normal(total).astype(np.float32)
    out: dict[str, Any] = {
        "allreduce": world.allreduce(x),
        "max": world.allreduce(x, "max"),
        "gather": world.allgatherv(np.full(counts[rank], rank, np.int64)),
        "scatter": world.reduce_scatterv(x, counts),
        "quantised": world.reduce_scatterv(x, counts, precision="int8", step=3),
        "alltoall": world.alltoallv(np.arange(size, dtype=np.int32), [1] * size),
    }
    world.barrier()
    group = world.group([r for r in range(size) if r % 2 == rank % 2])
    out["group"] = group.allreduce(np.array([rank], np.int64))
    out["transport"] = world.transport
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_collective_gives_what_it_gives_without_a_link(ranks: int) -> None:
    far = dcp.launch(everything, ranks, link=LINK)
    near = dcp.launch(everything, ranks)
    for here, there in zip(far, near, strict=True):
        assert here.pop("transport") == "emulated"
        there.pop("transport")
        for name in there:
            np.testing.assert_array_equal(here[name], there[name], err_msg=name)


def test_data_takes_what_the_model_says() -> None:
    """2 ranks, 4 MB each way at 100 MB/s: 40 ms and the latency, by the traffic counters."""

    def work(world: Any) -> tuple[float, int]:
        before = world.traffic()
        world.allreduce(np.ones(1 << 20, np.float32))
        after = world.traffic()
        return after.move_s - before.move_s, after.received_bytes - before.received_bytes

    for moved_s, received in dcp.launch(work, 2, link=LINK):
        assert moved_s >= (1 << 22) / 1e8
        assert received == 1 << 22


def test_ranks_of_a_machine_do_not_use_the_link() -> None:
    def work(world: Any) -> float:
        before = world.traffic()
        pair = world.group([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
        for _ in range(3):
            pair.allreduce(np.ones(1 << 20, np.float32))
        return world.traffic().move_s - before.move_s + pair.traffic().move_s

    link = Link.parse("8Mbit,latency=0s,machine_ranks=2")  # across: four seconds a sum
    assert all(seconds < 4.0 for seconds in dcp.launch(work, 4, link=link))


def test_a_rank_that_fails_ends_those_that_wait_on_the_link() -> None:
    def work(world: Any) -> None:
        if world.rank == 1:
            raise ValueError("the second rank has had enough")
        world.allreduce(np.ones(4, np.float32))

    with pytest.raises(ValueError, match="had enough"):
        dcp.launch(work, 2, link=Link.parse("1kbit"))


def test_ranks_that_disagree_are_told() -> None:
    def work(world: Any) -> None:
        world.allreduce(np.ones(4 + world.rank, np.float32))

    with pytest.raises(dcp.MismatchError, match="allreduce of 4"):
        dcp.launch(work, 2, link=LINK)


def test_there_are_no_windows() -> None:
    def work(world: Any) -> str:
        try:
            dcp.fully_shard(dcp.Transformer1D.preset("tiny"), world)
        except dcp.UnsupportedError as error:
            return str(error)
        return ""

    with pytest.raises(dcp.UnsupportedError, match=r"plan\.windows=false"):
        message = dcp.launch(work, 1, link=LINK)[0]
        raise dcp.UnsupportedError(message)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_gathering_once_a_step_changes_no_bit(gather: str) -> None:
    """Weights, losses: those of `gather="layer"` in shared windows' stead."""
    config = dcp.Transformer1D.preset("tiny", num_hidden_layers=2)

    def work(world: Any, gather: str) -> tuple[str, list[float], list[int]]:
        text = dcp.data.TextFiles("stdlib", max_length=256)
        cost = dcp.CostModel.for_model(config)
        loader = dcp.Loader(text, world, cost, tokens_per_step=2048, rounds=True)
        losses, gathered = [], []
        with dcp.fully_shard(config, world, windows=False, gather=gather) as model:
            steps = iter(loader)
            for number in range(2):
                data = next(steps)
                result = model.step(
                    data.micro_batches,
                    scale=data.scale,
                    trainable=data.trainable,
                    lr=0.01,
                    step=number,
                    optimizer=dcp.optim.AdamW(lr=0.01),
                    plan_hash=data.plan.hash,
                    groups=data.plan.groups,
                )
                losses.append(result.loss)
                gathered.append(result.gathered_bytes)
            return model.parameters_sha256(), losses, gathered

    sha, losses, gathered = dcp.launch(work, 2, (gather,))[0]
    plain = dcp.launch(work, 2, ("layer",))[0]
    assert (sha, losses) == plain[:2]
    if gather == "step":
        assert all(bytes_ < other for bytes_, other in zip(gathered, plain[2], strict=True))


def test_plans_under_a_link_know_what_sharing_costs() -> None:
    tiny = dcp.Transformer1D.preset("tiny")
    near = dcp.CostModel.for_model(tiny)
    far = cost_under(near, tiny, Link.parse("10Mbit"))
    lengths = [4096, 64, 64]
    shared = dcp.plan(lengths, near, world_size=2)
    apart = dcp.plan(lengths, far, world_size=2)
    assert max(len(m.ranks) for m in shared.micro_batches) == 2
    assert max(len(m.ranks) for m in apart.micro_batches) == 1


def test_specifications_are_read_and_written() -> None:
    link = Link.parse("1Gbit, background=3, dwell=20s, latency=5us, duty=0.5, seed=7")
    assert (link.rate, link.background, link.dwell_s) == (1.25e8, 3, 20.0)
    assert link.latency_s == pytest.approx(5e-6)
    assert Link.parse(link.text) == link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0Gbit", "rate"),
        ("-1Gbit", "rate"),
        ("nanGbit", "rate"),
        ("1Gbit,backgrond=3", "did you mean 'background'"),
        ("1Gbit,background=-1", "background = -1"),
        ("1Gbit,background=65", "background = 65"),
        ("1Gbit,background=x", "is no number"),
        ("1Gbit,dwell=20h", "unit"),
        ("1Gbit,dwell=-1s", "dwell_s = -1"),
        ("1Gbit,duty=1", "duty = 1"),
        ("1Gbit,period=0s", "period_s = 0"),
        ("1Gbit,period=1us", "period_s = 1e-06 must be >= 0.001"),
        ("1Gbit,dwell=1us", "dwell_s = 1e-06 must be 0 or >= 0.001"),
        ("1Gbit,latency=2e9s", "latency_s = 2000000000.0 must lie in 0..3600"),
        ("1bit", "rate = 0.125 must be >= 1"),
        ("1Gbit,machine_ranks=0", "machine_ranks = 0"),
        ("1Gbit,seed=1,seed=2", "twice"),
        ("1Gbit,background", "KEY=VALUE"),
        ("", "rate"),
    ],
)
def test_impossible_links_are_errors(text: str, message: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=message):
        Link.parse(text)


keys = ("background", "dwell", "latency", "duty", "period", "machine_ranks", "seed")
pieces = st.sampled_from(
    ["1Gbit", "50MB", "1e3", "bit", ",", "=", "-", "nan", "1e999", "20s", "3", "ms", " ", *keys]
)


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=30), st.lists(pieces, max_size=12).map("".join)))
@example("1Gbit,seed=" + "9" * 5000)
def test_any_text_is_a_link_that_is_written_alike_or_an_error(text: str) -> None:
    try:
        link = Link.parse(text)
    except dcp.ArgumentError:
        return
    assert Link.parse(link.text) == link


@given(
    st.builds(
        Link,
        rate=st.floats(1, 1e15),
        background=st.integers(0, 64),
        dwell_s=st.one_of(st.just(0.0), st.floats(1e-3, 1e6)),
        latency_s=st.floats(0, 3600),
        duty=st.floats(1e-6, 0.999),
        period_s=st.floats(1e-3, 1e6),
        machine_ranks=st.integers(1, 100),
        seed=st.integers(0, 2**64 - 1),
    )
)
def test_every_link_is_written_as_it_is_read(link: Link) -> None:
    again = Link.parse(link.text)
    assert dataclasses.replace(again, rate=link.rate) == link
    assert again.rate == pytest.approx(link.rate, rel=1e-11)


def test_a_transfer_without_end_is_an_error() -> None:
    def work(world: Any) -> None:
        world.allreduce(np.ones(1 << 25, np.float32))

    with pytest.raises(dcp.ArgumentError, match="rate is too low"):
        dcp.launch(work, 2, link=Link.parse("1B"))


def test_machines_must_have_equally_many_ranks() -> None:
    with pytest.raises(dcp.ArgumentError, match="machine_ranks = 2 must divide the 3 ranks"):
        dcp.launch(everything, 3, link=Link.parse("1Gbit,machine_ranks=2"))
