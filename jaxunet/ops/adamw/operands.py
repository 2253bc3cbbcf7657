"""The operands of a fused AdamW step: what a backend's `FusedUpdate.adamw` takes and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

Tree = Any


class Rule(NamedTuple):
    """AdamW's constants (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2)."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


class Moved(NamedTuple):
    """What a step changes: trees of float32 arrays, each shaped as its argument."""

    params: Tree
    mu: Tree
    nu: Tree
    averages: tuple[Tree, ...]
