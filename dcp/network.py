"""The network simulator: flows over links, shared max-min fair, and jobs that share them.

Hosts hang on one switch, or in racks whose uplinks may be oversubscribed. A transfer is a set of
flows that begin together; at every moment links are shared max-min fair, and rates change only when
a flow begins or ends. Background jobs come and go, compute and communicate, and react to what they
meet on the links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp
from dcp._dcp import ArgumentError

__all__ = ["COLLECTIVES", "Background", "NetworkRun", "Transfer", "network", "parse_rate"]

COLLECTIVES = ("ring", "alltoall", "two_level")

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_rate(text: str) -> float:
    """Bytes a second of a rate as text.

    Parameters
    ----------
    text : str
        A number and a unit: ``bit``, ``kbit``, ``Mbit``, ``Gbit``, ``Tbit`` (a second), or the
        same with ``B`` for bytes.

    Returns
    -------
    float

    Raises
    ------
    dcp.ArgumentError
        Another form, or a rate that is not > 0 and finite.

    Examples
    --------
    >>> from dcp.network import parse_rate
    >>> parse_rate("1Gbit"), parse_rate("50MB")
    (125000000.0, 50000000.0)
    """
    match = re.fullmatch(r"\s*([0-9.eE+-]+|nan|inf)\s*([kMGT]?)(bit|B)(?:/s)?\s*", text)
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not 0 < value < math.inf:
        raise ArgumentError(
            f"rate {text!r} must be a number > 0 and a unit, for example 100Gbit, 50Mbit or 12GB"
        )
    return value * _PREFIXES[match[2]] / (8.0 if match[3] == "bit" else 1.0)


@dataclass(frozen=True)
class Transfer:
    """What begins at a time: a collective, or flows.

    Parameters
    ----------
    start_s : float
        Seconds; transfers of a run are given in order of time.
    collective : {"ring", "alltoall", "two_level"} or None
        A reduce-scatter or gather of `bytes` that every host holds.
    bytes : float
    hosts : sequence of int, optional
        Of the collective; default all.
    flows : sequence of (from, to, bytes), optional
        Instead of a collective.

    Examples
    --------
    >>> from dcp.network import Transfer
    >>> Transfer(0.0, "ring", 1e9).collective
    'ring'
    """

    start_s: float
    collective: str | None = None
    bytes: float = 0.0
    hosts: Sequence[int] | None = None
    flows: Sequence[tuple[int, int, float]] | None = None


@dataclass(frozen=True)
class Background:
    """A job that shares the network.

    Parameters
    ----------
    bytes : float
        Of its gradient, summed and gathered every iteration.
    compute_s : float
        Seconds before each sum.
    hosts : sequence of int, optional
        Default: all.
    collective : {"ring", "alltoall", "two_level"}
    dwell_s : float
        Mean seconds that it is there, and is away; 0: always there.

    Examples
    --------
    >>> from dcp.network import Background
    >>> Background(4e9, 0.3).dwell_s
    0.0
    """

    bytes: float
    compute_s: float
    hosts: Sequence[int] | None = None
    collective: str = "ring"
    dwell_s: float = 0.0


@dataclass(frozen=True)
class NetworkRun:
    """Result of `network`.

    Attributes
    ----------
    start_s, end_s : ndarray of float64, shape (transfers,)
    present : list of int
        Background jobs that were there when each transfer ended.
    rates : ndarray of float64, shape (transfers,)
        Bytes a second of all its flows together.

    Examples
    --------
    See `network`.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    present: list[int]
    rates: NDArray[np.float64]

    def plot(self, ax: Any = None) -> Any:
        """Draw every transfer from its start to its end, and the jobs that were there.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        dcp.UnsupportedError
            matplotlib is not installed.

        Examples
        --------
        >>> import dcp
        >>> from dcp.network import Transfer
        >>> run = dcp.simulate.network([Transfer(0.0, "ring", 1e9)], hosts=4)
        >>> run.plot().get_xlabel()
        'seconds'
        """
        from dcp._pyplot import pyplot

        if ax is None:
            _, ax = pyplot().subplots(figsize=(8, 3), layout="constrained")
        ax.barh(range(len(self.start_s)), self.end_s - self.start_s, left=self.start_s)
        for row, (end, jobs) in enumerate(zip(self.end_s, self.present, strict=True)):
            ax.text(end, row, f" {jobs} jobs" if jobs else "", va="center", fontsize=8)
        ax.set_xlabel("seconds")
        ax.set_ylabel("transfer")
        ax.invert_yaxis()
        return ax


def _kind(name: str) -> int:
    if name not in COLLECTIVES:
        raise ArgumentError(f"collective = {name!r} must be one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES.index(name)


def network(
    transfers: Iterable[Transfer],
    *,
    hosts: int = 8,
    rate: str | float = "100Gbit",
    rack_hosts: int = 0,
    oversubscription: float = 1.0,
    latency_s: float = 5e-5,
    background: Sequence[Background] = (),
    seed: int = 0,
) -> NetworkRun:
    """Simulate transfers one after the other; each begins at its time or when the last one is done.

    Parameters
    ----------
    transfers : iterable of Transfer
    hosts : int
    rate : str or float
        Of a host's link, each direction: text as ``"100Gbit"``, or bytes a second.
    rack_hosts : int
        Hosts of a rack; 0: one switch for all.
    oversubscription : float
        Uplink of a rack = its hosts' rates over this, >= 1.
    latency_s : float
        Before the first byte of a transfer arrives.
    background : sequence of Background
    seed : int
        Of when jobs come and go.

    Returns
    -------
    NetworkRun

    Raises
    ------
    dcp.ArgumentError
        A link, a host, a number of bytes or a time is impossible.

    Examples
    --------
    A ring of 8 moves 7/8 of what each host holds:

    >>> import dcp
    >>> from dcp.network import Transfer
    >>> run = dcp.simulate.network([Transfer(0.0, "ring", 8e9)], rate="8Gbit", latency_s=0.0)
    >>> float(run.end_s[0])
    7.0
    """
    core = _dcp.Network(
        hosts=hosts,
        rack_hosts=rack_hosts,
        host_rate=parse_rate(rate) if isinstance(rate, str) else float(rate),
        oversubscription=oversubscription,
        latency_s=latency_s,
        seed=seed,
    )
    everyone = list(range(hosts))
    for job in background:
        core.add_background(
            list(everyone if job.hosts is None else job.hosts),
            compute_s=job.compute_s,
            bytes=job.bytes,
            collective=_kind(job.collective),
            dwell_s=job.dwell_s,
        )
    starts, ends, present, rates = [], [], [], []
    for transfer in transfers:
        start = max(float(transfer.start_s), core.now)
        if not math.isfinite(start):
            raise ArgumentError(f"start_s = {transfer.start_s!r} must be finite")
        phases: list[NDArray[np.float64]]
        if transfer.collective is None:
            rows = np.array(list(transfer.flows or ()), np.float64).reshape(-1, 3)
            phases = [rows]
        else:
            kind = _kind(transfer.collective)
            members = list(everyone if transfer.hosts is None else transfer.hosts)
            first, count = core.collective(kind, members, float(transfer.bytes), 0)
            phases = [first]
            for phase in range(1, count):
                phases.append(core.collective(kind, members, float(transfer.bytes), phase)[0])
        end = start
        for flows in phases:
            core.run_until(end)
            end = core.wait(core.begin(end, flows))
        moved = sum(float(flows[:, 2].sum()) for flows in phases)
        starts.append(start)
        ends.append(end)
        present.append(int(core.present).bit_count())
        rates.append(moved / (end - start) if end > start else math.inf)
    return NetworkRun(np.array(starts), np.array(ends), present, np.array(rates))
