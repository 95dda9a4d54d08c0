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

from dcp import _dcp
from dcp._dcp import ArgumentError, FileError

if TYPE_CHECKING:
    from dcp.models import Transformer1D

__all__ = ["CostModel"]

SCHEMA = 1
_TIERED = ("group_s", "hop_s", "gather_s", "exchange_s")  # (inside a node, across nodes)
_INTEGERS = ("logit_chunk_tokens", "layer_count", "node_ranks")
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
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
        _dcp.cost_time(self._core(), 0, 0.0, 0, 1, (0, 0))  # checks every rule

    @classmethod
    def for_model(
        cls,
        config: Transformer1D,
        *,
        flops_per_s: float = 1e11,
        bytes_per_s: float = 1e10,
        activation_bytes: Callable[[int], int] | None = None,
    ) -> CostModel:
        """Reckon a cost model from the shape of a model and the speed of one rank.

        Parameters
        ----------
        config : dcp.Transformer1D
            The model.
        flops_per_s : float
            What a rank reaches in matrix products and attention; the default is a CPU core's.
            For plans without a memory cap only ratios matter.
        bytes_per_s : float
            Memory speed of a rank: adding to the gradients is what a micro-batch costs whatever
            its tokens.
        activation_bytes : callable, optional
            Bytes that a micro-batch of so many tokens holds beside weights and gradients; default
            `config.activation_bytes` where there is one, else a formula.

        Returns
        -------
        CostModel

        Examples
        --------
        >>> import dcp
        >>> cost = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny"))
        >>> cost.time([2000]) > 2 * cost.time([1000]) - cost.time([])
        True
        """
        for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
            if not value > 0 or not math.isfinite(value):
                raise ArgumentError(f"{name} = {value!r} must be finite and > 0")
        shape = _Shape.of(config)
        if activation_bytes is None:
            activation_bytes = getattr(config, "activation_bytes", None) or shape.activation_bytes
        scratch, per_token = _fit_line(activation_bytes)
        return cls(
            # each weight's gradient is read and written once
            latency_s=8 * shape.parameter_count / bytes_per_s,
            token_s=6 * shape.matmul_parameters / flops_per_s,
            # Q K^T and P V forward, five such products backward, half of each under the mask
            square_s=7 * shape.layers * shape.query_width / flops_per_s,
            # a rank's whole gradients; and its share of the weights and two AdamW moments
            fixed_bytes=4 * shape.parameter_count,
            sharded_bytes=12 * shape.parameter_count,
            scratch_bytes=scratch,
            token_bytes=per_token,
            name="analytic",
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
        fields = {k: v for k, v in document.items() if k not in ("schema", "kind")}
        unknown = set(fields) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ArgumentError(f"cost model has unknown fields {sorted(unknown)}")
        return cls(**{k: tuple(v) if k in _TIERED else v for k, v in fields.items()})

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
            if field.name != "name":
                flat.extend(value if isinstance(value, tuple) else (value,))
        return tuple(flat)


@dataclass(frozen=True)
class _Shape:
    """What of a Transformer1D decides its cost."""

    layers: int
    hidden: int
    query_width: int
    key_width: int
    heads: int
    intermediate: int
    vocab: int
    parameter_count: int
    matmul_parameters: int  # weights that every token is multiplied with

    @classmethod
    def of(cls, config: Any) -> _Shape:
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        query = head_dim * config.num_attention_heads
        key = head_dim * config.num_key_value_heads
        hidden, layers = config.hidden_size, config.num_hidden_layers
        layer = hidden * (2 * query + 2 * key + 3 * config.intermediate_size)
        head = config.vocab_size * hidden
        embeddings = head if config.tie_word_embeddings else 2 * head
        return cls(
            layers=layers,
            hidden=hidden,
            query_width=query,
            key_width=key,
            heads=config.num_attention_heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            parameter_count=layers * (layer + 2 * hidden) + hidden + embeddings,
            matmul_parameters=layers * layer + head,
        )

    def activation_bytes(self, tokens: int) -> int:
        """Every layer's saved rows, a backward pass's temporaries, packed weights, logits."""
        rows = 4 * self.hidden + 2 * self.query_width + 2 * self.key_width + 3 * self.intermediate
        saved = 4 * self.layers * (rows + self.heads)
        passing = 4 * (4 * self.hidden + 2 * self.query_width + 4 * self.intermediate)
        logits = 4 * self.vocab * min(tokens, 1024)
        return tokens * (saved + passing) + 8 * self.matmul_parameters + logits


def _fit_line(held: Callable[[int], int]) -> tuple[float, float]:
    """(bytes at once, bytes per token) of a line that is nowhere below `held` at the probes."""
    probes = [1, 256, 1024, 4096, 16384, 65536]
    values = [float(held(p)) for p in probes]
    slope = max(
        (values[i + 1] - values[i]) / (probes[i + 1] - probes[i]) for i in range(1, len(probes) - 1)
    )
    slope = max(slope, 0.0)
    base = max(v - slope * p for p, v in zip(probes, values, strict=True))
    return max(base, 0.0), slope


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
