"""Reads and writes unet.cu's model file (`.bin`), and has the names of its `.pt`.

A .bin holds an int32[256] header, the parameters, and optionally AdamW's moments and cuRAND states,
all of it little-endian.
Source: clu0/unet.cu (`train_unet.py`, `generate.py`, `train_unet.cu`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.weights.fields import TRAINING_ONLY, differences, diffusion_fields, network_differences
from jaxunet.weights.inference import Inferred, Shapes
from jaxunet.weights.names import (
    BlockNames,
    Entry,
    Shape,
    Tree,
    check_finite,
    count,
    entries,
    flatten,
    from_file,
    to_file,
    unflatten,
)

PROGRAM = 'unet.cu'
MAGIC = 12345678
DATA_MAGIC = 20240620  # magic number of unet.cu's data files
HEADER = 1024  # bytes
RNG_STATE = 48  # bytes of one cuRAND XORWOW state
# Constants of unet.cu's code.
MULT, ATTENTION_LEVELS = (1, 2, 3, 4), (2, 3)
RES_BLOCKS, HEAD_WIDTH, GROUPS = 2, 32, 32
SIDE, MAX_PERIOD = 64, 1000
FACTOR = 2 ** (len(MULT) - 1)  # both sides of an image must be multiples of it
FIELDS = {  # word of the header -> field of the config
    'batch': 'data.batch_size',
    'channels_in': 'model.image_channels',
    'channels_model': 'model.base_channels',
    'height': 'data.image_size (height)',
    'width': 'data.image_size (width)',
    'max_period': 'model.max_period',
}
NAMES = BlockNames(
    res_block={
        'norm_1': 'gn1',
        'conv_1': 'cv3_1',
        'embed': 'l_emb',
        'norm_2': 'gn2',
        'conv_2': 'cv3_2',
        'shortcut': 'skip_connection',
    },
    attention={'norm': 'gn', 'qkv': 'qkv', 'proj': 'proj'},
)


class Header(NamedTuple):
    """The used words of the header, in order."""

    magic: int
    batch: int
    channels_in: int
    channels_model: int
    channels_out: int
    height: int
    width: int
    max_period: int
    has_adamw: int
    has_rng: int


class Contents(NamedTuple):
    """The contents of a model file; `jaxunet.weights.Weights` describes the fields."""

    config: Config
    params: Tree
    moments: tuple[Tree, Tree] | None
    note: str


def table(config: Config) -> list[Entry]:
    """Returns the tensors of unet.cu's file, in its order."""
    return entries(config, NAMES)


def config_of(header: Header) -> Config:
    """Returns the config that a header describes: unet.cu's network and training options.

    Raises:
      UserError: the header makes no valid config.
    """
    side = min(header.height, header.width)
    config = Config().replace(
        model={
            'image_channels': header.channels_in,
            'base_channels': header.channels_model,
            'channel_mult': MULT,
            'num_res_blocks': RES_BLOCKS,
            'attention_resolutions': tuple(side >> level for level in ATTENTION_LEVELS),
            'num_head_channels': HEAD_WIDTH,
            'num_classes': 0,
            'label_dropout': 0.0,
            'max_period': header.max_period,
        },
        diffusion={'learn_sigma': header.channels_out == 2 * header.channels_in},
        data={
            'path': '',  # a file does not name its training images
            'image_size': (header.height, header.width),
            'batch_size': header.batch,
        },
        optimizer={
            'learning_rate': 1e-4,
            'warmup_steps': 0,
            'schedule': 'constant',
            'clip_norm': 0.0,
        },
        train={'sample_every': 0},  # sample grids need 1 or 3 channels
    )
    return resolve(to_dict(config))


def infer(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """Infers the model of a state dict of unet.cu's PyTorch network, `model_100.pt` for example.

    Everything except the numbers of channels is a constant of unet.cu's code.

    Raises:
      UserError: a required tensor is missing, or unet.cu has no such network.
    """
    tensors = Shapes(shapes, source, PROGRAM)
    header = Header(
        magic=MAGIC,
        batch=1,
        channels_in=tensors.get('input_blocks.0.0.weight', 4)[1],
        channels_model=tensors.base_channels('time_embed.0.weight'),
        channels_out=tensors.get('out.2.weight', 4)[0],
        height=SIDE,
        width=SIDE,
        max_period=MAX_PERIOD,
        has_adamw=0,
        has_rng=0,
    )
    try:
        config = config_of(header)
    except UserError as error:
        raise UserError(f'{source}: unet.cu has no such network: {error}') from None
    model, diffusion = config.model, config.diffusion
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    for name in (*TRAINING_ONLY, 'attention_resolutions'):
        del fields[name]
    constants = {
        name: getattr(diffusion, name)
        for name in ('schedule', 'steps', 'rescale_timesteps', 'objective')
    }
    constants['image_size'] = (SIDE,)
    return Inferred(PROGRAM, fields, ATTENTION_LEVELS, diffusion.learn_sigma, constants)


def header_of(config: Config, *, has_adamw: bool) -> Header:
    """Returns the header of a config's file.

    Args:
      has_adamw: the file holds AdamW's moments.

    Raises:
      UserError: unet.cu has no such network; the message lists the fields.
    """
    height, width, channels = config.image_shape
    model = config.model
    header = Header(
        magic=MAGIC,
        batch=config.data.batch_size,
        channels_in=channels,
        channels_model=model.base_channels,
        channels_out=channels * (1 + config.diffusion.learn_sigma),
        height=height,
        width=width,
        max_period=model.max_period,
        has_adamw=int(has_adamw),
        has_rng=0,
    )
    problems = _problems(header, FIELDS.__getitem__)
    if problems:  # compare the other fields, with words that make a network
        config = config.replace(model={'base_channels': GROUPS, 'max_period': MAX_PERIOD})
        words = {'channels_model': GROUPS, 'height': SIDE, 'width': SIDE, 'max_period': MAX_PERIOD}
        header = header._replace(batch=1, **words)
    theirs = config_of(header)
    problems = [
        *differences(diffusion_fields(theirs), diffusion_fields(config)),
        *problems,
        *network_differences(theirs, config, min(height, width)),
    ]
    if problems:
        raise UserError(
            'unet.cu has no such model, so a .bin cannot hold it; write .safetensors instead. '
            f'What unet.cu needs:{itemized(problems)}'
        )
    return header


def _problems(header: Header, label: Callable[[str], str]) -> list[str]:
    """Returns the impossible words of a header, as `label: expected, found`.

    Args:
      label: names a word for the message.
    """
    problems = []
    for name, value in header._asdict().items():
        if (
            name in ('batch', 'channels_in', 'channels_model', 'height', 'width', 'max_period')
            and not 0 < value < 2**31
        ):
            problems.append(f'{label(name)}: expected 1 to 2147483647, found {value}')
        if name in ('height', 'width') and value % FACTOR:
            problems.append(f'{label(name)}: expected a multiple of {FACTOR}, found {value}')
        if name in ('has_adamw', 'has_rng') and value not in (0, 1):
            problems.append(f'{label(name)}: expected 0 or 1, found {value}')
    if header.channels_model % GROUPS:
        problems.append(
            f'{label("channels_model")}: expected a multiple of {GROUPS}, '
            f'found {header.channels_model}'
        )
    if header.channels_out not in (header.channels_in, 2 * header.channels_in):
        problems.append(
            f'{label("channels_out")}: expected {header.channels_in}, or '
            f'{2 * header.channels_in} with a learned variance, found {header.channels_out}'
        )
    return problems


def _label(name: str) -> str:
    word = Header._fields.index(name)
    return f'header word [{word}] ({name}, byte {4 * word})'


def read(path: str, file: BinaryIO, config: Config | None = None) -> Contents:
    """Reads a model file; compares all sizes with its length before it allocates anything.

    Args:
      path: the file's name, for messages.
      config: the expected network. Its other fields (data, training) are kept, and its batch size
        and image size may differ from the file's. None = the header's fields and unet.cu's
        constants.

    Raises:
      UserError: the file is of another kind or has a wrong length, its header has impossible
        fields, numbers are not finite, second moments are negative, or the network is not
        `config`'s; the message names field and byte.
    """
    size = os.fstat(file.fileno()).st_size
    header = _read_header(path, file, size)
    _check_least_size(path, header, size)
    try:
        theirs = config_of(header)
    except UserError as error:
        raise UserError(
            f'{path}: the header does not make a network that can be run: {error}'
        ) from None
    if config is not None:
        problems = network_differences(config, theirs, min(config.image_shape[:2]))
        if problems:
            raise UserError(f'{path}: not the network of the config:{itemized(problems)}')

    rows = table(theirs)
    total = count(rows)
    sections = ['parameters'] + ['first moments', 'second moments'] * header.has_adamw
    _check_size(path, header, total, sections, size)
    trees = []
    for i, name in enumerate(sections):
        values = np.frombuffer(file.read(4 * total), '<f4')
        if values.size != total:
            raise UserError(f'{path}: the file became shorter while it was read')
        trees.append(_split(path, rows, values, name, HEADER + 4 * total * i))
    note = f'unet.cu model, {total:,} parameters'
    note += ', with AdamW moments' if header.has_adamw else ''
    note += ', random states skipped' if header.has_rng else ''
    moments = (trees[1], trees[2]) if header.has_adamw else None
    return Contents(config or theirs, trees[0], moments, note)


def _check_least_size(path: str, header: Header, size: int) -> None:
    """Refuses a header whose network cannot fit into the file, before its shapes are computed.

    The time embedding and the outer convolutions give a lower bound.
    """
    base = header.channels_model
    least = 4 * (16 * base * base + 9 * base * (header.channels_in + header.channels_out))
    if least > size:
        label = _label('channels_model' if 64 * base * base > size else 'channels_in')
        raise UserError(
            f'{path}: {label}: {base} channels, {header.channels_in} in and '
            f'{header.channels_out} out, need more than {least:,} bytes, but the file has '
            f'{size:,}; it is truncated or damaged'
        )


def _check_size(path: str, header: Header, total: int, sections: list[str], size: int) -> None:
    """Checks the file's length against its header, for `total` parameters."""
    pixels = header.batch * header.channels_in * header.height * header.width
    rng = pixels * RNG_STATE * header.has_rng
    needed = HEADER + 4 * total * len(sections) + rng
    if size == needed:
        return
    parts = [f'{HEADER:,} header', *(f'{4 * total:,} {name}' for name in sections)]
    if rng:
        parts.append(f'{rng:,} random states')
    state = (
        f'truncated at byte {size:,}'
        if size < needed
        else f'{size - needed:,} bytes too long, from byte {needed:,} on'
    )
    raise UserError(
        f'{path}: expected {needed:,} bytes ({" + ".join(parts)}) as its header says, '
        f'found {size:,}: {state}'
    )


def _read_header(path: str, file: BinaryIO, size: int) -> Header:
    if size < HEADER:
        raise UserError(
            f'{path}: expected a header of {HEADER} bytes, found a file of {size} bytes; '
            'it is truncated or not a unet.cu file'
        )
    header = Header(*np.frombuffer(file.read(HEADER), '<i4')[: len(Header._fields)].tolist())
    if header.magic == DATA_MAGIC:
        raise UserError(
            f'{path}: this is a file of images (magic {DATA_MAGIC} at byte 0), not of weights '
            f'(magic {MAGIC}); give it as data.path'
        )
    if header.magic != MAGIC:
        raise UserError(
            f'{path}: {_label("magic")}: expected {MAGIC}, found {header.magic}; '
            'this is not a model file of unet.cu '
            '(for PyTorch or safetensors files use the extension .pt or .safetensors)'
        )
    if problems := _problems(header, _label):
        raise UserError(f'{path}: the header is damaged:{itemized(problems)}')
    return header


def _split(path: str, rows: list[Entry], values: np.ndarray, section: str, byte: int) -> Tree:
    """Splits a section of the file, which starts at `byte`, into our parameter tree."""
    leaves, start = {}, 0
    for row in rows:
        flat = values[start : start + math.prod(row.shape)]
        at = byte + 4 * start

        def where(index: int, name: str = row.name, at: int = at) -> str:
            return f'{section}: {name}, flat index {index} (byte {at + 4 * index:,}),'

        check_finite(flat, path, where)
        if section == 'second moments' and (flat < 0).any():
            index = int(np.argmax(flat < 0))
            raise UserError(
                f'{path}: {where(index)} is {flat[index]}, expected 0 or more: '
                'second moments are means of squares'
            )
        leaves[row.path] = from_file(row, flat.reshape(row.shape))
        start += flat.size
    return unflatten(leaves)


def write(
    file: BinaryIO, params: Tree, config: Config, moments: tuple[Tree, Tree] | None = None
) -> None:
    """Writes a model file that unet.cu's generate.py and train_unet read.

    Raises:
      UserError: unet.cu has no such network; the message lists the fields.
    """
    words = np.zeros(HEADER // 4, '<i4')
    header = header_of(config, has_adamw=moments is not None)
    words[: len(header)] = header
    file.write(words.tobytes())
    rows = table(config)
    for tree in (params, *(moments or ())):
        leaves = flatten(tree)
        for row in rows:
            file.write(to_file(row, np.asarray(leaves[row.path])).astype('<f4').tobytes())
