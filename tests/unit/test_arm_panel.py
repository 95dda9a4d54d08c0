"""What a person sees of a controlled run: lines, the panel, the closing table."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dcp import config
from dcp.cli import progress as progress_module
from dcp.cli.arm_panel import ControlView
from dcp.cli.progress import closing_table, progress

ARMS = [("fp32", 1), ("fp32", 1), ("int8", 1), ("int4", 4), ("int4", 4)]


def settings_of(*sets: str) -> Any:
    return config.load(sets=["control=joint", *sets], options={"steps": 5, "ranks": 2})


def documents() -> Any:
    stats = SimpleNamespace(documents=3, tokens=9, pieces=3, longer_than_max=0, dropped=False)
    return SimpleNamespace(name="text", stats=stats, lengths=np.array([3]), max_length=4096)


def events() -> list[dict[str, Any]]:
    out = []
    for step, (precision, multiple) in enumerate(ARMS):
        arm = {"precision": precision, "multiple": multiple}
        after = ARMS[min(step + 1, len(ARMS) - 1)]
        decision = {
            "arm": {"precision": after[0], "multiple": after[1]},
            "changed": int(after != ARMS[step]),
            "reasons": 6 if after[1] == 4 else 2,
            "bandwidth": 1.25e6 if step else None,
            "noise_tokens": 31234.5 if step > 2 else None,
            "predicted_s": 0.5 + step if step else None,
            "error": {"fp32": 0.0, "int8": 1.5e-4, "int4": None},
        }
        seen = {"arm": arm, "step_s": 0.75 + step, "compute_s": 0.04, "reduce_s": 0.2}
        common = {"step": step, "loss": 3.0 - step, "tokens": 100, "seconds": 0.5, "arm": arm}
        out.append({"kind": "step", "idle_share": None, "memory": {"held": 5}, **common})
        out.append({"kind": "control", "step": step, "observation": seen, "decision": decision})
    return out


def test_lines_say_every_change_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    with progress(settings_of("control.batch_multiples=1,4"), 10, documents()) as show:
        for event in events():
            show(event)
    lines = capsys.readouterr().err.splitlines()
    assert "controller joint over (fp32, bf16, int8, int4) x (1, 4)" in lines[2]
    changes = [line for line in lines if line.startswith("controller: ")]
    assert changes == [
        "controller: step 3: int8 x 1 (promises less time to the target; bandwidth 10.0 Mbit/s)",
        "controller: step 4: int4 x 4 (promises less time to the target, bandwidth jumped; "
        "bandwidth 10.0 Mbit/s)",
    ]
    assert next(line for line in lines if line.startswith("step 4/5")).endswith("int4 x 4")


def test_panel_shows_what_was_measured_and_predicted() -> None:
    from rich.console import Console

    view = ControlView("joint", 16384)
    to = io.StringIO()
    console = Console(file=to, width=100)
    console.print(view.panel())
    for event in events():
        if event["kind"] == "control":
            view.take(event)
            console.print(view.panel())
    first, last = to.getvalue().split("controller: joint")[1], to.getvalue().split("joint")[-1]
    assert "first step" in first
    for words in (
        "int4 x 4  (65,536 tokens a step, since step 4)",
        "bandwidth jumped",
        "10.0 Mbit/s",
        "31,234 tokens",
        "4.75 s, predicted 3.50 s; next 4.50 s",
        "computing 40 ms, gradients 0.20 s",
        "int8 1.5e-04",
        "2 fp32 x 1, 1 int8 x 1, 2 int4 x 4",
    ):
        assert words in last, words
    assert max(map(len, to.getvalue().splitlines())) <= 80


def document(**changes: Any) -> dict[str, Any]:
    steps = [e for e in events() if e["kind"] == "step"]
    return {
        "steps": steps,
        "tokens_per_s": None,
        "eval_loss": 2.75,
        "seconds_to_target": None,
        "skipped_steps": 0,
        "peak_memory_bytes": {"node": 5, "ranks": [5]},
        "parameters_sha256": "ab" * 32,
        **changes,
    }


def test_closing_table_says_how_often_each_arm_ran() -> None:
    to = io.StringIO()
    closing_table(document(), settings_of("train.target_loss=2.5"), to=to)
    text = " ".join(to.getvalue().split())
    assert "controller joint: fp32 x 1 40%, int4 x 4 40%, int8 x 1 20%" in text
    assert "not reached in 5 steps; held-out loss ends 0.2500 above 2.5" in text
    to = io.StringIO()
    bare = config.load(sets=["train.precision=int4"])
    closing_table(document(), bare, to=to)
    assert "gradients in int4" in " ".join(to.getvalue().split())
    assert "controller" not in to.getvalue()
