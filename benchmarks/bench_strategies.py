"""Strategies in real training, 2 ranks, `stdlib`, the same sequences and losses for each.

    pytest benchmarks/bench_strategies.py

`dcp train --compare` trains with each strategy from the same seed; all losses of all steps must
agree before a figure counts. Without a cap, and under caps at which the longest document fits only
with full recompute, whatever shares it. Recorded in extra_info: tokens/s, idle share and memory of
each, how many times faster `dcp` is; and of the plans the share of work computed again and the
makespans over the bounds: how many times faster any plan could be after what the cost model says.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import process_tree
import pytest

import dcp

RANKS, STRATEGIES = 2, ("bucket", "packed", "inter", "dcp")
# longest document, tokens a step, cap in bytes, steps
CASES = {
    "no cap": (4096, 16384, None, 20),
    "60 MB": (4096, 16384, 60_000_000, 14),
    "160 MB, documents of 16,384": (16384, 65536, 160_000_000, 8),
}
ROUNDS = {"no cap": 2, "60 MB": 2, "160 MB, documents of 16,384": 1}


def compare(case: str, out: Path) -> list[dict]:
    longest, tokens, cap, steps = CASES[case]
    command = [sys.executable, "-m", "dcp", "train", "--preset", "tiny", "--data", "stdlib"]
    command += ["--ranks", str(RANKS), "--steps", str(steps), "--tokens-per-step", str(tokens)]
    command += [f"--set=data.max_length={longest}", "--set=train.eval_tokens=1"]
    command += [] if cap is None else ["--memory", str(cap)]
    process_tree.run([*command, "--compare", ",".join(STRATEGIES), "--json", str(out)])
    return json.loads(out.read_text())["compare"]


def plans_of(case: str, strategy: str) -> list[dcp.Plan]:
    """The plans of the case's steps, as each rank of `dcp train` makes them."""
    longest, tokens, cap, steps = CASES[case]
    loader = dcp.Loader(
        dcp.data.TextFiles("stdlib", max_length=longest),
        types.SimpleNamespace(rank=0, size=RANKS),
        dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny")),
        tokens_per_step=tokens,
        strategy=strategy,
        memory_bytes=cap,
    )
    return [step.plan for _, step in zip(range(steps), loader, strict=False)]


def over_bound(plans: list[dcp.Plan]) -> float:
    """Makespans over the bounds of the same steps: how much faster any plan could be."""
    return sum(plan.makespan for plan in plans) / sum(plan.bound for plan in plans)


@pytest.mark.parametrize("case", CASES)
def test_strategies(case: str, benchmark, tmp_path: Path) -> None:
    if CASES[case][2] is not None:
        cost = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny"))
        least = [
            cost.memory([CASES[case][0]], RANKS, r, world_size=RANKS) for r in ("full", "selective")
        ]
        assert least[0] <= CASES[case][2] < least[1], "the cap must force full recompute"
    runs: list[list[dict]] = []
    benchmark.pedantic(
        lambda: runs.append(compare(case, tmp_path / "out.json")), rounds=ROUNDS[case]
    )
    wanted = [step["loss"] for step in runs[0][0]["steps"]]
    for run in runs:
        for entry in run:
            got = [step["loss"] for step in entry["steps"]]
            assert max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True)) < 1e-5
    info = benchmark.extra_info
    speeds = {}
    for i, name in enumerate(STRATEGIES):
        entries = [run[i] for run in runs]
        speeds[name] = max(entry["tokens_per_s"] for entry in entries)
        steps, plans = entries[0]["steps"], plans_of(case, name)
        info[name] = {
            "tokens_per_s": round(speeds[name], 1),
            "idle_share": round(sum(s["idle_share"] for s in steps) / len(steps), 4),
            "peak_mib_a_rank": round(max(entries[0]["peak_memory_bytes"]["ranks"]) / 2**20, 1),
            "recompute_share": round(sum(p.recompute_share for p in plans) / len(plans), 4),
            "over_bound": round(over_bound(plans), 3),
        }
    info["dcp_over"] = {n: round(speeds["dcp"] / speeds[n], 3) for n in STRATEGIES if n != "dcp"}
