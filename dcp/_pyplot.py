"""matplotlib, where it is installed: pictures are an extra."""

from __future__ import annotations

from typing import Any

from dcp._dcp import UnsupportedError

__all__ = ["pyplot"]


def pyplot(missing: str = "a plot needs matplotlib: pip install 'dcp[viz]'") -> Any:
    """Return matplotlib.pyplot; where it is not installed `UnsupportedError` says `missing`."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError(missing) from error
    return plt
