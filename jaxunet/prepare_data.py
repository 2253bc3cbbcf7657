"""Turns images into one file that opens at once: unet.cu's .bin, or a .npz of uint8 pixels with labels.

    python -m jaxunet.prepare_data --input X --output Y.{bin,npz} --image_size 64 [--channels 3] [--classes cat,dog] [--strict]

The input is anything that `data.path` may be. Images are cropped in the middle and resized (`jaxunet.data.pixels`) in sorted
depth-first path order; those that have the size already keep their pixels, so that a .bin of them is byte for byte unet.cu's. Files
that are no images, or corrupt, are named, counted and left out; with --strict they are an error, and nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from absl import flags

from jaxunet.config import cli
from jaxunet.data.pixels import BadImage, Pixels, Shape
from jaxunet.data.source import Source
from jaxunet.data.sources import is_compressed_tar, open_source, open_unpacked_tar
from jaxunet.data.tar import decompress
from jaxunet.data.threads import ordered_map
from jaxunet.data.unetcu_bin import header_bytes, to_values
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.progress import progress_bar

INPUT = flags.DEFINE_string(
    'input',
    None,
    'What data.path may be: a folder, .zip, .tar(.gz|.xz), .npz, .bin, digits:, cifar10:[PATH].',
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'The file to write: NAME.bin (unet.cu) or NAME.npz (uint8, with labels).'
)
IMAGE_SIZE = flags.DEFINE_string('image_size', None, 'SIDE or HEIGHT,WIDTH in pixels.')
CHANNELS = flags.DEFINE_integer(
    'channels', 3, '1 (grey) or 3 (RGB); as many as the input has for .npz and .bin.'
)
CLASSES = flags.DEFINE_list(
    'classes', [], 'Keep only these classes; they become labels 0, 1, ... in this order.'
)
STRICT = flags.DEFINE_bool(
    'strict', False, 'Fail, and write nothing, if any file is corrupt or no image.'
)

SUFFIXES = ('.bin', '.npz')
MAX_SIDE = 2**16


def main(argv: Sequence[str]) -> None:
    if not INPUT.value:
        raise UserError(
            '--input: missing; give a folder or archive of images, or anything else that data.path may be'
        )
    shape = (*parse_size(IMAGE_SIZE.value), CHANNELS.value)
    prepare(
        INPUT.value, OUTPUT.value or '', shape, classes=tuple(CLASSES.value), strict=STRICT.value
    )


def parse_size(text: str | None) -> tuple[int, int]:
    """(height, width) of '64' or '48,64'. Raises UserError."""
    parts = (text or '').split(',')
    if (
        not text
        or len(parts) > 2
        or not all(
            p.strip().isascii() and p.strip().isdigit() and 1 <= int(p) <= MAX_SIDE for p in parts
        )
    ):
        raise UserError(
            f'--image_size: expected SIDE or HEIGHT,WIDTH, each 1 to {MAX_SIDE}, such as 64 or 48,64; found {text!r}'
        )
    return int(parts[0]), int(parts[-1])


def prepare(
    path: str,
    output: str,
    image_shape: Shape,
    *,
    classes: tuple[str, ...] = (),
    strict: bool = False,
) -> None:
    """Writes the images of `path`, as (height, width, channels), to a .bin or .npz, which appears when it is complete.

    Raises:
      UserError: a wrong path, no usable image, no space; with `strict`, any file that had to be left out.
    """
    target = Path(output).expanduser()
    if target.suffix not in SUFFIXES:
        hint = near_misses(target.suffix, SUFFIXES)
        raise UserError(
            f'--output: expected a name that ends in .bin (unet.cu) or .npz, found "{output}"{hint}'
        )
    if image_shape[2] < 1:
        raise UserError(f'--channels: expected 1 (grey) or 3 (RGB), found {image_shape[2]}')
    if target.is_dir():
        raise UserError(f'--output: {target} is a folder; name a file')
    if (
        target.exists()
        and Path(path).expanduser().exists()
        and target.samefile(Path(path).expanduser())
    ):
        raise UserError(f'--output: {target} is the input; choose another name')
    partial = target.with_name(f'.{target.name}.{os.getpid()}.partial')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(path, image_shape, classes, target.parent) as source:
            if strict and source.skipped:
                raise _strict(list(source.skipped))
            told = (_write_bin if target.suffix == '.bin' else _write_npz)(source, partial, strict)
            os.replace(partial, target)
            _report(target, source, told)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f'{target}: cannot be written: {reason}; check the folder, its permissions and the free space'
        ) from None
    except MemoryError:
        raise UserError(
            f'{target}: not enough memory to collect a .npz; write a .bin, which streams'
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def _opened(path: str, shape: Shape, classes: tuple[str, ...], scratch: Path) -> Iterator[Source]:
    """The source; a compressed tar is first unpacked to a plain one beside the output, so that it need not fit into memory."""
    if not is_compressed_tar(path):
        yield open_source(path, image_shape=shape, classes=classes)
        return
    with tempfile.TemporaryDirectory(prefix='.prepare_data.', dir=scratch) as folder:
        plain = Path(folder) / 'unpacked.tar'
        decompress(Path(path).expanduser(), plain)
        yield open_unpacked_tar(plain, path, image_shape=shape, classes=classes)


@dataclass
class _Told:
    """What the report says of the images: how many were kept, how many of these enlarged, and (name, reason) of the corrupt ones."""

    kept: int = 0
    enlarged: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)


def _images(source: Source, strict: bool, told: _Told) -> Iterator[tuple[int, Pixels]]:
    """Index and pixels of every good image, in order, with a progress bar."""
    height, width = source.image_shape[:2]

    def load(index: int) -> tuple[Pixels, bool] | BadImage:
        try:
            pixels, stored = source.load(np.array([index]))[0], source.stored_size(index)
        except BadImage as error:
            return error
        return pixels, stored[0] < height or stored[1] < width

    with progress_bar(total=len(source), unit='image') as bar:
        for index, image in enumerate(ordered_map(load, range(len(source)))):
            bar.update()
            if not isinstance(image, BadImage):
                told.kept += 1
                told.enlarged += image[1]
                yield index, image[0]
                continue
            told.bad.append((image.name, image.reason))
            if strict:
                raise _strict(told.bad)


def _write_bin(source: Source, partial: Path, strict: bool) -> _Told:
    told = _Told()
    with partial.open('wb') as file:
        file.write(header_bytes(len(source), source.image_shape))
        for _, image in _images(source, strict, told):
            file.write(to_values(image).tobytes())
        _require_some(source, told)
        file.seek(0)
        file.write(header_bytes(told.kept, source.image_shape))
        _flush(file)
    return told


def _write_npz(source: Source, partial: Path, strict: bool) -> _Told:
    told = _Told()
    images = np.empty((len(source), *source.image_shape), np.uint8)
    rows: list[int] = []
    for index, image in _images(source, strict, told):
        images[len(rows)] = image
        rows.append(index)
    _require_some(source, told)
    arrays = {'images': images[: len(rows)]}
    if source.class_names:
        arrays |= {
            'labels': source.labels[rows],
            'class_names': np.array(source.class_names, np.str_),
        }
    with partial.open('wb') as file:
        # Uncompressed, so that training maps it into memory instead of reading it.
        np.savez(file, **arrays)  # type: ignore[arg-type]
        _flush(file)
    return told


def _flush(file: BinaryIO) -> None:
    """To the disk, whose errors belong before the renaming."""
    file.flush()
    os.fsync(file.fileno())


def _require_some(source: Source, told: _Told) -> None:
    if told.kept == 0:
        raise UserError(
            f'{source.name}: all {len(told.bad)} images are corrupt, such as {told.bad[0][0]} ({told.bad[0][1]})'
        )


def _strict(bad: list[tuple[str, str]]) -> UserError:
    listed = ''.join(f'\n  {name}: {reason}' for name, reason in bad)
    return UserError(
        f'--strict: {len(bad)} files are corrupt or no images; nothing was written:{listed}'
    )


def _report(target: Path, source: Source, told: _Told) -> None:
    height, width, channels = source.image_shape
    left_out = [*source.skipped, *told.bad]
    for name, reason in left_out:
        print(f'left out {name}: {reason}')
    print(
        f'{target}: {told.kept} images of {height}x{width}x{channels}; {len(left_out)} files left out'
    )
    if source.unlabelled_by and target.suffix == '.npz':
        print(
            f'warning: no labels, as {source.unlabelled_by}; for labels, move such images into a class sub-folder or away'
        )
    if told.enlarged:
        print(
            f'note: {told.enlarged} of {told.kept} images are smaller than {height}x{width} and were enlarged'
        )
    if source.class_names and target.suffix == '.bin':
        print(
            f'note: .bin has no place for labels; for the {len(source.class_names)} classes write a .npz'
        )


if __name__ == '__main__':
    cli.run(main)
