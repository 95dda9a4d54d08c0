"""Refit a cost model to what the steps of a run really took; an option, off by default.

Since the next plans depend on the clock then, every update is logged with all that it depended on,
and `replay` gives the same models from the log. Its input is what all ranks were told of all ranks,
and its arithmetic rounds alike everywhere: all ranks hold the same model after every update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dcp import fitting
from dcp._dcp import ArgumentError
from dcp.cost import CostModel, whole
from dcp.planning import Plan

__all__ = ["Refit", "replay"]

SCHEMA = 1
# Terms that move together: what is the same work, or what a few steps cannot tell apart.
_SCALED: dict[str, tuple[str, ...]] = {
    "latency": ("latency_s",),
    "tokens": ("token_s", "layer_token_s", "mlp_token_s"),
    "squares": ("square_s", "layer_square_s"),
    "groups": ("group_s", "hop_s", "gather_s", "exchange_s"),
}
# Weight of "as it is" against one observed rank and step: keeps what was not seen.
_PRIOR = 0.1


class Refit:
    """Scales a cost model's terms to the measured times of the last steps.

    Parameters
    ----------
    cost : CostModel
        To begin with.
    window : int
        Steps that count, at least 1.
    log : callable, optional
        Called with a JSON object per update; give one on rank 0 only.

    Attributes
    ----------
    cost : CostModel
        Of now: for the next step that is planned.
    scales : dict
        What the terms of the first one are multiplied with: latency, tokens, squares, groups.

    Examples
    --------
    >>> import dcp
    >>> from dcp.refit import Refit, replay
    >>> log = []
    >>> refit = Refit(dcp.CostModel(token_s=1e-6), log=log.append)
    >>> for step in range(20):
    ...     plan = dcp.plan([4000, 2000, 1000], refit.cost, world_size=2)
    ...     new = refit.update(step, plan, [8e-3, 6e-3])
    >>> 1.8e-6 < new.token_s < 2.1e-6
    True
    >>> replay(dcp.CostModel(token_s=1e-6), log)[-1] == new
    True
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        window: int = 32,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.base = self.cost = cost
        self.window = whole("window", window, 1)
        self.scales = dict.fromkeys(_SCALED, 1.0)
        self._log = log
        self._steps: list[tuple[int, list[list[float]], list[float]]] = []

    def update(self, step: int, plan: Plan, busy_s: Sequence[float]) -> CostModel:
        """Take in one step, and return the cost model for plans from now on.

        Parameters
        ----------
        step : int
            Its number, for the log.
        plan : Plan
            That ran, whatever cost model it was made with.
        busy_s : sequence of float
            Measured seconds of every rank in its micro-batches: the same on all ranks
            (`dcp.sharded.StepResult.busy_s`).

        Raises
        ------
        dcp.ArgumentError
            Not one time a rank, or one that is negative or not finite.

        Examples
        --------
        See the class.
        """
        busy = [float(b) for b in busy_s]
        if len(busy) != plan.world_size:
            raise ArgumentError(f"busy_s has {len(busy)} times for {plan.world_size} ranks")
        for rank, seconds in enumerate(busy):
            if not 0 <= seconds < float("inf"):
                raise ArgumentError(f"busy_s[{rank}] = {seconds} must be finite and >= 0")
        return self._take(whole("step", step, 0), self._terms(plan), busy)

    def _take(self, step: int, terms: list[list[float]], busy: list[float]) -> CostModel:
        self._steps = [*self._steps, (step, terms, busy)][-self.window :]
        self._fit()
        if self._log is not None:
            self._log(
                {
                    "schema": SCHEMA,
                    "kind": "refit",
                    "step": step,
                    "terms": terms,
                    "busy_s": busy,
                    "scales": dict(self.scales),
                }
            )
        return self.cost

    def _terms(self, plan: Plan) -> list[list[float]]:
        """Predicted seconds of each rank by group of terms, with the first cost model."""
        parts = [_only(self.base, names) for names in _SCALED.values()]
        sums = [[0.0] * len(parts) for _ in range(plan.world_size)]
        lengths = plan.lengths
        for batch in plan.micro_batches:
            mine = lengths[list(batch.sequences)]
            each = [part.time(mine, batch.ranks, batch.recompute) for part in parts]
            for rank in batch.ranks:
                sums[rank] = [a + b for a, b in zip(sums[rank], each, strict=True)]
        return sums

    def _fit(self) -> None:
        rows, values = [], []
        for _, terms, busy in self._steps:
            for row, seconds in zip(terms, busy, strict=True):
                if seconds > 0 and sum(row) > 0:
                    rows.append([t / seconds for t in row])
                    values.append(1.0)
        count = len(_SCALED)
        rows += [[_PRIOR if i == j else 0.0 for j in range(count)] for i in range(count)]
        values += [_PRIOR] * count
        found = fitting.nnls(np.array(rows), np.array(values)).tolist()
        self.scales = dict(zip(_SCALED, found, strict=True))
        fields: dict[str, Any] = {}
        for label, names in _SCALED.items():
            for name in names:
                value = getattr(self.base, name)
                scale = self.scales[label]
                fields[name] = (
                    tuple(scale * v for v in value) if isinstance(value, tuple) else scale * value
                )
        self.cost = dataclasses.replace(self.base, **fields)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain data.

        Examples
        --------
        >>> import dcp
        >>> from dcp.refit import Refit
        >>> state = Refit(dcp.CostModel(token_s=1e-6)).state_dict()
        >>> Refit(dcp.CostModel()).load_state_dict(state).base.token_s
        1e-06
        """
        return {
            "schema": SCHEMA,
            "window": self.window,
            "cost": self.base.to_json(),
            "steps": [
                {"step": step, "terms": terms, "busy_s": busy} for step, terms, busy in self._steps
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Refit:
        """Go on from what `state_dict` gave; returns itself.

        Raises
        ------
        dcp.ArgumentError
            Another schema, or a field is missing.

        Examples
        --------
        See `state_dict`.
        """
        if state.get("schema") != SCHEMA:
            raise ArgumentError(
                f"refit state has schema {state.get('schema')!r}, this version reads {SCHEMA}"
            )
        try:
            self.base = CostModel.from_json(state["cost"])
            self.window = whole("window", state["window"], 1)
            self._steps = [_parse(record) for record in state["steps"]]
        except KeyError as error:
            raise ArgumentError(f"refit state lacks the field {error}") from error
        self.scales = dict.fromkeys(_SCALED, 1.0)
        self.cost = self.base
        if self._steps:
            self._fit()
        return self


def replay(
    cost: CostModel, log: Iterable[Mapping[str, Any]], *, window: int = 32
) -> list[CostModel]:
    """The cost models after each update of a log, bit for bit.

    Parameters
    ----------
    cost : CostModel
        That the run began with.
    log : iterable of mapping
        What `Refit` logged, in order.
    window : int
        As it was in the run.

    Raises
    ------
    dcp.ArgumentError
        A record is not of a refit.

    Examples
    --------
    See `Refit`.
    """
    refit = Refit(cost, window=window)
    models = []
    for record in log:
        if record.get("kind") != "refit":
            raise ArgumentError(f"log: {dict(record)!r} is no record of a refit")
        models.append(refit._take(*_parse(record)))
    return models


def _parse(record: Mapping[str, Any]) -> tuple[int, list[list[float]], list[float]]:
    try:
        terms = [[float(t) for t in row] for row in record["terms"]]
        return int(record["step"]), terms, [float(b) for b in record["busy_s"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"record of a refit lacks or breaks a field: {error}") from error


def _only(cost: CostModel, names: Sequence[str]) -> CostModel:
    """The cost model with every other time at 0; shares and counts as they are."""
    zero: dict[str, Any] = {}
    for every in _SCALED.values():
        for name in every:
            if name not in names:
                zero[name] = (0.0, 0.0) if isinstance(getattr(cost, name), tuple) else 0.0
    return dataclasses.replace(cost, **zero)
