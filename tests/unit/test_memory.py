"""The memory promise: what a rank really holds stays under the plan's estimate and under the cap.

Ranks are processes (dcp.launch); each counts what the core holds (`ShardedModel.memory`). The cap
in these runs is the estimate itself, so a byte too many fails an allocation. NumPy's arrays, the
micro-batches among them, are not the core's and not counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp

CONFIG = dcp.Transformer1D(
    300, 64, 160, 3, 4, num_key_value_heads=2, max_position_embeddings=4096, dropout=0.1
)
# few parameters, and a rotary table that counts beside its activations
NARROW = dcp.Transformer1D(
    300, 64, 100, 6, 1, num_key_value_heads=1, head_dim=128, max_position_embeddings=8192
)
CHOICES: list[dict[str, int]] = [
    {}, {"mlp": 3}, {"layer": 3}, {"layer": 2, "mlp": 1}, {"layer": 1, "mlp": 2}, {"mlp": 2},
]  # fmt: skip


class MicroBatch(NamedTuple):
    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    weights: None
    row_ids: np.ndarray
    recompute: tuple[int, int]
    group: tuple[int, int]


def micro_batch(
    lengths: list[int], recompute: dict[str, int], group: tuple[int, int]
) -> MicroBatch:
    count = sum(lengths)
    tokens = (np.arange(count) * 7 % CONFIG.vocab_size).astype(np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    counts = (recompute.get("layer", 0), recompute.get("mlp", 0))
    return MicroBatch(tokens, offsets, tokens, None, np.arange(count), counts, group)


Work = list[tuple[list[int], dict[str, int]]]  # lengths and what is recomputed, in order


def train_under(
    world: Any, works: list[Work], share: float, compute_dtype: str = "float32"
) -> dict[str, int] | str:
    """Two steps over this rank's micro-batches under `share` of its estimate as the cap."""
    config = dataclasses.replace(CONFIG, compute_dtype=compute_dtype)
    cost = dcp.CostModel.for_model(config)
    work = works[world.rank]
    estimate = max(
        (cost.memory(lengths, 1, recompute, world_size=world.size) for lengths, recompute in work),
        default=cost.memory([], world_size=world.size),
    )
    _dcp.set_memory_cap(int(estimate * share))
    batches = [micro_batch(*part, (world.rank, 1)) for part in work]
    try:
        with dcp.fully_shard(config, world, seed=1) as model:
            for step in range(2):
                model.step(
                    batches, scale=1e-3, trainable=1000, lr=1e-3, step=step,
                    optimizer=dcp.optim.AdamW(),
                )  # fmt: skip
            return {"estimate": estimate, **model.memory()}
    except dcp.Error as error:
        return str(error)


def random_works(ranks: int, seed: int) -> list[Work]:
    """A few micro-batches a rank, single long sequences and many short ones, any choice."""
    rng = np.random.default_rng([ranks, seed])
    works: list[Work] = []
    for _ in range(ranks):
        work: Work = []
        for _ in range(int(rng.integers(0, 5))):
            tokens = int(rng.integers(1, 4096))
            pieces = int(rng.choice([1, 1, 2, 40]))
            lengths = np.diff(np.linspace(0, tokens, pieces + 1).astype(int)).tolist()
            work.append((lengths, CHOICES[int(rng.integers(len(CHOICES)))]))
        works.append(work)
    return works


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("seed", "compute_dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16")]
)
def test_ranks_hold_no_more_than_their_plan_says(ranks: int, seed: int, compute_dtype: str) -> None:
    """Under a cap of the estimate itself, whatever is recomputed, one choice after the other."""
    for result in dcp.launch(train_under, ranks, (random_works(ranks, seed), 1.0, compute_dtype)):
        assert isinstance(result, dict), result
        assert result["held"] <= result["peak"] <= result["estimate"]


def test_the_estimate_is_close() -> None:
    """Not far above what is held, so that a cap is used: with 3,000 tokens, by a fifth at most."""
    for first, compute_dtype in ((0, "float32"), (3, "float32"), (0, "bfloat16")):
        works: list[Work] = [[([2000, 1000], choice)] for choice in CHOICES[first : first + 3]]
        for result in dcp.launch(train_under, 3, (works, 1.0, compute_dtype)):
            assert isinstance(result, dict), result
            assert 0.8 * result["estimate"] <= result["peak"] <= result["estimate"]


def test_a_cap_that_is_too_low_is_an_error_on_all_ranks() -> None:
    """The counter counts: with three quarters of the estimate a pass does not fit."""
    work: Work = [([3000], {"layer": 3})]
    for result in dcp.launch(train_under, 2, ([work, []], 0.75)):
        assert isinstance(result, str) and "memory cap" in result


def train_plans(
    world: Any, plans: list[dict[str, Any]], config: dcp.Transformer1D
) -> list[dict[str, int]]:
    """A step of each plan under its own cap: what this rank held at most, and the estimates."""
    seen = []
    with dcp.fully_shard(config, world, seed=1) as model:
        for step, document in enumerate(plans):
            plan = dcp.Plan.from_json(document)
            batches = [
                micro_batch(
                    plan.lengths[list(m.sequences)].tolist(),
                    m.recompute,
                    (m.ranks[0], len(m.ranks)),
                )
                for m in plan.for_rank(world.rank)
            ]
            assert plan.memory_bytes is not None
            _dcp.set_memory_cap(plan.memory_bytes)
            model.step(
                batches, scale=1e-3, trainable=1000, lr=1e-3, step=step,
                optimizer=dcp.optim.AdamW(), groups=plan.groups,
            )  # fmt: skip
            estimate = max((m.bytes for m in plan.for_rank(world.rank)), default=0)
            seen.append({"estimate": estimate, "cap": plan.memory_bytes, **model.memory()})
    return seen


def plans_under_a_cap(
    ranks: int, share: float, longest: int, config: dcp.Transformer1D
) -> list[dict[str, Any]]:
    """Plans that recompute and share micro-batches, since the cap leaves little."""
    threads = max(1, _dcp.cpu_info()["cores"] // ranks)
    cost = dcp.CostModel.for_model(config, threads=threads)
    rng = np.random.default_rng(ranks)
    cap = int(share * cost.memory([longest], ranks, "full", world_size=ranks))
    made = []
    for strategy in ("dcp", "fixed-best", "dcp", "inter"):
        second = int(rng.integers(longest // 2, longest))
        lengths = np.append(rng.integers(1, 400, 25), [longest, second])
        options: dict[str, Any] = {"memory_bytes": cap, "strategy": strategy}
        made.append(dcp.plan(lengths, cost, world_size=ranks, **options).verify())
    assert any(m.recompute for p in made for m in p.micro_batches)
    assert any(p.groups for p in made)
    return [p.to_json() for p in made]


@pytest.mark.parametrize(
    ("ranks", "share", "compute_dtype"),
    [(2, 1.15, "float32"), (3, 1.15, "float32"), (3, 1.15, "bfloat16"), (4, 1.02, "float32")],
)
def test_planned_groups_stay_under_cap_and_estimate(
    ranks: int, share: float, compute_dtype: str
) -> None:
    """Real plans under a cap that forces groups and recompute; the cap is the core's as well."""
    config = dataclasses.replace(CONFIG, compute_dtype=compute_dtype)
    plans = plans_under_a_cap(ranks, share, 2500, config)
    for seen in dcp.launch(train_plans, ranks, (plans, config)):
        most = 0
        for step in seen:
            most = max(most, step["estimate"])
            assert step["peak"] <= step["cap"]
            assert step["peak"] <= most or step["estimate"] == 0


def train_alternating(world: Any) -> tuple[int, int]:
    """A long micro-batch of all ranks that drops everything, a short one that drops nothing."""
    cost = dcp.CostModel.for_model(NARROW)
    tokens = 4000
    group = cost.memory([tokens], 2, "full", world_size=2)
    short = tokens // 2
    while cost.memory([short], 1, "none", world_size=2) > group:
        short -= 1
    work = [
        micro_batch([tokens], {"layer": NARROW.num_hidden_layers}, (0, 2)),
        micro_batch([short], {}, (world.rank, 1)),
    ]
    with dcp.fully_shard(NARROW, world, seed=1) as model:
        model.loss_and_gradients(work[::-1], scale=1e-3, groups=[(0, 2)])
        return model.memory()["peak"], group


def test_long_and_short_by_turns_stay_under_the_estimate() -> None:
    """The window of a group is as large as the short one needs, the rotary table as the long."""
    for peak, estimate in dcp.launch(train_alternating, 2):
        assert peak <= estimate


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(1, 40000),
    choice=st.sampled_from(CHOICES),
    threads=st.integers(1, 4),
    world=st.integers(1, 16),
    compute_dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_cost_model_covers_what_the_core_reckons(
    tokens: int, choice: dict[str, int], threads: int, world: int, compute_dtype: str
) -> None:
    """For any number of tokens and threads, also between those that it was fitted to."""
    config = dataclasses.replace(CONFIG, compute_dtype=compute_dtype)
    cost = dcp.CostModel.for_model(config, threads=threads)
    count = config.parameter_count()
    held = config.activation_bytes(tokens, threads=threads, recompute=choice)
    estimate = cost.memory([tokens], 1, choice, world_size=world)
    assert estimate >= held + 4 * count + 12 * count / world
