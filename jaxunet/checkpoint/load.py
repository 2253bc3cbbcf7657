"""A model from any path: a workdir, one checkpoint, or a weight file of unet.cu, guided-diffusion or our own."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import jax
import numpy as np
from absl import logging

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import TrainState, get_moments, initial_state
from jaxunet.config import Config
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.weights import check_tree, read_weights


@dataclass(frozen=True)
class Model:
    """Parameters and the config they belong to."""

    config: Config
    params: Params  # float32, numpy
    moments: tuple[Params, Params] | None  # Adam's, where the source has them
    note: str  # which weights these are
    class_names: tuple[str, ...] = ()  # of the labels 0, 1, ..., where the source has them


def load_model(
    path: str,
    *,
    ema: str = '',
    config: Config | None = None,
    new_attention_order: bool | None = None,
) -> Model:
    """Reads a model.

    Args:
      ema: rate of the average to take from a run ('' = its first, 'none' = the parameters themselves); a weight file has one set.
      config: the architecture of a weight file that does not tell; default: what the file says or shows.
      new_attention_order: guided-diffusion's `use_new_attention_order` of a weight file that does not tell; default: False, as there.

    Raises:
      UserError: nothing readable there, or options that do not apply to it.
    """
    if not pathlib.Path(path).exists():
        raise UserError(
            f'{path}: no such file or folder; expected a workdir, a checkpoint in one, or a .bin, .pt or .safetensors file'
        )
    if pathlib.Path(path).is_dir():
        if config is not None:
            raise UserError(f'{path}: a checkpoint holds its own config; leave --config out')
        if new_attention_order is not None:
            raise UserError(
                f'{path}: a checkpoint has one attention order; leave --new_attention_order out'
            )
        restored = checkpoint.read(path)
        params, note = checkpoint.pick_weights(restored.state, restored.config, ema)
        moments = get_moments(restored.state.opt_state)
        return Model(
            restored.config,
            params,
            moments,
            f'{path}, step {int(restored.state.step)}, {note}',
            restored.class_names,
        )
    if ema:
        raise UserError(f'--ema: {path} holds one set of weights; leave the flag out')
    weights = read_weights(path, config, new_attention_order=new_attention_order)
    return Model(
        weights.config,
        weights.params,
        weights.moments,
        f'{path}: {weights.note}',
        weights.class_names,
    )


def load_initial(config: Config) -> TrainState | None:
    """The state that `config.init_from` asks for, at step 0; None if it is empty.

    Raises:
      UserError: the weights do not fit the config's model.
    """
    if not config.init_from:
        return None
    path = pathlib.Path(config.init_from)
    model = load_model(config.init_from, config=None if path.is_dir() else config)
    check_tree(model.params, config)
    logging.info('starting from %s', model.note)
    # A run's averaged weights start a new run: their moments belong to other values.
    moments = None if path.is_dir() else model.moments
    return initial_state(config, jax.tree.map(np.asarray, model.params), moments)
