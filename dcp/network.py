"""The network simulator: flows over links, shared max-min fair."""

from __future__ import annotations

import math
import re

from dcp._dcp import ArgumentError

__all__ = ["parse_rate"]

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
