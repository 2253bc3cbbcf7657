"""Weights and images by which two implementations of FID's Inception are compared, the same on every machine."""

from __future__ import annotations

import pathlib

import numpy as np

from jaxunet.metrics.inception import torch_shapes

GOLDEN = pathlib.Path(__file__).parent / 'fixtures' / 'inception_golden.npz'


def random_state(seed: int = 0) -> dict[str, np.ndarray]:
    """A state dict of the right shapes whose activations neither vanish nor explode."""
    random = np.random.default_rng(seed)
    state = {}
    for name, shape in torch_shapes().items():
        uniform = random.random(shape, np.float32)
        if name.endswith('running_var'):
            state[name] = 0.5 + uniform
        elif name.endswith('bn.weight'):
            state[name] = 0.8 + 0.4 * uniform
        elif len(shape) == 1:
            state[name] = 0.4 * uniform - 0.2
        else:
            fan_in = np.prod(shape[1:])
            state[name] = ((2 * uniform - 1) * np.sqrt(6 / fan_in)).astype(np.float32)
    return state


def images() -> np.ndarray:
    """uint8 (2, 40, 56, 3): no square, so that height and width cannot change places."""
    return np.random.default_rng(1).integers(0, 256, (2, 40, 56, 3), dtype=np.uint8)


def summary(activations: np.ndarray) -> np.ndarray:
    """Six numbers of a (2, height, width, channels) activation: mean, deviation, largest, and three of the values."""
    flat = activations.astype(np.float64).reshape(-1)
    return np.array([flat.mean(), flat.std(), flat.max(), *flat[[0, len(flat) // 3, -1]]])
