"""When gradients are summed over ranks: once a step, or layer by layer.

Once a step moves each gradient once, but every rank holds all of them. Layer by layer a rank holds
its shard of them, but they move once a micro-batch, and ranks move together. So layer by layer pays
only where the memory that it frees lets the planner recompute less or share sequences among fewer
ranks, and there the plans themselves tell.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from numpy.typing import ArrayLike

from dcp._dcp import ArgumentError, InfeasibleError
from dcp.cost import CostModel, lengths_array
from dcp.planning import plan, split_steps

__all__ = ["choose_reduce"]


def choose_reduce(
    lengths: ArrayLike,
    cost_step: CostModel,
    cost_layer: CostModel,
    *,
    world_size: int,
    memory_bytes: int | None,
    tokens_per_step: int | None = None,
    windows: bool = True,
    step_s: float = 0.0,
    layer_s: float = 0.0,
    **options: Any,
) -> Literal["step", "layer"]:
    """Which of the two makes a run's steps shorter under a memory cap.

    Both are planned. "step" wins ties, and where there is no cap, since it never moves more bytes.
    A pure function of its arguments, so that all ranks choose alike.

    Parameters
    ----------
    lengths : array_like of int, shape (sequences,)
        Tokens of each sequence of one step, or with `tokens_per_step` of several, in order: a
        sample of the run that holds its longest sequence.
    cost_step, cost_layer : CostModel
        Seconds and bytes of a micro-batch with either: ``CostModel.for_model(config, reduce=...)``.
    world_size : int
        Number of ranks.
    memory_bytes : int or None
        Most bytes that one rank may hold; None: no cap.
    tokens_per_step : int, optional
        Cuts `lengths` into steps, as `dcp.planning.split_steps`.
    windows : bool
        Whether ranks read weights one-sidedly; without, they move in rounds with "step" too.
    step_s, layer_s : float
        Seconds that cost models and plans leave out: with "step" of the one reduction of a step,
        with "layer" of the reductions of one round.
    **options
        Of `dcp.plan`: strategy, seed, max_tokens, longest, max_group, ...

    Returns
    -------
    {"step", "layer"}

    Raises
    ------
    dcp.ArgumentError
        As `dcp.plan`; or `step_s` or `layer_s` is negative or not finite.
    dcp.InfeasibleError
        A sequence fits nowhere with either.

    Examples
    --------
    A gradient buffer of 400 bytes a rank leaves room for one token at a time:

    >>> import dcp
    >>> from dcp.reduction import choose_reduce
    >>> step = dcp.CostModel(latency_s=1.0, token_s=1.0, token_bytes=10, fixed_bytes=400)
    >>> layer = dcp.CostModel(latency_s=1.0, token_s=1.0, token_bytes=10, sharded_bytes=400)
    >>> choose_reduce([1] * 12, step, layer, world_size=4, memory_bytes=415)
    'layer'
    >>> choose_reduce([1] * 12, step, layer, world_size=4, memory_bytes=None)
    'step'
    """
    for name, value in (("step_s", step_s), ("layer_s", layer_s)):
        if not 0 <= value < math.inf:
            raise ArgumentError(f"{name} = {value!r} must be finite and >= 0")
    if memory_bytes is None:
        return "step"
    array = lengths_array(lengths)
    parts = [slice(None)] if tokens_per_step is None else split_steps(array, tokens_per_step)

    def seconds(cost: CostModel, rounds: bool, each_step_s: float, each_round_s: float) -> float:
        total = 0.0
        for part in parts:
            made = plan(
                array[part],
                cost,
                world_size=world_size,
                memory_bytes=memory_bytes,
                rounds=rounds,
                **options,
            )
            count = 1 + max((m.round for m in made.micro_batches), default=-1)
            total += made.makespan + each_step_s + count * each_round_s
        return total

    try:
        with_step = seconds(cost_step, not windows, step_s, 0.0)
    except InfeasibleError:
        seconds(cost_layer, True, 0.0, layer_s)  # raises what to do where that does not fit either
        return "layer"
    try:
        with_layer = seconds(cost_layer, True, 0.0, layer_s)
    except InfeasibleError:
        return "step"
    return "layer" if with_layer < with_step else "step"
