"""Writes a folder that diffusers loads as a pipeline; see `jaxunet.weights.diffusers_folder`."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.whole_files import written
from jaxunet.weights.diffusers import (
    CLASS,
    LABELS,
    PROGRAM,
    QKV,
    VERSION,
    constants,
    label_rows,
    network_problems,
    table,
    unet_config,
)
from jaxunet.weights.diffusers_folder import (
    CARD,
    CONFIG,
    INDEX,
    SCHEDULER,
    SCHEDULER_CONFIG,
    UNET,
    WEIGHTS,
)
from jaxunet.weights.diffusers_scheduler import process_problems, scheduler_config
from jaxunet.weights.model_card import model_card, pipeline_of
from jaxunet.weights.names import Tree, check_tree, from_tree, without_augmentation
from jaxunet.weights.own_metadata import METADATA, dump_metadata
from jaxunet.weights.safetensors_file import write_safetensors


def names_folder(path: str | os.PathLike[str], form: str | None) -> bool:
    """Returns True if a path to write is that of a folder of diffusers.

    Args:
      form: the format that is asked for: `PROGRAM`; None or '' = a path with a slash at its end.

    Raises:
      UserError: an unknown format.
    """
    if form not in (None, '', PROGRAM):
        raise UserError(f'format: expected {PROGRAM}, found {form!r}')
    return bool(form) or os.fspath(path).endswith('/')


def write(
    path: str | os.PathLike[str],
    params: Tree,
    config: Config,
    *,
    class_names: Sequence[str] = (),
    license_name: str = '',
    step: int | None = None,
    metrics: Sequence[str] = (),
) -> None:
    """Writes a folder that diffusers loads, whole or not at all.

    Leaves out the layer of `data.augment=edm`, which has no effect in sampling.

    Args:
      params: our parameter tree, float32.
      class_names: names of the labels 0, 1, ...
      license_name, step, metrics: for the model card (`model_card`).

    Raises:
      UserError: diffusers cannot express the model (the message lists the fields), the tree is not
        finite or not the config's network, or the folder exists or cannot be written.
    """
    path = expanded(path)
    check_new(path)
    check_expressible(config)
    card = model_card(
        config, license_name=license_name, step=step, class_names=class_names, metrics=metrics
    )
    check_tree(params, config)
    config, (params,) = without_augmentation(config, params)
    metadata = dump_metadata(config, new_order=False, class_names=tuple(class_names))
    scheduler = scheduler_config(config)
    index = {
        '_class_name': pipeline_of(config),
        '_diffusers_version': VERSION,
        'scheduler': ['diffusers', scheduler['_class_name']],
        'unet': ['diffusers', CLASS],
    }
    with written(path) as partial:
        for folder in (UNET, SCHEDULER):
            (partial / folder).mkdir(parents=True)
        _write_json(partial / INDEX, index)
        _write_json(partial / UNET / CONFIG, unet_config(config))
        _write_json(partial / SCHEDULER / SCHEDULER_CONFIG, scheduler)
        (partial / CARD).write_text(card, encoding='utf-8')
        with (partial / UNET / f'{WEIGHTS}.safetensors').open('wb') as file:
            write_safetensors(
                file, dict(_tensors(params, config)), {METADATA: metadata, 'format': 'pt'}
            )


def check_new(path: str) -> None:
    """Raises UserError if there is already something at the path of a folder to write."""
    there = pathlib.Path(path)
    if there.is_file() or (there.is_dir() and any(there.iterdir())):
        kind = 'a file' if there.is_file() else 'a folder with files'
        raise UserError(f'{path}: expected a new folder, found {kind}; remove it or name another')


def check_expressible(config: Config) -> None:
    """Raises UserError, with the fields, if diffusers has no such model."""
    if problems := [*network_problems(config), *process_problems(config)]:
        raise UserError(
            f'diffusers has no such model; write .safetensors instead:{itemized(problems)}'
        )


def _tensors(params: Tree, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and value of every tensor of the UNet2DModel."""
    for name, value in from_tree(params, table(config)).items():
        if f'.{QKV}.' in name:
            for part, rows in zip('qkv', np.split(value, 3), strict=True):
                yield name.replace(QKV, f'to_{part}'), np.ascontiguousarray(rows)
        elif name == LABELS:
            yield name, np.pad(value, ((0, label_rows(config) - len(value)), (0, 0)))
        else:
            yield name, value
    for name, constant in constants(config).items():
        yield name, constant.make()


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
