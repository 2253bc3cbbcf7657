"""Checks that the content of a checkpoint fits the config that it was saved with."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax

from jaxunet.checkpoint.state import TrainState
from jaxunet.checkpoint.writer import orbax
from jaxunet.config import Config
from jaxunet.runtime.errors import UserError


class OtherVersionError(UserError):
    """A checkpoint of another version of the code, or of another network.

    Attributes:
      certain: True if the part that does not fit has a valid checksum; otherwise the checkpoint may
        simply be damaged.
    """

    def __init__(self, message: str, *, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


def check_arrays(state: TrainState, expected: TrainState) -> None:
    """Raises ValueError if an array has another shape or type than in the template."""
    for (path, got), want in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(
                f'{jax.tree_util.keystr(path)}: expected {want.dtype}{want.shape}, '
                f'found {got.dtype}{got.shape}'
            )


def check_method_states(
    name: pathlib.Path,
    folder: pathlib.Path,
    config: Config,
    shapes: TrainState,
    fields: Sequence[str],
) -> None:
    """Checks that the stored states of the weighting and the sampler have the expected leaves.

    Args:
      name: path of the checkpoint, for messages.
      folder: of the checkpoint, to read from.
      shapes: the state of the config.
      fields: names of the fields that are stored.

    Raises:
      OtherVersionError: a state has other leaves.
    """
    saved = orbax().PyTreeCheckpointHandler().metadata(folder / 'state').tree
    methods = {
        'weighting': f'loss.weighting={config.loss.weighting}',
        'timesteps': f'timesteps.sampler={config.timesteps.sampler}',
    }
    for field, method in methods.items():
        wanted = getattr(shapes, field) if field in fields else None
        found, expected = _leaf_names(saved.get(field)), _leaf_names(wanted)
        if sorted(found) != sorted(expected):
            raise OtherVersionError(
                f'{name}: was written by another version of jaxunet, whose state of {method} '
                f"holds {', '.join(found) or 'nothing'}; this one's holds "
                f'{", ".join(expected) or "nothing"}. Use the version that wrote it, or another '
                'run.',
                certain=False,
            )


def _leaf_names(tree: object) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator='.')
        for path, _ in jax.tree.leaves_with_path(tree)
    ]
