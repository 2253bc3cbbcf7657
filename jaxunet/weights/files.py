"""Reads and writes weight files by their extension: `.bin`, `.pt` and `.safetensors`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, TypedDict

import numpy as np
from absl import logging

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.untrusted import parse_json, shown
from jaxunet.weights import guided_diffusion, unetcu
from jaxunet.weights.fields import differences, network_fields
from jaxunet.weights.names import Shape, Tree, check_tree, without_augmentation
from jaxunet.weights.safetensors_file import SafetensorsFile, write_safetensors
from jaxunet.weights.torch_file import TorchFile, write_torch

EXTENSIONS = ('.bin', '.pt', '.safetensors')
METADATA = 'jaxunet_config'  # key of our metadata: the config as JSON, plus these two fields
ORDER, CLASSES = 'new_attention_order', 'class_names'
MOMENTS = ('optimizer.mu.', 'optimizer.nu.')  # prefixes of AdamW's moments in .safetensors


class Hints(TypedDict, total=False):
    """Fields of a model that the shapes of its tensors do not show."""

    image_size: tuple[int, ...]
    num_heads: int
    num_head_channels: int


class _OwnMetadata(NamedTuple):
    """Our writer's metadata; empty in the files of other programs."""

    config: Config | None = None
    new_order: bool | None = None
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weights:
    """The contents of a weight file.

    Fields:
      params: our parameter tree, float32 numpy arrays.
      config: the model's config: the one given, the file's, or inferred from its shapes.
      moments: Adam's first and second moments, trees like `params`; None if the file has none.
      note: kind of file, number of parameters and assumptions, for reports.
      class_names: names of the labels 0, 1, ...; empty if the file has none.
    """

    params: Tree
    config: Config
    moments: tuple[Tree, Tree] | None
    note: str
    class_names: tuple[str, ...] = ()


def read_weights(
    path: str | os.PathLike[str],
    config: Config | None = None,
    *,
    image_size: tuple[int, ...] | None = None,
    num_heads: int | None = None,
    num_head_channels: int | None = None,
    new_attention_order: bool | None = None,
    like: Config | None = None,
) -> Weights:
    """Reads a weight file.

    Nothing in it is executed, and its sizes are checked before anything is allocated.

    Args:
      config: the model that the weights must belong to; None = the file's own.
      like: the config of a run that is to start from the weights, instead of `config`. The file's
        own model may differ from it; what a file does not state about its model is taken from it.
      image_size, num_heads, num_head_channels: the model's, for a .pt or .safetensors without our
        metadata, as its shapes do not show them.
      new_attention_order: guided-diffusion's option `use_new_attention_order` of such a file;
        None = False, its default.

    Raises:
      UserError: unknown extension, no such file, damaged or malicious contents, numbers that are
        not finite, or another network.
    """
    extension = _extension(path)
    hints = Hints()
    if image_size is not None:
        hints['image_size'] = image_size
    if num_heads is not None:
        hints['num_heads'] = num_heads
    if num_head_channels is not None:
        hints['num_head_channels'] = num_head_channels
    try:
        with open(path, 'rb') as file:
            if extension == '.bin':
                order = [] if new_attention_order is None else ['new_attention_order']
                if named := ', '.join([*hints, *order]):
                    raise UserError(
                        f'{path}: {named}: a .bin of unet.cu states its whole architecture; '
                        'leave this out'
                    )
                return _from_bin(unetcu.read(str(path), file, config))
            if extension == '.pt':
                with TorchFile(str(path), file) as state:
                    return _read_state(state, config, hints, new_attention_order, like)
            tensors = SafetensorsFile(str(path), file)
            return _read_state(tensors, config, hints, new_attention_order, like)
    except FileNotFoundError:
        raise UserError(f'{path}: no such file') from None
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None


def _from_bin(contents: unetcu.Contents) -> Weights:
    return Weights(contents.params, contents.config, contents.moments, contents.note)


def _extension(path: str | os.PathLike[str]) -> str:
    extension = pathlib.Path(path).suffix.lower()
    if extension not in EXTENSIONS:
        known = ', '.join(EXTENSIONS)
        found = repr(extension) if extension else 'none'
        raise UserError(
            f'{path}: extension: expected one of {known}, found {found}'
            f'{near_misses(extension, EXTENSIONS)}'
        )
    return extension


def _read_state(
    state: TorchFile | SafetensorsFile,
    config: Config | None,
    hints: Hints,
    new_order: bool | None,
    like: Config | None,
) -> Weights:
    path, shapes = state.path, dict(state.shapes)
    moment_shapes = [_take(shapes, prefix) for prefix in MOMENTS]
    own = _own_metadata(path, state.metadata)
    if own.config is not None:
        guided_diffusion.check_against_shapes(own.config, shapes, f'{path}: metadata {METADATA}')
    _check_given(path, config, hints, new_order, own)
    known, assumed = config or own.config, list[str]()
    if known is None and like is not None:
        known = guided_diffusion.config_like(shapes, path, like)
        objective = known.diffusion.objective
        assumed += ["the config's attention heads", f'diffusion.objective={objective}']
    elif known is None:
        known, assumed = guided_diffusion.infer_config(shapes, path, **hints)
    new = own.new_order if own.new_order is not None else new_order
    if new is None:
        new = False
        assumed.append('use_new_attention_order=False')
    guided_diffusion.check_names(shapes, known, path)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    note = f'guided-diffusion names, {total:,} parameters'
    moments = None
    if any(moment_shapes):
        for moment in moment_shapes:
            guided_diffusion.check_names(moment, known, f'{path} (moments)')
        trees = [_tree(state.read, known, new, prefix) for prefix in MOMENTS]
        _check_second_moments(path, trees[1])
        moments = trees[0], trees[1]
        note += ', with Adam moments'
    if assumed:
        note += f'; assumed {", ".join(assumed)}'
        logging.warning(
            '%s does not state everything about its model; assumed: %s', path, ', '.join(assumed)
        )
    return Weights(_tree(state.read, known, new, ''), known, moments, note, own.class_names)


def _check_given(
    path: str, config: Config | None, hints: Hints, new_order: bool | None, own: _OwnMetadata
) -> None:
    """Checks what the caller gave against what the file states."""
    if (config or own.config) is not None and hints:
        raise UserError(
            f'{path}: {", ".join(hints)}: the config of this file is known; leave this out'
        )
    if config is not None and own.config is not None:
        problems = differences(network_fields(config), network_fields(own.config))
        if problems:
            lines = '\n'.join(f'  {p}' for p in problems)
            raise UserError(f'{path}: not the network of the config:\n{lines}')
    if new_order is not None and own.new_order is not None and new_order != own.new_order:
        raise UserError(
            f'{path}: new_attention_order: the file says {own.new_order}, '
            f'{new_order} was asked for; leave this out'
        )


def _tree(read: Callable[[str], np.ndarray], config: Config, new_order: bool, prefix: str) -> Tree:
    return guided_diffusion.to_tree(
        lambda name: read(prefix + name), config, new_attention_order=new_order
    )


def _take(shapes: dict[str, Shape], prefix: str) -> dict[str, Shape]:
    """Removes the tensors with a prefix from `shapes` and returns them without the prefix."""
    return {
        name.removeprefix(prefix): shapes.pop(name)
        for name in list(shapes)
        if name.startswith(prefix)
    }


def _own_metadata(path: str, metadata: dict[str, str]) -> _OwnMetadata:
    if METADATA not in metadata:
        return _OwnMetadata()
    source = f'{path}: metadata {METADATA}'
    values = parse_json(metadata[METADATA], source, advice='export the model again')
    try:
        order = values.pop(ORDER, None)
        if not isinstance(order, bool):
            raise UserError(f'{ORDER}: expected true or false, found {shown(order)}')
        names = values.pop(CLASSES, [])
        config = resolve(values)
        most = config.model.num_classes
        strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not strings or len(names) > most:
            raise UserError(
                f'{CLASSES}: expected the names of at most {most} classes, found {shown(names)}'
            )
        return _OwnMetadata(config, order, tuple(names))
    except (UserError, ValueError, OverflowError) as error:
        raise UserError(f'{source}: {error}') from None


def _check_second_moments(source: str, tree: Tree) -> None:
    for name, leaf in guided_diffusion.flatten(tree).items():
        if (leaf < 0).any():
            raise UserError(
                f'{source}: second moment of {"/".join(name)}: found {leaf.min()}, '
                'expected 0 or more (means of squares)'
            )


def write_weights(
    path: str | os.PathLike[str],
    params: Tree,
    config: Config,
    moments: tuple[Tree, Tree] | None = None,
    *,
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
      new_attention_order: order of qkv's rows in .pt and .safetensors; False is
        guided-diffusion's default.
      class_names: names of the labels 0, 1, ..., for .pt and .safetensors.

    Raises:
      UserError: unknown extension, a tree that is not finite or not the config's network, a
        network that the format cannot express (the message lists the fields), or a file that
        cannot be written.
    """
    extension = _extension(path)
    _check_expressible(path, extension, config, moments is not None, new_attention_order)
    check_tree(params, config)
    if moments is not None:
        check_tree(moments[0], config, 'first moments')
        check_tree(moments[1], config, 'second moments')
        _check_second_moments('parameters', moments[1])
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
        state = guided_diffusion.from_tree(params, config, new_attention_order=new_attention_order)
        for prefix, tree in zip(MOMENTS, moments or (), strict=False):
            values = guided_diffusion.from_tree(
                tree, config, new_attention_order=new_attention_order
            )
            state |= {prefix + name: value for name, value in values.items()}
        # A single key, because the safetensors library writes several in random order.
        fields = {ORDER: new_attention_order} | (
            {CLASSES: list(class_names)} if class_names else {}
        )
        metadata = {METADATA: json.dumps(to_dict(config) | fields)}
        if extension == '.pt':
            write_torch(file, state, metadata)
        else:
            write_safetensors(file.name, state, metadata)


def _check_expressible(
    path: str | os.PathLike[str],
    extension: str,
    config: Config,
    has_moments: bool,
    new_attention_order: bool,
) -> None:
    """Checks that the format can hold this model."""
    if extension == '.bin':
        if new_attention_order:
            raise UserError(
                f'{path}: new_attention_order: unet.cu has one order only; leave this out'
            )
        unetcu.header_of(config, has_adamw=has_moments)
    if extension == '.pt':
        guided_diffusion.check_expressible(config)
        if has_moments:
            raise UserError(
                f'{path}: a .pt of guided-diffusion holds no optimizer moments; '
                'write .safetensors or .bin'
            )


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the name `path` once it is written; an error removes it."""
    target = pathlib.Path(path)
    temporary = ''
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f'.{target.name}.', delete=False
        ) as file:
            temporary = file.name
            yield file  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
        # Temporary files are private; give this one the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f'{path}: cannot be written: {error.strerror or error}') from None
        raise
