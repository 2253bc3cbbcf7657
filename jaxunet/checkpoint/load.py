"""Loads a model from any path.

The path is a workdir, one checkpoint in it, a weight file of this or another program, or a folder
of diffusers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import jax
import numpy as np
from absl import logging

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.averages import pick_weights
from jaxunet.checkpoint.fine_tune import Network, fit
from jaxunet.checkpoint.folders import find
from jaxunet.checkpoint.optimizer import get_moments
from jaxunet.checkpoint.state import TrainState, state_from_weights
from jaxunet.config import Config
from jaxunet.config.consistency import NEEDS_WEIGHTS, check_guiding, check_teacher
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import why_missing
from jaxunet.runtime.remote import on_disk
from jaxunet.weights import Stated, check_tree, hub, is_folder, read_weights


@dataclass(frozen=True)
class Model:
    """Weights and the config they belong to.

    Attributes:
      params: float32 numpy arrays.
      moments: Adam's moments; None if the source has none.
      note: describes which weights these are.
      class_names: names of the labels 0, 1, ...; empty if the source has none.
      new_attention_order: for a weight file, see `jaxunet.weights.Weights`.
      step: step of a checkpoint; None for a weight file.
    """

    config: Config
    params: Params
    moments: tuple[Params, Params] | None
    note: str
    class_names: tuple[str, ...] = ()
    new_attention_order: bool | None = None
    step: int | None = None


def load_model(
    path: str,
    *,
    ema: str = '',
    trained: bool = False,
    config: Config | None = None,
    new_attention_order: bool | None = None,
    like: Config | None = None,
    **stated: Unpack[Stated],
) -> Model:
    """Reads a model.

    Args:
      ema: rate or width of the average to take from a run; '' takes its first rate, 'none' the
        weights without averaging (`averages.pick_several`). A weight file has one set of weights;
        only a checkpoint of PyTorch may have weights and averages.
      trained: if `ema` is '' and the source has Adam's moments, take the weights that the moments
        belong to.
      config: the model of a weight file that does not describe it; None = the file describes it.
      new_attention_order: guided-diffusion's `use_new_attention_order`, for a weight file that does
        not state it.
      like: instead of `config`, the config of a run that is to start from the weights; it supplies
        what a weight file does not state about its own model.
      stated: without a config, further facts that a weight file leaves open.

    Raises:
      UserError: nothing at the path can be read, a needed option is neither in the file nor given,
        or an option does not apply to the file.
    """
    path = hub.on_this_machine(path)
    check_exists(path)
    if _is_run(path):
        there = find(path) is not None  # else, the reader of checkpoints says what is expected
        if there and config is not None:
            raise UserError(
                f'{path}: a checkpoint holds its own config; leave --config and --preset out'
            )
        given = ['new_attention_order'] * (new_attention_order is not None) + list(stated)
        if there and given:
            flags = ', '.join(f'--{name}' for name in given)
            raise UserError(f'{path}: a checkpoint already describes its model; leave {flags} out')
        return _from_checkpoint(path, ema or ('none' if trained else ''))
    weights = read_weights(
        path,
        config,
        ema=ema,
        trained=trained,
        new_attention_order=new_attention_order,
        like=like,
        **stated,
    )
    return Model(
        weights.config,
        weights.params,
        weights.moments,
        f'{path}: {weights.note}',
        weights.class_names,
        weights.new_attention_order,
    )


def _is_run(path: str) -> bool:
    """Returns True for a folder that is not one of diffusers, and so should be a run."""
    folder = pathlib.Path(path)
    return folder.is_dir() and (find(folder) is not None or not is_folder(folder))


def check_exists(path: str) -> None:
    """Checks that there is something at the path of a model.

    Raises:
      UserError: there is not; the message suggests similar names beside it.
    """
    if not (file := pathlib.Path(path)).exists():
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UserError(
            f'{path}: no such file or folder'
            + (
                why_missing(path)
                or near_misses(file.name, siblings)
                or '; expected a workdir, a checkpoint in one, a .bin, .pt, .safetensors or .pkl '
                'file, or a folder of diffusers'
            )
        )


def _from_checkpoint(path: str, ema: str) -> Model:
    restored = checkpoint.read(path)
    picked = pick_weights(restored, ema)
    return Model(
        restored.config,
        picked.params,
        get_moments(restored.state.opt_state),
        f'{path}, step {int(restored.state.step)}, {picked.note}',
        restored.facts.class_names,
        step=int(restored.state.step),
    )


@dataclass(frozen=True)
class Initial:
    """Weights of `config.init_from`, fitted to the config's network.

    Attributes:
      params: float32 numpy arrays.
      moments: Adam's moments; None if they start at 0.
      note: describes which weights these are.
      report: lines that say what is kept, what is initialized and what gets another meaning.
    """

    params: Params
    moments: tuple[Params, Params] | None
    note: str
    report: tuple[str, ...]


def load_initial(config: Config, class_names: Sequence[str] = ()) -> TrainState | None:
    """Returns a state at step 0 with the weights of `config.init_from`; None if that is empty.

    Logs `Initial.report`.

    Args:
      class_names: names of the labels 0, 1, ... of the run; empty if they are not known.

    Raises:
      UserError: there are no weights there, or the config's network cannot start from them.
    """
    if not config.init_from:
        if config.diffusion.objective == 'consistency':
            raise UserError(NEEDS_WEIGHTS)
        return None
    initial = fit_initial(config, class_names)
    logging.info('starting from %s:\n  %s', initial.note, '\n  '.join(initial.report))
    return state_from_weights(config, initial.params, initial.moments)


def fit_initial(config: Config, class_names: Sequence[str] = ()) -> Initial:
    """Reads `config.init_from`, which is not empty, and fits it to the config's network.

    Args:
      class_names: see `load_initial`.

    Raises:
      UserError: there are no weights there, or the config's network cannot start from them.
    """
    order = {'': None, 'legacy': False, 'new': True}[config.init_from_order]
    if order is not None and not config.init_from.lower().endswith(('.pt', '.safetensors')):
        raise UserError(
            f'init_from_order: {config.init_from} has one order; only a .pt or .safetensors may '
            'need it; leave it out'
        )
    try:
        model = load_model(
            config.init_from, ema=config.init_from_ema, like=config, new_attention_order=order
        )
    except UserError as error:
        raise UserError(str(error).replace('--ema', 'init_from_ema')) from None
    if config.diffusion.objective == 'consistency':
        check_teacher(model.config, config.init_from, config)
        check_guiding(model.config, config)
    fitted = fit(
        model.params,
        Network(model.config, model.class_names),
        Network(config, class_names),
        config.init_from,
    )
    check_tree(fitted.params, config)
    if config.diffusion.folds_guidance and not fitted.complete:
        raise UserError(
            f'init_from: {config.init_from}: diffusion.consistency_guidance needs all weights of '
            f'the model as they are, found {"; ".join(fitted.report)}'
        )
    # The moments of a run belong to the weights it trained, not to their averages.
    averaged = _is_run(on_disk(config.init_from)) and config.init_from_ema != 'none'
    has_moments = model.moments is not None and not averaged
    reason = '' if fitted.complete else 'not all weights are kept'
    if config.optimizer.name == 'muon':
        reason = 'optimizer.name=muon has other ones'
    moments = model.moments if has_moments and not reason else None
    report = list(fitted.report)
    if has_moments:
        report.append(
            f"left out: Adam's moments, as {reason}" if reason else "kept: Adam's moments"
        )
    return Initial(jax.tree.map(np.asarray, fitted.params), moments, model.note, tuple(report))
