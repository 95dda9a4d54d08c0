"""Seeded values of tensors, the same in every test and on every rank."""

from __future__ import annotations

import numpy as np


def values_of(name: str, shape: tuple[int, ...], salt: int = 0) -> np.ndarray:
    seed = [salt, *name.encode()]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def dense(shapes: dict[str, tuple[int, ...]], salt: int = 0) -> dict[str, np.ndarray]:
    return {name: values_of(name, shape, salt) for name, shape in shapes.items()}
