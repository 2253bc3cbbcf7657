"""Reads checkpoints with orbax alone, without the project's code, and makes small summaries."""

from __future__ import annotations

import pathlib

import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

POINTS = 8


def read(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by their path, such as `params/conv_in/kernel`."""
    folder = workdir.resolve() / 'checkpoints' / str(step) / 'state'
    handler = ocp.PyTreeCheckpointHandler()
    structure = handler.metadata(folder).tree
    arguments = ocp.args.PyTreeRestore(restore_args=_as_numpy(structure))
    tree = handler.restore(folder, args=arguments)
    return {
        keystr(path, simple=True, separator='/'): np.asarray(leaf)
        for path, leaf in tree_leaves_with_path(tree)
    }


def _as_numpy(structure: PyTree) -> PyTree[ocp.RestoreArgs]:
    import jax  # noqa: PLC0415

    return jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)


def summary(state: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Paths, and for each array its norm and `POINTS` values at equal distances."""
    paths = sorted(state)
    values = []
    for path in paths:
        flat = state[path].astype(np.float64).ravel()
        points = flat[np.linspace(0, flat.size - 1, POINTS).astype(int)]
        values.append([np.linalg.norm(flat), *points])
    return np.array(paths), np.array(values)
