"""How numbers are shown to a person."""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(count: int | None) -> str:
    """Return bytes as text: 1536 -> '1.5 KiB'; None -> 'unknown'."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Return seconds as text: 75.2 -> '1 min 15 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
