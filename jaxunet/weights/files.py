"""Reads and writes weight files by their extension: `.bin`, `.pt` and `.safetensors`.

The networks of NVlabs/edm, `.pkl`, are only read.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Unpack

import numpy as np
from absl import logging

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import opened
from jaxunet.runtime.whole_files import written
from jaxunet.weights import diffusers_folder, guided_diffusion, hub, noisy_classifier, unetcu
from jaxunet.weights.edm_pickle import NetworkPickle
from jaxunet.weights.inference import Stated
from jaxunet.weights.names import Tree, check_tree, from_tree, without_augmentation
from jaxunet.weights.noisy_classifier import Classifier
from jaxunet.weights.own_metadata import METADATA, dump_metadata, load_metadata
from jaxunet.weights.safetensors_file import SafetensorsFile, write_safetensors
from jaxunet.weights.state_dicts import MOMENTS, Given, Weights, check_second_moments, read_state
from jaxunet.weights.torch_file import TorchFile, write_torch

WRITTEN = ('.bin', '.pt', '.safetensors')
EXTENSIONS = (*WRITTEN, '.pkl')
NO_CLASSIFIER = 'expected a classifier in a .pt or .safetensors, found a '
PROGRAMS = (guided_diffusion.PROGRAM, unetcu.PROGRAM)  # programs for which a .pt can be written


def read_weights(
    path: str | os.PathLike[str],
    config: Config | None = None,
    *,
    ema: str = '',
    trained: bool = False,
    new_attention_order: bool | None = None,
    like: Config | None = None,
    **stated: Unpack[Stated],
) -> Weights:
    """Reads a weight file, or a folder of diffusers.

    Nothing in it is executed, and its sizes are checked before anything is allocated.

    Args:
      config: the model that the weights must belong to; None = the file's own.
      ema: for a .pt or folder that also holds averages: '' = the averages, 'none' = the weights
        themselves, or the rate that is stored with the averages.
      trained: if the file also holds the optimizer's state of its weights, '' means the weights.
      new_attention_order: guided-diffusion's option `use_new_attention_order`, for a .pt or
        .safetensors that does not state it; None = the file states it.
      like: instead of `config`, the config of a run that is to start from the weights. The file's
        own model may differ from it; what the file does not state about its model comes from it.
      stated: without a config, further facts that a file leaves open about its model.

    Raises:
      UserError: the extension is unknown, there is no such file, its contents are damaged,
        malicious or not finite, it holds another network, or something is neither in the file nor
        given.
    """
    path = on_disk(path)
    given = Given(config, stated, new_attention_order, like)
    if diffusers_folder.is_folder(pathlib.Path(path)):
        return diffusers_folder.read(path, given, ema)
    extension = extension_of(path)
    if ema and extension != '.pt':
        raise UserError(f'--ema: {path} holds one set of weights; leave the flag out')
    with opened(path) as file:
        if extension == '.bin':
            return _read_bin(str(path), file, given)
        if extension == '.pt':
            with TorchFile(str(path), file, ema, trained=trained) as state:
                return read_state(state, given)
        if extension == '.pkl':
            return read_state(NetworkPickle(str(path), file), given)
        return read_state(SafetensorsFile(str(path), file), given)


def stated_config_of(path: str | os.PathLike[str]) -> Config | None:
    """Returns the config that a weight file or a folder of diffusers states; None if it does not.

    Neither starts JAX nor reads weights.

    Raises:
      UserError: the file is missing, of another kind or damaged.
    """
    path = hub.on_this_machine(path)
    if diffusers_folder.is_folder(pathlib.Path(path)):
        return diffusers_folder.stated_config_of(path)
    extension = extension_of(path)
    if extension not in ('.safetensors', '.pkl'):
        return None
    with opened(path) as file:
        if extension == '.pkl':
            return NetworkPickle(path, file).config
        return load_metadata(path, SafetensorsFile(path, file).metadata).config


def read_classifier(path: str | os.PathLike[str], config: Config) -> Classifier:
    """Reads a classifier of noisy images, as safely as `read_weights`.

    Args:
      config: config of the diffusion model whose images it classifies.

    Raises:
      UserError: the file is of another kind, or not a classifier of such images.
    """
    path = on_disk(path)
    if pathlib.Path(path).is_dir():
        raise UserError(
            f'{path}: is a folder, expected the file of a classifier; a run of '
            'jaxunet.training.train_classifier writes it to WORKDIR/classifier.pt'
        )
    extension = extension_of(path)
    with opened(path) as file:
        if extension == '.pt':
            with TorchFile(str(path), file) as state:
                return noisy_classifier.read(state, config)
        if extension == '.safetensors':
            return noisy_classifier.read(SafetensorsFile(str(path), file), config)
    raise UserError(f'{path}: {NO_CLASSIFIER}{extension}')


def _read_bin(path: str, file: BinaryIO, given: Given) -> Weights:
    order = [] if given.new_order is None else ['new_attention_order']
    if named := ', '.join([*given.stated, *order]):
        raise UserError(
            f'{path}: {named}: a .bin of unet.cu states its whole architecture; leave this out'
        )
    contents = unetcu.read(path, file, given.config)
    return Weights(contents.params, contents.config, contents.moments, contents.note)


def extension_of(path: str | os.PathLike[str], allowed: Sequence[str] = EXTENSIONS) -> str:
    """Returns the extension of a weight file, one of `allowed`.

    Raises:
      UserError: it is another one.
    """
    extension = pathlib.Path(path).suffix.lower()
    if extension not in allowed:
        known = ', '.join(allowed)
        found = repr(extension) if extension else 'none (a folder for diffusers ends with a slash)'
        raise UserError(
            f'{path}: extension: expected one of {known}, found {found}'
            f'{near_misses(extension, allowed)}'
        )
    return extension


def write_weights(
    path: str | os.PathLike[str],
    params: Tree,
    config: Config,
    moments: tuple[Tree, Tree] | None = None,
    *,
    program: str = guided_diffusion.PROGRAM,
    new_attention_order: bool = False,
    class_names: Sequence[str] = (),
) -> None:
    """Writes a weight file, whole or not at all; creates its folder.

    A .bin and a .pt leave out the layer of `data.augment=edm`, which has no effect in sampling.

    Args:
      path: its extension names the format.
      params: our parameter tree, float32.
      config: the config of its network.
      moments: Adam's first and second moments, for .bin and .safetensors.
      program: program whose names a .pt gets, one of `PROGRAMS`.
      new_attention_order: order of qkv's rows in .pt and .safetensors; False is
        guided-diffusion's default.
      class_names: names of the labels 0, 1, ..., for .pt and .safetensors.

    Raises:
      UserError: the extension is unknown, the tree is not finite or not the config's network, the
        format cannot express the network (the message lists the fields), or the file cannot be
        written.
    """
    path = expanded(path)
    extension = extension_of(path, WRITTEN)
    _check_expressible(path, program, config, moments is not None, new_attention_order)
    check_tree(params, config)
    if moments is not None:
        check_tree(moments[0], config, 'first moments')
        check_tree(moments[1], config, 'second moments')
        check_second_moments('parameters', moments[1])
    if extension != '.safetensors' and config.augmentation_inputs:
        config, (params, *rest) = without_augmentation(config, params, *(moments or ()))
        moments = (rest[0], rest[1]) if rest else None
        logging.info(
            '%s: without the layer that tells the network of data.augment=edm, for which the '
            'format has no place; samples stay the same, as its input is 0 when sampling',
            path,
        )

    with _replacing(path) as file:
        if extension == '.bin':
            unetcu.write(file, params, config, moments)
            return
        state = _state_dict(params, config, moments, program, new_order=new_attention_order)
        # A single key, because the safetensors library writes several keys in random order.
        text = dump_metadata(config, new_order=new_attention_order, class_names=tuple(class_names))
        metadata = {METADATA: text}
        if extension == '.pt':
            write_torch(file, state, metadata)
        else:
            write_safetensors(file, state, metadata)


def _state_dict(
    params: Tree,
    config: Config,
    moments: tuple[Tree, Tree] | None,
    program: str,
    *,
    new_order: bool,
) -> dict[str, np.ndarray]:
    """Returns the tensors by the program's names; see `write_weights` for the arguments."""
    theirs = unetcu if program == unetcu.PROGRAM else guided_diffusion
    table, interleaved = theirs.table(config), theirs is not unetcu and not new_order
    state = from_tree(params, table, interleaved=interleaved)
    for prefix, tree in zip(MOMENTS, moments or (), strict=False):
        values = from_tree(tree, table, interleaved=interleaved)
        state |= {prefix + name: value for name, value in values.items()}
    return state


def write_classifier(
    path: str | os.PathLike[str], params: Tree, config: Config, classes: int
) -> None:
    """Writes a classifier of noisy images with guided-diffusion's names; creates its folder.

    Args:
      path: ends in `.pt` or `.safetensors`.
      params: parameters of `build_classifier(config, classes, ...)`, float32.

    Raises:
      UserError: another extension, or a file that cannot be written.
    """
    path = expanded(path)
    extension = extension_of(path, WRITTEN)
    if extension == '.bin':
        raise UserError(f'{path}: {NO_CLASSIFIER}{extension}')
    state = from_tree(params, noisy_classifier.table(config, classes), interleaved=True)
    with _replacing(path) as file:
        if extension == '.pt':
            write_torch(file, state, {})
        else:
            write_safetensors(file, state, {})


def _check_expressible(
    path: str | os.PathLike[str],
    program: str,
    config: Config,
    has_moments: bool,
    new_attention_order: bool,
) -> None:
    """Raises UserError if the format cannot hold this model."""
    extension = extension_of(path)
    if program != guided_diffusion.PROGRAM and extension != '.pt':
        raise UserError(f'{path}: only a .pt has the names of a program, found {program}')
    if extension == '.bin' or program == unetcu.PROGRAM:
        if new_attention_order:
            raise UserError(
                f'{path}: new_attention_order: unet.cu has one order only; leave this out'
            )
        unetcu.header_of(config, has_adamw=has_moments)
    elif extension == '.pt':
        try:
            guided_diffusion.check_expressible(config)
        except UserError as error:
            raise UserError(f'{error}{_names_that_fit(config)}') from None
    if extension == '.pt' and has_moments:
        raise UserError(
            f'{path}: a .pt of {program} holds no optimizer moments; write .safetensors or .bin'
        )


def _names_that_fit(config: Config) -> str:
    """Returns advice for a model that guided-diffusion does not have, if unet.cu has it."""
    try:
        unetcu.header_of(config, has_adamw=False)
    except UserError:
        return ''
    return f'. A .pt with --names={unetcu.PROGRAM} can hold it'


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the name `path` once it is written; an error removes it."""
    with written(path) as partial, partial.open('wb') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
