"""What a controller does, while a run trains: a panel on a terminal, lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dcp import controller

__all__ = ["ControlView", "arm_text", "bandwidth_text", "reason_text"]

HISTORY = 40  # steps of the strip of arms
WIDTH = 80  # of the panel: a fixed one does not jump


def arm_text(arm: dict[str, Any] | None) -> str:
    """Return an arm as text: ``int8 x 4``; None is fp32 without a controller.

    Examples
    --------
    >>> from dcp.cli.arm_panel import arm_text
    >>> arm_text({"precision": "int8", "multiple": 4}), arm_text(None)
    ('int8 x 4', 'fp32 x 1')
    """
    return f"{arm['precision']} x {arm['multiple']}" if arm is not None else "fp32 x 1"


def bandwidth_text(bytes_per_s: float | None) -> str:
    """Return bytes a second as bits, the unit that links are given in.

    Examples
    --------
    >>> from dcp.cli.arm_panel import bandwidth_text
    >>> bandwidth_text(6.25e6), bandwidth_text(2.5e9), bandwidth_text(None)
    ('50.0 Mbit/s', '20.0 Gbit/s', '-')
    """
    if bytes_per_s is None:
        return "-"
    bits = 8.0 * bytes_per_s
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M")):
        if bits < limit:
            return f"{bits / limit * 1e3:.1f} {unit}bit/s"
    return f"{bits / 1e9:.1f} Gbit/s"


def reason_text(reasons: int) -> str:
    """Return the reasons of a decision in words.

    Examples
    --------
    >>> from dcp.cli.arm_panel import reason_text
    >>> reason_text(2 | 4), reason_text(0)
    ('promises less time to the target, bandwidth jumped', '-')
    """
    return ", ".join(controller.reasons(reasons)) or "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.0f} ms"


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens"


@dataclass
class ControlView:
    """Follows the events of a controlled run.

    Parameters
    ----------
    policy : str
    tokens_per_step : int
        Of multiple 1.

    Examples
    --------
    >>> from dcp.cli.arm_panel import ControlView
    >>> view = ControlView("joint", 4096)
    >>> arm = {"precision": "int8", "multiple": 2}
    >>> view.take({"step": 3, "observation": {"arm": arm, "step_s": 0.5, "compute_s": 0.2},
    ...            "decision": {"arm": arm, "changed": 1, "reasons": 2, "bandwidth": 1e6,
    ...                         "noise_tokens": None, "predicted_s": 0.4}})
    >>> view.change_line()
    'step 5: int8 x 2 (promises less time to the target; bandwidth 8.0 Mbit/s)'
    """

    policy: str
    tokens_per_step: int
    measured_s: float | None = None  # of the newest step
    expected_s: float | None = None  # what the decision before it had predicted
    decision: dict[str, Any] = field(default_factory=dict)
    observation: dict[str, Any] = field(default_factory=dict)
    changed_at: int = 1  # first step of the arm, counted from 1 as progress is
    reason: str = "first choice"  # of the last change
    history: list[str] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Take in what was observed and decided after a step.

        Examples
        --------
        See the class.
        """
        self.expected_s = self.decision.get("predicted_s")
        self.observation, self.decision = event["observation"], event["decision"]
        self.measured_s = self.observation["step_s"]
        self.history = [*self.history, arm_text(self.observation["arm"])][-HISTORY:]
        if self.decision["changed"]:
            self.changed_at = event["step"] + 2
            self.reason = reason_text(self.decision["reasons"])

    @property
    def changed(self) -> bool:
        """Whether the newest decision was for another arm.

        Examples
        --------
        See the class.
        """
        return bool(self.decision.get("changed"))

    def change_line(self) -> str:
        """One line about a change.

        Examples
        --------
        See the class.
        """
        decision = self.decision
        parts = [f"bandwidth {bandwidth_text(decision['bandwidth'])}"]
        if decision["noise_tokens"] is not None:
            parts.append(f"noise scale {_tokens(decision['noise_tokens'])}")
        return (
            f"step {self.changed_at}: {arm_text(decision['arm'])} "
            f"({self.reason}; {', '.join(parts)})"
        )

    def rows(self) -> list[tuple[str, str]]:
        """What the panel says, (title, text).

        Examples
        --------
        >>> from dcp.cli.arm_panel import ControlView
        >>> ControlView("static", 4096).rows()
        [('arm', 'first step')]
        """
        if not self.decision:
            return [("arm", "first step")]
        decision, seen = self.decision, self.observation
        tokens = decision["arm"]["multiple"] * self.tokens_per_step
        moving = [seen.get(k) for k in ("reduce_s", "gather_s")]
        parts = [f"computing {_seconds(seen['compute_s'])}"]
        parts += [
            f"{name} {_seconds(value)}"
            for name, value in zip(("gradients", "weights"), moving, strict=True)
            if value is not None
        ]
        errors = {k: v for k, v in decision.get("error", {}).items() if v is not None}
        rows = [
            (
                "arm",
                f"{arm_text(decision['arm'])}  ({tokens:,} tokens a step, since step "
                f"{self.changed_at})",
            ),
            ("last change", self.reason),
            ("bandwidth", bandwidth_text(decision["bandwidth"])),
            ("noise scale", _tokens(decision["noise_tokens"])),
            (
                "step time",
                f"{_seconds(self.measured_s)}, predicted {_seconds(self.expected_s)}; next "
                f"{_seconds(decision['predicted_s'])}",
            ),
            ("of it", ", ".join(parts)),
        ]
        if errors:
            shown = "  ".join(f"{name} {value:.1e}" for name, value in errors.items() if value > 0)
            rows.append(("code error", shown or "-"))
        return [*rows, ("arms so far", self.strip())]

    def strip(self) -> str:
        """The last steps' arms, runs of equal ones joined.

        Examples
        --------
        >>> from dcp.cli.arm_panel import ControlView
        >>> ControlView("joint", 1, history=["fp32 x 1", "int8 x 2", "int8 x 2"]).strip()
        '1 fp32 x 1, 2 int8 x 2'
        """
        runs: list[list[Any]] = []
        for name in self.history:
            if runs and runs[-1][1] == name:
                runs[-1][0] += 1
            else:
                runs.append([1, name])
        return ", ".join(f"{count} {name}" for count, name in runs[-4:])

    def panel(self) -> Any:
        """The panel, for rich.

        Examples
        --------
        >>> from dcp.cli.arm_panel import ControlView
        >>> ControlView("joint", 4096).panel().title
        'controller: joint'
        """
        from rich.panel import Panel
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for title, text in self.rows():
            table.add_row(title, f"[bold]{text}[/bold]" if title == "arm" else text)
        return Panel(table, title=f"controller: {self.policy}", title_align="left", width=WIDTH)
