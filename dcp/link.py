"""An emulated link between the ranks of one machine, for training as under a congested network.

Data moves through shared memory; then every call waits until the network simulator says that it
would have arrived. Jobs in the background come and go, and react to what is sent.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp import _dcp
from dcp._dcp import ArgumentError
from dcp.network import parse_rate

if TYPE_CHECKING:
    from dcp.cost import CostModel
    from dcp.models import Transformer1D
    from dcp.world import World

__all__ = ["Link", "cost_under"]

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(s|ms|us|min|)\s*", text)
    try:
        return float(match[1]) * _UNITS[match[2]] if match else math.nan
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class Link:
    """A link of every machine to one switch, and who else uses it.

    Parameters
    ----------
    rate : float
        Bytes a second, each direction; >= 1.
    background : int
        Jobs over all machines that share the link, 0 .. 64.
    dwell_s : float
        Mean seconds that a job is there, and is away, exponentially distributed; 0: always there.
        Events of less than a millisecond would take longer to simulate than to pass.
    latency_s : float
        Seconds before the first byte of a transfer arrives; at most an hour.
    duty : float
        Share of an iteration that a job alone would communicate, 0 < duty < 1.
    period_s : float
        Seconds of an iteration of a job alone; >= 0.001.
    machine_ranks : int
        Ranks of one machine, in a row: between them nothing takes time.
    seed : int
        Of when jobs come and go.

    Raises
    ------
    dcp.ArgumentError
        A number breaks its rule.

    Examples
    --------
    >>> from dcp.link import Link
    >>> link = Link.parse("1Gbit,background=3,dwell=20s")
    >>> link.rate, link.background, link.dwell_s
    (125000000.0, 3, 20.0)
    """

    rate: float
    background: int = 0
    dwell_s: float = 0.0
    latency_s: float = 5e-5
    duty: float = 0.75
    period_s: float = 1.0
    machine_ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
            ("rate", lambda x: 1 <= x < math.inf, "be >= 1 and finite"),
            ("background", lambda x: 0 <= x <= 64, "lie in 0..64"),
            ("dwell_s", lambda x: x == 0 or 1e-3 <= x < math.inf, "be 0 or >= 0.001 and finite"),
            ("latency_s", lambda x: 0 <= x <= 3600, "lie in 0..3600"),
            ("duty", lambda x: 0 < x < 1, "lie between 0 and 1"),
            ("period_s", lambda x: 1e-3 <= x < math.inf, "be >= 0.001 and finite"),
            ("machine_ranks", lambda x: x >= 1, "be >= 1"),
            ("seed", lambda x: 0 <= x < 1 << 64, "lie in 0..2**64 - 1"),
        )
        for name, holds, rule in rules:
            value = getattr(self, name)
            if not holds(value):
                raise ArgumentError(f"link: {name} = {value!r} must {rule}")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read ``RATE[,key=value...]``: keys background, dwell, latency, duty, period,
        machine_ranks, seed; times with a unit (s, ms, us, min).

        Parameters
        ----------
        text : str
            For example ``"1Gbit,background=3,dwell=20s"``.

        Returns
        -------
        Link

        Raises
        ------
        dcp.ArgumentError
            An unknown key or unit (the nearest key is suggested), or an impossible number.

        Examples
        --------
        >>> from dcp.link import Link
        >>> Link.parse("50Mbit,latency=1ms").latency_s
        0.001
        """
        first, *rest = text.split(",")
        fields: dict[str, Any] = {"rate": parse_rate(first)}
        for part in rest:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ArgumentError(
                    f"link {text!r}: {part.strip()!r} must be KEY=VALUE with KEY one of "
                    f"{', '.join(_KEYS)}{hint}"
                )
            name, read = _KEYS[key]
            if name in fields:
                raise ArgumentError(f"link {text!r}: {key} is there twice")
            try:
                fields[name] = read(value)
            except ValueError:
                raise ArgumentError(f"link {text!r}: {key} = {value!r} is no number") from None
            if fields[name] != fields[name]:
                raise ArgumentError(
                    f"link {text!r}: {key} = {value!r} must be a number with a unit of "
                    "s, ms, us or min"
                )
        return cls(**fields)

    @property
    def text(self) -> str:
        """The link as `parse` reads it.

        Examples
        --------
        >>> from dcp.link import Link
        >>> Link.parse("1Gbit, dwell=20s").text
        '1Gbit,dwell=20s'
        """
        parts = [f"{self.rate * 8 / 1e9:.12g}Gbit"]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for key, (name, _) in _KEYS.items():
            if (value := getattr(self, name)) != defaults[name]:
                unit = "s" if name.endswith("_s") else ""
                parts.append(f"{key}={value!r}{unit}".replace(".0s", "s"))
        return ",".join(parts)

    def emulate(self, world: World) -> None:
        """Put an open world on this link. *Collective*; `dcp.init` and `dcp.launch` do it.

        Raises
        ------
        dcp.ArgumentError
            `machine_ranks` does not divide the ranks.

        Examples
        --------
        >>> import dcp
        >>> from dcp.link import Link
        >>> link = Link.parse("1Gbit")
        >>> dcp.launch(lambda world: world.transport, 2, link=link)
        ['emulated', 'emulated']
        """
        _dcp.emulate_link(world._core, **dataclasses.asdict(self))
        world.link = self


_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "background": ("background", int),
    "dwell": ("dwell_s", _seconds),
    "latency": ("latency_s", _seconds),
    "duty": ("duty", float),
    "period": ("period_s", _seconds),
    "machine_ranks": ("machine_ranks", int),
    "seed": ("seed", int),
}


def cost_under(cost: CostModel, config: Transformer1D, link: Link) -> CostModel:
    """A cost model whose groups of ranks exchange rows over a link.

    Without it a plan would let ranks share a sequence as if they shared memory. Background jobs
    are not counted: they come and go.

    Parameters
    ----------
    cost : dcp.CostModel
        Of the model on this machine.
    config : dcp.Transformer1D
    link : Link

    Returns
    -------
    dcp.CostModel

    Examples
    --------
    >>> import dcp
    >>> from dcp.link import Link, cost_under
    >>> tiny = dcp.Transformer1D.preset("tiny")
    >>> near = dcp.CostModel.for_model(tiny)
    >>> far = cost_under(near, tiny, Link.parse("50Mbit"))
    >>> far.time([2048], 2) > 4 * near.time([2048], 2), far.time([2048]) == near.time([2048])
    (True, True)
    """
    from dcp import analytic

    device = analytic.device_named(
        "cpu",
        exchange_bytes_per_s=(link.rate, link.rate),
        ring_bytes_per_s=(link.rate, link.rate),
        collective_s=(link.latency_s, link.latency_s),
        hop_s=(0.0, 0.0),
    )
    return dataclasses.replace(cost, **analytic.group_fields(analytic.Shape.of(config), device))
