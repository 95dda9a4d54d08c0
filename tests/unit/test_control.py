"""The controller: its formulas, estimators and policies, against Monte-Carlo and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp, ops

PRECISIONS = ("fp32", "bf16", "int8", "int4")
BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.25, "int4": 4.25}
ERROR = {"fp32": 0.0, "bf16": 3e-6, "int8": 1e-4, "int4": 0.03}
BYTES = 1e6  # of the fp32 gradient
CALLS = {"fp32": 8.0, "bf16": 1.0, "int8": 1.0, "int4": 1.0}  # of a reduction
GATHER_CALLS = 4


def make(policy: str = "joint", **options: Any) -> _dcp.Controller:
    keywords: dict[str, Any] = {
        "precisions": PRECISIONS,
        "base": "fp32",
        "multiples": [1, 2, 4, 8],
        "tokens_per_step": 1000,
        "rank_count": 4,
        "lr_rule": "sqrt_gain",
    }
    return _dcp.Controller(policy=policy, **(keywords | options))


def inputs() -> dict[str, dict[str, float]]:
    """What the world says of a reduction in every precision."""
    return {
        "reduce_bytes": {q: BYTES * BITS[q] / 32 for q in PRECISIONS},
        "reduce_calls": CALLS,
        "codec_s": dict.fromkeys(PRECISIONS, 0.0),
    }


def truth(
    arm: dict[str, Any], bandwidth: float, noise: float, compute_s: float, latency: float = 0.0
) -> float:
    """The objective of an arm by the formulas of DESIGN 8, over S_min."""
    q, a = arm["precision"], arm["multiple"]
    steps = 1 + ERROR[q] / 4 + (1 + ERROR[q]) * noise / (1000 * a)
    move_s = BYTES * BITS[q] / 32 / bandwidth + (CALLS[q] + GATHER_CALLS) * latency
    return steps * (a * compute_s + move_s)


def seen(
    step: int,
    arm: dict[str, Any],
    *,
    bandwidth: float,
    noise: float,
    compute_s: float = 0.1,
    latency: float = 0.0,
) -> dict[str, Any]:
    """What a step of an arm shows, without scatter: |G|^2 = 1."""
    q, a = arm["precision"], arm["multiple"]
    tokens, moved = 1000 * a, BYTES * BITS[q] / 32
    count, move_s = 8 * a, moved / bandwidth + (CALLS[q] + GATHER_CALLS) * latency
    return {
        "step": step,
        "arm": arm,
        "tokens": tokens,
        "step_s": a * compute_s + move_s,
        "compute_s": a * compute_s,
        "codec_s": 0.0,
        "reduce_s": move_s,
        "reduce_bytes": moved,
        "latency_s": latency,
        "gather_calls": GATHER_CALLS,
        "loss": 3.0,
        "micro_batch_count": count,
        "micro_squares": tokens * (1 + noise * count / tokens),
        "mean_squares": 1 + noise / tokens,
        "reduce_error": 0.0,
        "error": ERROR | {"fp8_e4m3": None, "fp8_e5m2": None},
    }


def drive(controller: _dcp.Controller, steps: int, first: int = 0, **world: Any) -> dict[str, Any]:
    """Let it decide for so many steps; the last decision."""
    decision = controller.start() if first == 0 else world.pop("decision")
    for step in range(first, first + steps):
        decision = controller.decide(seen(step, decision["arm"], **world), **inputs())
        assert decision["step"] == step + 1
    return decision


def arms(precisions: Any = PRECISIONS, multiples: Any = (1, 2, 4, 8)) -> list[dict[str, Any]]:
    return [{"precision": q, "multiple": a} for q in precisions for a in multiples]


worlds = st.fixed_dictionaries(
    {
        "bandwidth": st.floats(1e5, 1e9),
        "noise": st.floats(10, 1e5),
        "compute_s": st.floats(0.01, 1.0),
        "latency": st.sampled_from([0.0, 1e-3, 1e-2]),
    }
)


@given(worlds)
def test_joint_is_within_its_hysteresis_of_the_best_pair(world: dict[str, float]) -> None:
    decision = drive(make(), 40, **world)
    best = min(truth(arm, **world) for arm in arms())
    assert truth(decision["arm"], **world) <= best / (1 - 0.05) * (1 + 1e-6)
    assert decision["noise_tokens"] == pytest.approx(world["noise"], rel=1e-3)
    assert decision["bandwidth"] == pytest.approx(world["bandwidth"], rel=1e-6)


@given(worlds)
def test_policies_are_what_they_are_defined_as(world: dict[str, float]) -> None:
    chosen = {
        policy: drive(make(policy, hysteresis=-1.0), 40, **world)["arm"]
        for policy in ("static", "precision", "accumulation", "decoupled", "joint")
    }
    assert chosen["static"] == {"precision": "fp32", "multiple": 1}
    assert chosen["precision"]["multiple"] == 1
    assert chosen["accumulation"]["precision"] == "fp32"
    assert chosen["decoupled"] == {
        "precision": chosen["precision"]["precision"],
        "multiple": chosen["accumulation"]["multiple"],
    }
    for policy, among in (
        ("precision", arms(multiples=(1,))),
        ("accumulation", arms(precisions=("fp32",))),
        ("joint", arms()),
    ):
        best = min(truth(arm, **world) for arm in among)
        assert truth(chosen[policy], **world) <= best * (1 + 1e-3)


def test_the_closed_form_of_the_best_multiple() -> None:
    """facts 3.3: A* = sqrt(beta t_x / (k t_c)), on a fine grid."""
    grid = list(range(1, 17))
    noise, compute_s, bandwidth = 8000.0, 0.1, 2e6
    best = math.sqrt(noise / 1000 * (BYTES / bandwidth) / compute_s)  # beta = B_s / B, k = 1
    controller = make("accumulation", multiples=grid, hysteresis=-1.0)
    world = {"bandwidth": bandwidth, "noise": noise, "compute_s": compute_s}
    assert abs(drive(controller, 40, **world)["arm"]["multiple"] - best) <= 1


def test_a_jump_of_the_bandwidth_is_followed_within_a_few_steps() -> None:
    controller = make()
    before = drive(controller, 30, bandwidth=1e9, noise=500.0)
    after = drive(controller, 4, first=30, decision=before, bandwidth=1e6, noise=500.0)
    assert after["bandwidth"] == pytest.approx(1e6, rel=0.2)
    assert truth(after["arm"], 1e6, 500.0, 0.1) < truth(before["arm"], 1e6, 500.0, 0.1)


def test_latency_is_told_apart_from_bandwidth() -> None:
    """What 12 calls of fp32 wait for is no want of bandwidth, and fewer bits do not mend it."""
    world = {"bandwidth": 1e7, "noise": 500.0, "latency": 0.05}
    decision = drive(make("static"), 20, **world)
    assert decision["bandwidth"] == pytest.approx(1e7, rel=1e-9)
    assert decision["latency_s"] == pytest.approx(0.05, rel=1e-9)
    chosen = drive(make(), 40, **world)
    assert chosen["bandwidth"] == pytest.approx(1e7, rel=1e-9)
    move_s = inputs()["reduce_bytes"][chosen["arm"]["precision"]] / 1e7 + 5 * 0.05
    assert chosen["predicted_s"] == pytest.approx(0.1 * chosen["arm"]["multiple"] + move_s)


def test_noise_in_measurements_does_not_move_the_arm() -> None:
    rng = np.random.default_rng(3)
    controller, changes = make(), 0
    decision = drive(controller, 30, bandwidth=3e6, noise=3000.0)
    for step in range(30, 230):
        observation = seen(step, decision["arm"], bandwidth=3e6, noise=3000.0)
        for key in ("step_s", "compute_s", "reduce_s"):
            observation[key] *= math.exp(0.1 * rng.standard_normal())
        decision = controller.decide(observation, **inputs())
        changes += decision["changed"]
    assert changes <= 6


def test_a_step_that_was_skipped_teaches_nothing() -> None:
    controller = make()
    decision = drive(controller, 10, bandwidth=1e6, noise=500.0)
    state = controller.state()
    bad = seen(10, decision["arm"], bandwidth=1e2, noise=1.0) | {"skipped": 1, "loss": None}
    after = controller.decide(bad, **inputs())
    assert controller.state() == state
    assert (after["arm"], after["reasons"]) == (decision["arm"], 64)


def test_a_precision_with_a_large_error_is_left_alone() -> None:
    controller = make(error_limit=0.01)
    assert drive(controller, 30, bandwidth=1e3, noise=500.0)["arm"]["precision"] == "int8"


def test_a_rising_loss_is_blamed_on_the_precision_and_a_noisy_one_is_not() -> None:
    def run(slope: float) -> list[int]:
        rng = np.random.default_rng(0)
        controller = make("precision")
        decision, reasons = controller.start(), []
        for step in range(120):
            observation = seen(step, decision["arm"], bandwidth=1e6, noise=500.0)
            observation["loss"] = 3.0 + slope * step + 0.05 * rng.standard_normal()
            decision = controller.decide(observation, **inputs())
            reasons.append(decision["reasons"])
        return reasons

    assert any(r & 32 for r in run(0.05))
    assert not any(r & 32 for r in run(0.0))
    assert not any(r & 32 for r in run(-0.01))


def test_an_arm_that_the_controller_did_not_choose_is_an_error() -> None:
    controller = make()
    wrong = seen(0, {"precision": "int8", "multiple": 1}, bandwidth=1e6, noise=1.0)
    with pytest.raises(dcp.StateError, match=r"ran with int8 x 1.*decided on fp32 x 1"):
        controller.decide(wrong, **inputs())


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(1e5, 1e9), st.floats(1, 1e6)), min_size=2, max_size=40))
def test_state_is_all_there_is(trace: list[tuple[float, float]]) -> None:
    """A controller that takes another's state decides bit for bit alike from there on."""
    one = make()
    decision = one.start()
    for step, (bandwidth, noise) in enumerate(trace):
        two = make()
        two.load_state(one.state())
        observation = seen(step, decision["arm"], bandwidth=bandwidth, noise=noise)
        decision = one.decide(observation, **inputs())
        assert two.decide(observation, **inputs()) == decision
        assert two.state() == one.state()


def test_a_state_of_another_grid_or_version_is_refused() -> None:
    state = make().state()
    with pytest.raises(dcp.ArgumentError, match="another policy, grid"):
        make(multiples=[1, 2]).load_state(state)
    with pytest.raises(dcp.ArgumentError, match="version"):
        make().load_state(b"\0" * len(state))
    with pytest.raises(dcp.ArgumentError, match="words"):
        make().load_state(state[:-8])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": []}, "precisions: 0 given"),
        ({"precisions": ["int8", "int8"], "base": "int8"}, "int8 is there twice"),
        ({"precisions": ["int3"]}, "'int3' must be one of fp32"),
        ({"base": "fp8_e4m3"}, "base = fp8_e4m3 must be one"),
        ({"multiples": []}, "batch multiples: 0 given"),
        ({"multiples": list(range(1, 18))}, "must be 1 to 16"),
        ({"multiples": [0, 1]}, r"\[0\] = 0 must be >= 1"),
        ({"multiples": [2, 2]}, r"\[1\] = 2 must be >= 3"),
        ({"tokens_per_step": 0}, "tokens_per_step = 0"),
        ({"rank_count": 0}, "rank_count = 0"),
        ({"hysteresis": 1.0}, "hysteresis = 1"),
        ({"hysteresis": math.nan}, "hysteresis = nan"),
        ({"bandwidth_mean": 2.0}, "bandwidth_mean = 2"),
        ({"noise_mean": -1.0}, "noise_mean = -1"),
        ({"noise_steps": -1}, "noise_steps = -1"),
        ({"slope_limit": -1.0}, "slope_limit = -1"),
        ({"policy": "best"}, "policy 'best'"),
        ({"lr_rule": "linear"}, "lr_rule 'linear'"),
    ],
)
def test_options_that_break_their_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=message):
        make(**options)


def test_the_learning_rate_follows_the_square_root_of_the_gain() -> None:
    noise = 8000.0
    decision = drive(make("accumulation"), 60, bandwidth=1e5, noise=noise)
    k, f = decision["arm"]["multiple"], noise / 1000
    assert k > 1
    assert decision["lr_factor"] == pytest.approx(math.sqrt((1 + f) / (1 + f / k)), rel=0.1)
    assert drive(make("static"), 60, bandwidth=1e5, noise=noise)["lr_factor"] == 1.0


def test_the_steps_formula_is_what_quantised_gradients_do() -> None:
    """facts 3.2: E |g~|^2 / |G|^2 = 1 + w1 / W + (1 + w1) B_s / B, for int4 of 8 ranks."""
    d, ranks, draws, noise_over_batch = 256, 8, 400, 4.0
    rng = np.random.default_rng(1)
    g = rng.standard_normal(d).astype(np.float32)
    g /= np.linalg.norm(g)
    ratio, error = [], []
    for draw in range(draws):
        # each rank's noise: W times the variance of the mean's
        own = g + rng.standard_normal((ranks, d)).astype(np.float32) * math.sqrt(
            ranks * noise_over_batch / d
        )
        sent = [
            ops.dequantise(ops.quantise(x, "int4", stream=draw * ranks + r), d, "int4")
            for r, x in enumerate(own)
        ]
        ratio.append(float(np.sum(np.mean(sent, axis=0, dtype=np.float64) ** 2)))
        error.append(np.sum((own - sent) ** 2) / np.sum(own**2))
    w = float(np.mean(error))
    expected = 1 + w / ranks + (1 + w) * noise_over_batch
    assert np.mean(ratio) == pytest.approx(
        expected, rel=4 * np.std(ratio) / math.sqrt(draws) / expected
    )


@pytest.mark.parametrize("quantised", [False, True])
def test_the_noise_scale_of_gradients_with_known_noise(quantised: bool) -> None:
    """Unequal micro-batches; with quantised sums the error they add is taken off."""
    d, noise, draws = 512, 3000.0, 300
    rng = np.random.default_rng(2)
    g = rng.standard_normal(d)
    g /= np.linalg.norm(g)
    sizes = np.array([50, 400, 150, 300, 100, 250, 600, 150])  # tokens
    controller = make("static", noise_mean=0.01, precisions=["int4"], base="int4")
    biased = []
    for step in range(draws):
        micro = g + rng.standard_normal((len(sizes), d)) * np.sqrt(noise / d / sizes)[:, None]
        total = (sizes[:, None] * micro).sum(0) / sizes.sum()
        added = rng.standard_normal(d) * math.sqrt(0.2 / d) if quantised else np.zeros(d)
        observation = seen(step, controller.start()["arm"], bandwidth=1e6, noise=1.0) | {
            "tokens": int(sizes.sum()),
            "micro_batch_count": len(sizes),
            "micro_squares": float((sizes * (micro**2).sum(1)).sum()),
            "mean_squares": float(((total + added) ** 2).sum()),
            "reduce_error": float((added**2).sum()),
        }
        decision = controller.decide(observation, **inputs())
        biased.append(observation["mean_squares"])
    assert decision["noise_tokens"] == pytest.approx(noise, rel=0.06)
    if quantised:  # what it would be taken for without
        assert np.mean(biased) - (1 + noise / sizes.sum()) > 0.15


@pytest.mark.parametrize("metric", ["", "adam_"])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_noise_scale_of_steps_of_one_micro_batch(quantised: bool, metric: str) -> None:
    """Pairs of steps of unequal tokens show it, in the metric that counts."""
    d, noise, draws = 512, 3000.0, 600
    rng = np.random.default_rng(4)
    g = rng.standard_normal(d)
    g /= np.linalg.norm(g)
    controller = make(
        "static",
        noise_mean=0.005,
        precisions=["int4"],
        base="int4",
        lr_rule="sqrt_gain" if metric else "gain",
    )
    before = None
    for step in range(draws):
        tokens = int(rng.integers(500, 2500))
        added = rng.standard_normal(d) * math.sqrt(0.2 / d) if quantised else np.zeros(d)
        sent = g + rng.standard_normal(d) * math.sqrt(noise / d / tokens) + added
        own = {
            "micro_squares": tokens * float((sent**2).sum()),
            "mean_squares": float((sent**2).sum()),
            "reduce_error": float((added**2).sum()),
            "step_difference": None if before is None else float(((sent - before) ** 2).sum()),
        }
        observation = seen(step, controller.start()["arm"], bandwidth=1e6, noise=1.0)
        observation |= {"tokens": tokens, "micro_batch_count": 1}
        observation |= {metric + name: value for name, value in own.items()}
        decision = controller.decide(observation, **inputs())
        assert step > 0 or decision["noise_tokens"] is None, "no pair yet"
        before = sent
    assert decision["noise_tokens"] == pytest.approx(noise, rel=0.08)


def test_long_sequences_that_fill_steps_count_as_noise() -> None:
    """Steps of short sequences alone, the only ones that show noise inside, know little of it."""
    controller = make("static", precisions=["fp32"], base="fp32")
    arm = controller.start()["arm"]
    for step in range(60):
        observation = seen(step, arm, bandwidth=1e6, noise=100.0)  # of eight short ones
        if step % 4:  # long ones, all alike inside: |G|^2 = 1 and 4,000 / 1,000 of noise
            observation |= {
                "micro_batch_count": 1,
                "micro_squares": 1000 * 5.0,
                "mean_squares": 5.0,
                "step_difference": 4000.0 * (1 / 1000 + 1 / 1000) if step % 4 > 1 else None,
            }
        decision = controller.decide(observation, **inputs())
    assert 1000 < decision["noise_tokens"] < 4000
