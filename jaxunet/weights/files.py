"""Weight files by their extension: unet.cu's `.bin`, guided-diffusion's `.pt`, and `.safetensors`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.weights import guided_diffusion, unetcu
from jaxunet.weights.fields import differences, network_fields
from jaxunet.weights.names import Shape, check_tree
from jaxunet.weights.safetensors_file import SafetensorsFile, write_safetensors
from jaxunet.weights.torch_file import TorchFile, write_torch

EXTENSIONS = ('.bin', '.pt', '.safetensors')
METADATA = 'jaxunet_config'  # key of our metadata: the config as JSON, and these fields more:
ORDER, CLASSES = 'new_attention_order', 'class_names'
MOMENTS = ('optimizer.mu.', 'optimizer.nu.')  # before the names of AdamW's moments in .safetensors
Tree = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """What a weight file holds.

    Fields:
      params: our parameter tree, float32 numpy arrays.
      config: the model's; from the file's metadata or header, inferred from its shapes, or the one given.
      moments: Adam's first and second, trees like `params`, where the file has them.
      note: for people: the kind of file, its size, and what had to be assumed.
      class_names: of the labels 0, 1, ..., where the file has them.
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
) -> Weights:
    """Reads a weight file. Nothing in it is executed, and its sizes are checked before anything is allocated.

    Args:
      config: the model that the weights must belong to; None: as the file says or shows.
      image_size, num_heads, num_head_channels: of a .pt or .safetensors without our metadata, whose shapes do not show them.
      new_attention_order: guided-diffusion's option `use_new_attention_order` of such a file; None: False, its default.

    Raises:
      UserError: unknown extension, no such file, damaged or hostile contents, numbers that are not finite, or another network.
    """
    extension = _extension(path)
    given = {
        'image_size': image_size,
        'num_heads': num_heads,
        'num_head_channels': num_head_channels,
    }
    hints = {name: value for name, value in given.items() if value is not None}
    try:
        with open(path, 'rb') as file:
            if extension == '.bin':
                if hints or new_attention_order is not None:
                    named = ', '.join(
                        [
                            *hints,
                            *(['new_attention_order'] if new_attention_order is not None else []),
                        ]
                    )
                    raise UserError(
                        f'{path}: {named}: a .bin of unet.cu tells its whole architecture; leave this out'
                    )
                return _from_bin(unetcu.read(str(path), file, config))
            if extension == '.pt':
                with TorchFile(str(path), file) as state:
                    return _read_state(state, config, hints, new_attention_order)
            return _read_state(SafetensorsFile(str(path), file), config, hints, new_attention_order)
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
            f'{path}: extension: expected one of {known}, found {found}{near_misses(extension, EXTENSIONS)}'
        )
    return extension


def _read_state(
    state: TorchFile | SafetensorsFile,
    config: Config | None,
    hints: dict[str, Any],
    new_order: bool | None,
) -> Weights:
    path, shapes, metadata = state.path, dict(state.shapes), state.metadata
    moment_shapes = [_take(shapes, prefix) for prefix in MOMENTS]
    own, own_order, class_names = _own_metadata(path, metadata)
    if own is not None:
        guided_diffusion.check_against_shapes(own, shapes, f'{path}: metadata {METADATA}')
    known = config or own
    if known is not None and hints:
        raise UserError(
            f'{path}: {", ".join(hints)}: the config of this file is known; leave this out'
        )
    if (
        config is not None
        and own is not None
        and (problems := differences(network_fields(config), network_fields(own)))
    ):
        raise UserError(
            f'{path}: not the network of the config:\n' + '\n'.join(f'  {p}' for p in problems)
        )
    assumed: list[str] = []
    if known is None:
        known, assumed = guided_diffusion.infer_config(shapes, path, **hints)
    if new_order is not None and own_order is not None and new_order != own_order:
        raise UserError(
            f'{path}: new_attention_order: the file says {own_order}, {new_order} was asked for; leave this out'
        )
    new = own_order if own_order is not None else new_order
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
            '%s does not tell everything about its model; assumed: %s', path, ', '.join(assumed)
        )
    return Weights(_tree(state.read, known, new, ''), known, moments, note, class_names)


def _tree(read: Callable[[str], np.ndarray], config: Config, new_order: bool, prefix: str) -> Tree:
    return guided_diffusion.to_tree(
        lambda name: read(prefix + name), config, new_attention_order=new_order
    )


def _take(shapes: dict[str, Shape], prefix: str) -> dict[str, Shape]:
    """Removes the tensors of a prefix from `shapes` and gives them, without it."""
    return {
        name.removeprefix(prefix): shapes.pop(name)
        for name in list(shapes)
        if name.startswith(prefix)
    }


def _own_metadata(
    path: str, metadata: dict[str, str]
) -> tuple[Config | None, bool | None, tuple[str, ...]]:
    """The config, the attention order and the names of the classes that our writer stored; None, None, () in other files."""
    if METADATA not in metadata:
        return None, None, ()
    try:
        values = json.loads(metadata[METADATA])
        order = values.pop(ORDER) if isinstance(values, dict) and ORDER in values else None
        if not isinstance(order, bool):
            raise UserError(f'{ORDER}: expected true or false, found {order!r}')
        names = values.pop(CLASSES, [])
        config = resolve(values)
        if (
            not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
            or len(names) > config.model.num_classes
        ):
            raise UserError(
                f'{CLASSES}: expected the names of at most {config.model.num_classes} classes, found {str(names)[:80]}'
            )
        return config, order, tuple(names)
    except (UserError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f'{path}: metadata {METADATA}: {error}') from None


def _check_second_moments(source: str, tree: Tree) -> None:
    for name, leaf in guided_diffusion.flatten(tree).items():
        if (leaf < 0).any():
            raise UserError(
                f'{source}: second moment of {"/".join(name)}: found {leaf.min()}, expected 0 or more (means of squares)'
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
    """Writes a weight file, whole or not at all: into a temporary file beside `path`, which then takes its name.

    Args:
      moments: Adam's first and second, for .bin and .safetensors.
      new_attention_order: order of qkv's rows in .pt and .safetensors; False is guided-diffusion's default.
      class_names: of the labels 0, 1, ..., which .pt and .safetensors keep.

    Raises:
      UserError: unknown extension, a tree that is not the config's network or not finite, a network that the format cannot
        express (the message lists the fields), or a folder that cannot be written.
    """
    extension = _extension(path)
    if extension == '.bin':
        if new_attention_order:
            raise UserError(
                f'{path}: new_attention_order: unet.cu has one order only; leave this out'
            )
        unetcu.header_of(config, has_adamw=moments is not None)
    if extension == '.pt':
        guided_diffusion.check_expressible(config)
        if moments is not None:
            raise UserError(
                f'{path}: a .pt of guided-diffusion holds no optimizer moments; write .safetensors or .bin'
            )
    check_tree(params, config)
    if moments is not None:
        check_tree(moments[0], config, 'first moments')
        check_tree(moments[1], config, 'second moments')
        _check_second_moments('parameters', moments[1])

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
        # One key only: the safetensors library writes several in random order.
        fields = {ORDER: new_attention_order} | (
            {CLASSES: list(class_names)} if class_names else {}
        )
        metadata = {METADATA: json.dumps(to_dict(config) | fields)}
        if extension == '.pt':
            write_torch(file, state, metadata)
        else:
            write_safetensors(file.name, state, metadata)


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when all of it is on the disk; after an error nothing of it is left. Its folder is made."""
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
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(
            temporary, 0o666 & ~umask
        )  # temporary files are private; this one is the user's like any other
        os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f'{path}: cannot be written: {error.strerror or error}') from None
        raise
