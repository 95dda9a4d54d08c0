"""The cost model: seconds and bytes of one micro-batch, as plain data.

The planner balances the ranks by it and keeps the memory cap by it. The formulas are computed in
the core (csrc/plan/cost.c); here are the coefficients, where they come from, and their file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp import _dcp, _env, analytic, fitting
from dcp._dcp import ArgumentError, FileError

if TYPE_CHECKING:
    from dcp.analytic import Device
    from dcp.models import Transformer1D
    from dcp.optim_base import Optimizer

__all__ = ["CostModel"]

SCHEMA = 1
_TIERED = ("group_s", "hop_s", "gather_s", "exchange_s")  # (inside a node, across nodes)
_INTEGERS = ("logit_chunk_tokens", "layer_count", "node_ranks")
_LABELS = ("name", "model", "step_s", "measured", "residuals")  # what the core does not read
KINDS = ("layer", "mlp")  # block kinds whose layers may be recomputed, in the core's order


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise _dcp.DTypeError(f"cost.{name} = {value!r} must be a number")
    return float(value)


def whole(name: str, value: Any, low: int, high: int = (1 << 63) - 1) -> int:
    """`value` as an integer in low..high, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise _dcp.DTypeError(f"{name} = {value!r} must be an integer") from error
    if not low <= number <= high:
        raise ArgumentError(f"{name} = {number} must lie in {low}..{high}")
    return number


def _group(ranks: int | Iterable[int]) -> tuple[int, int]:
    """(first rank, count) of a group given as a list of rank numbers or as a count."""
    if not isinstance(ranks, Iterable):
        return 0, operator.index(ranks)
    members = sorted(operator.index(r) for r in ranks)
    if members and members != list(range(members[0], members[0] + len(members))):
        raise ArgumentError(f"ranks = {members} must be distinct and consecutive")
    return (members[0] if members else 0), len(members)


def recompute_counts(recompute: str | Mapping[str, int], layers: int) -> tuple[int, int]:
    """(layers, mlps) that are recomputed, of a model of `layers` layers."""
    if isinstance(recompute, str):
        named = {"none": (0, 0), "selective": (0, layers), "full": (layers, 0)}
        if recompute not in named:
            raise ArgumentError(
                f"recompute = {recompute!r} must be 'none', 'selective', 'full' or a mapping"
            )
        return named[recompute]
    unknown = set(recompute) - set(KINDS)
    if unknown:
        raise ArgumentError(f"recompute names {sorted(unknown)}: block kinds are {list(KINDS)}")
    return (operator.index(recompute.get("layer", 0)), operator.index(recompute.get("mlp", 0)))


def lengths_array(lengths: ArrayLike) -> NDArray[np.int64]:
    """Lengths of any integer kind as they are; an empty list as int64."""
    array = np.asarray(lengths)
    return array.astype(np.int64) if array.size == 0 and array.ndim == 1 else array


@dataclass(frozen=True)
class Measured:
    """What a cost model's times were fitted to.

    Attributes
    ----------
    tokens : tuple of two int
        Least and most tokens of a micro-batch on each of its ranks.
    longest : int
        Longest sequence.
    ranks : tuple of int
        Sizes of groups, ascending.
    recompute : tuple of str
        Block kinds that were recomputed.

    Examples
    --------
    >>> from dcp.cost import Measured
    >>> Measured(tokens=(64, 8192), longest=4096, ranks=(1, 2), recompute=("layer",)).ranks
    (1, 2)
    """

    tokens: tuple[int, int]
    longest: int
    ranks: tuple[int, ...] = (1,)
    recompute: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Measured:
        """Read what `dataclasses.asdict` wrote."""
        low, high = document["tokens"]
        return cls(
            tokens=(operator.index(low), operator.index(high)),
            longest=operator.index(document["longest"]),
            ranks=tuple(operator.index(r) for r in document["ranks"]),
            recompute=tuple(str(kind) for kind in document["recompute"]),
        )


@dataclass(frozen=True)
class Residual:
    """One measured step against its prediction.

    Attributes
    ----------
    sequences, tokens, squares : int
        Of one of its equal micro-batches: count, sum of lengths, sum of squared lengths.
    micro_batches : int
        One after the other, on each rank.
    ranks : int
        That share a micro-batch.
    recompute : tuple of two int
        Layers and MLPs.
    layers : int
        Depth of the model that ran.
    measured_s, predicted_s : float
    held_out : bool
        Was not used in the fit.

    Examples
    --------
    >>> from dcp.cost import Residual
    >>> row = Residual(1, 512, 512 * 512, 1, 1, (0, 0), 2, measured_s=2.0, predicted_s=1.8)
    >>> round(row.error, 3)
    -0.1
    """

    sequences: int
    tokens: int
    squares: int
    micro_batches: int
    ranks: int
    recompute: tuple[int, int]
    layers: int
    measured_s: float
    predicted_s: float
    held_out: bool = False

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of one micro-batch; plain data.

    Sequences of lengths l, T = sum(l), Q = sum(l**2), on p consecutive ranks with n layers and m
    MLPs recomputed, n' = max(n - 1, 0), m' = max(m - 1, 0) (what is dropped shares one place a
    kind, whose last user need not be computed again), take::

        a(p)    latency_s, and for p > 1: + group_s + hop_s (p - 1)
        work    (token_s T + square_s Q + n' (layer_token_s T + layer_square_s Q)
                 + m' mlp_token_s T) / p
        comm    T (p - 1) / p (gather_s + exchange_s / p) (1 + n' layer_comm_share)

    and each rank of a world of W holds, R = ceil(T / p)::

        fixed_bytes + sharded_bytes / W + (scratch_bytes where T > 0)
        + R (token_bytes - n' layer_token_bytes - m' mlp_token_bytes)
        + (T group_token_bytes where p > 1) + logit_bytes min(R, logit_chunk_tokens)

    Source: DESIGN of dcp; T = a(sp) + b tokens/sp + c sum(len^2)/sp + comm + recomputed forward.

    Attributes
    ----------
    latency_s : float
        What a micro-batch costs whatever its tokens.
    token_s : float
        Per token: linear layers, norms, loss.
    square_s : float
        Per squared length: attention.
    group_s, hop_s, gather_s, exchange_s : tuple of two floats
        Of groups inside a node and of groups that span nodes: whatever their size; per further
        rank; a token's keys and values to all ranks (ring); a token's rows by heads (Ulysses).
    layer_token_s, layer_square_s, mlp_token_s : float
        Forward again, of one layer and of one layer's MLP.
    layer_comm_share : float
        Share of the communication that one recomputed layer repeats.
    fixed_bytes : float
        On every rank, whatever it computes.
    sharded_bytes : float
        Of all ranks together, cut evenly.
    scratch_bytes : float
        While any micro-batch runs.
    token_bytes, layer_token_bytes, mlp_token_bytes : float
        Activations of one token with nothing dropped, and what of these one layer and one layer's
        MLP account for.
    group_token_bytes : float
        A token of the whole group, where more than one rank computes it.
    logit_bytes : float
        One row of the loss's chunk of logits.
    logit_chunk_tokens : int
        Rows of that chunk.
    layer_count : int
        Layers that can be recomputed.
    node_ranks : int
        Ranks of a node; 0: all ranks share one.
    name : str
        Where the figures come from; for people.
    model : str
        Fingerprint of the model's shape; empty: any model.
    step_s : float
        What every plan pays once a step: packing weights, reduction, update. Plans leave it out;
        predictions of whole steps add it.
    measured : Measured, optional
        What was measured, where anything was; see `beyond`.
    residuals : tuple of Residual
        Measured against predicted steps.

    Examples
    --------
    >>> import dcp
    >>> cost = dcp.CostModel(latency_s=1e-3, token_s=1e-6, square_s=1e-9, token_bytes=100)
    >>> round(cost.time([1000, 2000]), 6)
    0.009
    >>> cost.memory([1000, 2000], world_size=4)
    300000
    """

    latency_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    group_s: tuple[float, float] = (0.0, 0.0)
    hop_s: tuple[float, float] = (0.0, 0.0)
    gather_s: tuple[float, float] = (0.0, 0.0)
    exchange_s: tuple[float, float] = (0.0, 0.0)
    layer_token_s: float = 0.0
    layer_square_s: float = 0.0
    layer_comm_share: float = 0.0
    mlp_token_s: float = 0.0
    fixed_bytes: float = 0.0
    sharded_bytes: float = 0.0
    scratch_bytes: float = 0.0
    token_bytes: float = 0.0
    layer_token_bytes: float = 0.0
    mlp_token_bytes: float = 0.0
    group_token_bytes: float = 0.0
    logit_bytes: float = 0.0
    logit_chunk_tokens: int = 0
    layer_count: int = 0
    node_ranks: int = 0
    name: str = ""
    model: str = ""
    step_s: float = 0.0
    measured: Measured | None = None
    residuals: tuple[Residual, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _LABELS:
                continue
            if field.name in _INTEGERS:
                object.__setattr__(self, field.name, operator.index(value))
            elif field.name in _TIERED:
                pair = tuple(_number(field.name, v) for v in value)
                if len(pair) != 2:
                    raise ArgumentError(f"cost.{field.name} = {value!r} must be two numbers")
                object.__setattr__(self, field.name, pair)
            else:
                object.__setattr__(self, field.name, _number(field.name, value))
        step = _number("step_s", self.step_s)
        if not step >= 0 or not math.isfinite(step):
            raise ArgumentError(f"cost.step_s = {step:g} must be finite and >= 0")
        _dcp.cost_time(self._core(), 0, 0.0, 0, 1, (0, 0))  # checks every rule

    @classmethod
    def for_model(
        cls,
        config: Transformer1D,
        *,
        device: str | Device = "cpu",
        flops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        activation_bytes: Callable[[int, tuple[int, int]], int] | None = None,
        threads: int | None = None,
        reduce: str = "step",
        windows: bool = True,
        optimizer: Optimizer | None = None,
        prefetch: int = 0,
        gather: str = "layer",
        residual: bool = False,
    ) -> CostModel:
        """Reckon the cost of training a model with dcp's own runtime on the CPU.

        Times are from stated constants; without a memory cap only their ratios matter to plans.
        Bytes are what the core reckons for the very model.

        Parameters
        ----------
        config : dcp.Transformer1D
            The model; its `compute_dtype` decides rates and bytes.
        device : str or dcp.analytic.Device
            Constants of one rank; the default is one core.
        flops_per_s : float, optional
            Instead of the device's rates in matrix products and attention.
        bytes_per_s : float, optional
            Instead of the device's speed of memory.
        activation_bytes : callable, optional
            (tokens, (layers, MLPs) recomputed) -> bytes that a micro-batch holds beside weights and
            gradients; default: what the core reckons.
        threads : int, optional
            That compute on a rank; None: ``DCP_NUM_THREADS``, which ranks that dcp launches have,
            or one a core.
        reduce : str
            "step": each rank holds a whole buffer of fp32 gradients and reduces it once a step.
            "layer": gradients are cut over the ranks, and two buffers of the largest group of
            tensors are whole.
        windows : bool
            Whether ranks read weights in place; else each holds one whole group of them. The
            bytes of packed weights are those with windows, more than without.
        optimizer : dcp.optim.Optimizer, optional
            Whose state the ranks hold; default: AdamW's two fp32 moments.
        prefetch : int
            1: without windows each rank holds two groups, of which one is gathered ahead.
        gather : {"layer", "step"}
            "step": without windows gathered weights stay until they change.
        residual : bool
            Whether gradients travel in few bits: each rank keeps what these leave out.

        Returns
        -------
        CostModel

        Raises
        ------
        dcp.ArgumentError
            A rate is not positive, or `reduce` is neither.

        Examples
        --------
        >>> import dcp
        >>> cost = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny"))
        >>> cost.time([2000]) > 2 * cost.time([1000]) - cost.time([])
        True
        """
        for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
            if value is not None and (not value > 0 or not math.isfinite(value)):
                raise ArgumentError(f"{name} = {value!r} must be finite and > 0")
        rates: dict[str, Any] = {}
        if flops_per_s is not None:
            rates = dict.fromkeys(analytic.FLOP_RATES, float(flops_per_s))
        if bytes_per_s is not None:
            rates["bytes_per_s"] = float(bytes_per_s)
        chosen, shape = analytic.device_named(device), analytic.Shape.of(config)
        chosen = analytic.device_named(chosen.computing(config.compute_dtype), **rates)
        thread_count = _env.thread_count(1) if threads is None else threads

        def held(tokens: int, recompute: tuple[int, int]) -> int:
            bytes_ = config.activation_bytes(tokens, threads=thread_count, recompute=recompute)
            return bytes_ - analytic.host_rotary_bytes(config, tokens)  # in the fixed part

        return cls(
            **analytic.time_fields(shape, chosen),
            **analytic.group_fields(shape, chosen),
            **analytic.host_fixed_fields(
                config, reduce, windows, optimizer, prefetch, gather, residual
            ),
            **fitting.fit_memory(
                activation_bytes or held,
                shape.layers,
                fitting.memory_probes(config.max_position_embeddings),
            ),
            group_token_bytes=analytic.host_group_token_bytes(shape, windows),
            name=f"{_label(shape)} on {chosen.name}",
            model=shape.fingerprint,
        )

    @classmethod
    def analytic(
        cls, model: str | Transformer1D, device: str | Device = "h200", **overrides: Any
    ) -> CostModel:
        """Reckon a cost model from stated constants of a device: nothing is measured.

        Parameters
        ----------
        model : str or dcp.Transformer1D
            A preset's name, "gpt2" to "gpt2-xl", or a configuration.
        device : str or dcp.analytic.Device
            "h200", "h100" or "cpu"; every constant and its source: `dcp.analytic.DEVICES`.
        **overrides
            Constants of the device that are to be others, by the names of `dcp.analytic.Device`.

        Returns
        -------
        CostModel
            On a GPU: training in bf16 with fp32 gradients, main weights and moments
            (`dcp.analytic.gpu_memory_fields`); on "cpu": as `for_model`.

        Raises
        ------
        dcp.ArgumentError
            Unknown model, device or constant: the message suggests the nearest.

        Examples
        --------
        >>> import dcp
        >>> cost = dcp.CostModel.analytic("llama-3-8b", device="h200")
        >>> cost.name
        'llama-3-8b on h200'
        >>> 2 < cost.time([32768]) / cost.time([16384]) < 3
        True
        >>> slow = dcp.CostModel.analytic("llama-3-8b", device="h200", matmul_flops_per_s=300e12)
        >>> slow.token_s > 1.8 * cost.token_s
        True
        """
        chosen = analytic.device_named(device, **overrides)
        config = analytic.config_named(model) if isinstance(model, str) else model
        shape = config if isinstance(config, analytic.Shape) else analytic.Shape.of(config)
        name = f"{model if isinstance(model, str) else _label(shape)} on {chosen.name}"
        if chosen.host:
            if isinstance(config, analytic.Shape):
                raise _dcp.UnsupportedError(f"model {model!r} cannot be trained on {chosen.name}")
            return dataclasses.replace(cls.for_model(config, device=chosen), name=name)
        return cls(**analytic.gpu_fields(shape, chosen), name=name, model=shape.fingerprint)

    def check_model(self, config: Transformer1D) -> None:
        """Refuse a cost model of another model.

        Raises
        ------
        dcp.ArgumentError
            Names both. A cost model that says nothing of its model is taken for any.

        Examples
        --------
        >>> import dcp
        >>> tiny, small = (dcp.Transformer1D.preset(name) for name in ("tiny", "small"))
        >>> dcp.CostModel.for_model(tiny).check_model(small)
        Traceback (most recent call last):
            ...
        dcp.ArgumentError: cost model '0.8574M parameters on cpu' is of model ...
        """
        shape = analytic.Shape.of(config)
        if self.model and self.model != shape.fingerprint:
            raise ArgumentError(
                f"cost model {self.name!r} is of model {self.model}, not of {shape.fingerprint} "
                f"({shape.layers} layers of {shape.hidden}, {shape.parameter_count} parameters, "
                f"computing in {shape.compute_dtype})"
            )

    def time(
        self,
        lengths: ArrayLike,
        ranks: int | Iterable[int] = 1,
        recompute: str | Mapping[str, int] = "none",
    ) -> float:
        """Seconds of one micro-batch.

        Parameters
        ----------
        lengths : array_like of int
            Its sequences, in tokens; empty gives the latency.
        ranks : int or iterable of int
            The group that computes it: consecutive rank numbers, or their count (the first ranks).
        recompute : str or mapping
            "none", "selective", "full", or layers per block kind.

        Returns
        -------
        float

        Raises
        ------
        dcp.ArgumentError
            Ranks that are not consecutive, or counts beyond the layers.

        Examples
        --------
        >>> import dcp
        >>> dcp.CostModel(token_s=0.5).time([1, 2, 3])
        3.0
        """
        tokens, squares = _sums(lengths)
        first, count = _group(ranks)
        counts = recompute_counts(recompute, self.layer_count)
        return float(_dcp.cost_time(self._core(), tokens, squares, first, count, counts))

    def memory(
        self,
        lengths: ArrayLike,
        ranks: int | Iterable[int] = 1,
        recompute: str | Mapping[str, int] = "none",
        *,
        world_size: int,
    ) -> int:
        """Bytes on each of the ranks of one micro-batch, fixed part included.

        Parameters
        ----------
        lengths : array_like of int
            Its sequences, in tokens; empty gives the fixed part.
        ranks, recompute
            As in `time`.
        world_size : int
            Ranks that share the sharded part.

        Returns
        -------
        int

        Raises
        ------
        dcp.ArgumentError
            As `time`.

        Examples
        --------
        >>> import dcp
        >>> dcp.CostModel(sharded_bytes=1000, token_bytes=2).memory([50], world_size=10)
        200
        """
        tokens, _ = _sums(lengths)
        _, count = _group(ranks)
        counts = recompute_counts(recompute, self.layer_count)
        return int(_dcp.cost_memory(self._core(), tokens, count, counts, world_size))

    def beyond(
        self,
        lengths: ArrayLike,
        ranks: int | Iterable[int] = 1,
        recompute: str | Mapping[str, int] = "none",
    ) -> list[str]:
        """Why this micro-batch lies outside of what was measured; empty where it does not.

        Parameters
        ----------
        lengths, ranks, recompute
            As in `time`.

        Returns
        -------
        list of str
            Nothing, too, where nothing was measured and so nothing can be beyond it: `measured` is
            None.

        Examples
        --------
        >>> import dcp
        >>> from dcp.cost import Measured
        >>> seen = Measured(tokens=(64, 8192), longest=4096)
        >>> cost = dcp.CostModel(token_s=1e-6, measured=seen)
        >>> cost.beyond([1000, 2000])
        []
        >>> cost.beyond([5000], ranks=2)[0]
        'a sequence of 5000 tokens: at most 4096 were measured'
        """
        seen = self.measured
        if seen is None:
            return []
        tokens, _ = _sums(lengths)
        _, count = _group(ranks)
        counts = recompute_counts(recompute, self.layer_count)
        longest = int(np.max(lengths)) if np.size(lengths) else 0
        share = -(-tokens // max(count, 1))
        reasons = []
        if longest > seen.longest:
            reasons.append(f"a sequence of {longest} tokens: at most {seen.longest} were measured")
        if tokens > 0 and not seen.tokens[0] <= share <= seen.tokens[1]:
            reasons.append(
                f"{share} tokens on each rank: {seen.tokens[0]} to {seen.tokens[1]} were measured"
            )
        if count not in seen.ranks:
            reasons.append(f"a group of {count} ranks: {list(seen.ranks)} were measured")
        reasons += [
            f"{kind} recompute: not measured"
            for kind, n in zip(KINDS, counts, strict=True)
            if n > 0 and kind not in seen.recompute
        ]
        return reasons

    def to_json(self) -> dict[str, Any]:
        """The model as a JSON object.

        Examples
        --------
        >>> import dcp
        >>> dcp.CostModel.from_json(dcp.CostModel(token_s=2.0).to_json()).token_s
        2.0
        """
        return {"schema": SCHEMA, "kind": "cost_model", **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CostModel:
        """Read what `to_json` wrote.

        Raises
        ------
        dcp.ArgumentError
            Another schema, or a field that is not known.

        Examples
        --------
        >>> import dcp
        >>> dcp.CostModel.from_json({"schema": 1, "token_s": 1e-6}).token_s
        1e-06
        """
        check_schema(document, "cost model")
        fields = {k: v for k, v in document.items() if k not in ("schema", "kind", "command")}
        unknown = set(fields) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ArgumentError(f"cost model has unknown fields {sorted(unknown)}")
        try:
            values: dict[str, Any] = {k: tuple(v) if k in _TIERED else v for k, v in fields.items()}
            if values.get("measured") is not None:
                values["measured"] = Measured.from_json(values["measured"])
            rows = values.get("residuals", ())
            values["residuals"] = tuple(
                Residual(**{**row, "recompute": tuple(row["recompute"])}) for row in rows
            )
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, _dcp.Error):
                raise
            raise ArgumentError(f"cost model has a field of the wrong kind: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the model to a JSON file.

        Examples
        --------
        >>> import dcp, tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "cost.json")
        >>> dcp.CostModel(token_s=3.0).save(file)
        >>> dcp.CostModel.load(file).token_s
        3.0
        >>> folder.cleanup()
        """
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a file that `save` wrote.

        Raises
        ------
        dcp.FileError
            The file cannot be read or holds no JSON object.

        Examples
        --------
        See `save`.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FileError(f"cost model {path} cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise FileError(f"cost model {path} holds no JSON object")
        return cls.from_json(document)

    def _core(self) -> tuple[float, ...]:
        """The tuple that the core reads: the fields in order, pairs laid out flat."""
        flat: list[float] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in _LABELS:
                flat.extend(value if isinstance(value, tuple) else (value,))
        return tuple(flat)


def _label(shape: analytic.Shape) -> str:
    return f"{shape.parameter_count / 1e6:.4g}M parameters"


def _sums(lengths: ArrayLike) -> tuple[int, float]:
    array = lengths_array(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _dcp.DTypeError(
            f"lengths must be a 1-D list of integers, got {array.ndim}-D {array.dtype}"
        )
    values = [int(v) for v in array]
    for i, value in enumerate(values):
        if value < 0:
            raise ArgumentError(f"lengths[{i}] = {value} must be >= 0")
    return sum(values), float(sum(v * v for v in values))


def check_schema(document: Mapping[str, Any], what: str) -> None:
    schema = document.get("schema")
    if schema != SCHEMA:
        raise ArgumentError(f"{what} has schema {schema!r}, this version reads {SCHEMA}")
