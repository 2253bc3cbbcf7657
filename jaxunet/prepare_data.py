"""Converts images to one file that opens at once: unet.cu's .bin, or an .npz with labels.

    python -m jaxunet.prepare_data --input X --output Y.{bin,npz} --image_size 64 \\
        [--channels 3] [--labels COLUMN] [--classes cat,dog] [--background white] [--bits 8] \\
        [--range LOW,HIGH] [--strict]

The input is anything that `data.path` accepts. Images are cropped to their centre and resized
(`jaxunet.data.pixels`), and written in sorted depth-first order of their paths. Images that already
have the given size keep their pixels, so that a .bin of them equals unet.cu's byte for byte, with
--background=drop if they are transparent.
Corrupt images and other files are listed, counted and left out; with --strict all of them are
listed in an error, and nothing is written.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import flags

from jaxunet.config import Config
from jaxunet.config.relations import check_pixels
from jaxunet.data.crop import Pixels, Shape
from jaxunet.data.images import plain_colours
from jaxunet.data.look import log_pixels
from jaxunet.data.pixels import BadImage
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.source import Source
from jaxunet.data.sources import compressed_tar, open_source, open_unpacked_tar
from jaxunet.data.tar import decompress
from jaxunet.data.threads import ordered_map
from jaxunet.data.unetcu_bin import header_bytes, to_values
from jaxunet.runtime import command
from jaxunet.runtime.errors import UserError, near_misses, plural, printable
from jaxunet.runtime.paths import expanded, of_user
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.whole_files import check_file, written

INPUT = flags.DEFINE_string(
    'input',
    None,
    'Images, as for data.path: folder, .zip, .tar(.gz|.xz), x-{00..99}.tar, .parquet, .arrow, '
    'LMDB, .npz, .bin(.gz), digits:, cifar10:[PATH], cifar10_test:[PATH].',
)
OUTPUT = flags.DEFINE_string(
    'output', None, 'The file to write: NAME.bin (unet.cu) or NAME.npz (uint8, with labels).'
)
IMAGE_SIZE = flags.DEFINE_string('image_size', None, 'SIDE or HEIGHT,WIDTH in pixels.')
CHANNELS = flags.DEFINE_integer(
    'channels',
    3,
    '1 (grey) or 3 (RGB), or 4 with --background=keep; for other channels of an .npz, .npy or '
    ".bin, the input's number.",
)
BACKGROUND = flags.DEFINE_string(
    'background', 'white', 'As data.background: white, black, #rrggbb, keep or drop.'
)
BITS = flags.DEFINE_enum(
    'bits', '8', ('8', '16'), 'Bits of each channel to write, as data.bits; 16 in .npz only.'
)
RANGE = flags.DEFINE_list(
    'range',
    [],
    'LOWEST,HIGHEST value of the images, such as 0,4095, as data.range. Written images use all of '
    'their bits.',
)
CLASSES = flags.DEFINE_list(
    'classes', [], 'Keep only these classes; they become labels 0, 1, ... in this order.'
)
LABELS = flags.DEFINE_string('labels', '', 'Where the labels come from, as data.labels.')
STRICT = flags.DEFINE_bool(
    'strict', False, 'Fail and write nothing if any file is corrupt or not an image.'
)
of_user(INPUT, OUTPUT)

SUFFIXES = ('.bin', '.npz')
MAX_SIDE = 2**16


def main(argv: Sequence[str]) -> None:
    """Converts the images that the flags name.

    Raises:
      UserError: see `prepare`.
    """
    if not INPUT.value:
        raise UserError(
            '--input: missing; give a folder or archive of images, '
            'or anything else that data.path accepts'
        )
    shape = (*parse_size(IMAGE_SIZE.value), CHANNELS.value)
    prepare(
        INPUT.value,
        OUTPUT.value or '',
        shape,
        labels=LABELS.value,
        classes=tuple(CLASSES.value),
        strict=STRICT.value,
        reading=parse_reading(),
    )


def parse_reading() -> Reading:
    """Returns the reading that the flags state.

    Raises:
      UserError: a flag has another form.
    """
    try:
        values = tuple(map(float, RANGE.value))
    except ValueError:
        raise UserError(
            f'--range: expected LOWEST,HIGHEST, found {",".join(RANGE.value)!r}'
        ) from None
    data = {'background': BACKGROUND.value, 'bits': int(BITS.value), 'range': values}
    config = Config().replace(data=data, model={'image_channels': CHANNELS.value})
    for problem in check_pixels(config):
        text = problem.replace('data.', '--').replace('model.image_', '--')
        raise UserError(text)
    return Reading.of(config)


def parse_size(text: str | None) -> tuple[int, int]:
    """Parses '64' or '48,64' into (height, width).

    Raises:
      UserError: the text has another form, or a side is out of range.
    """
    parts = (text or '').split(',')
    if (
        not text
        or len(parts) > 2
        or not all(
            p.strip().isascii() and p.strip().isdigit() and 1 <= int(p) <= MAX_SIDE for p in parts
        )
    ):
        raise UserError(
            f'--image_size: expected SIDE or HEIGHT,WIDTH, each 1 to {MAX_SIDE}, '
            f'such as 64 or 48,64; found {"nothing" if text is None else repr(text)}'
        )
    return int(parts[0]), int(parts[-1])


def prepare(
    path: str,
    output: str,
    image_shape: Shape,
    *,
    labels: str = '',
    classes: tuple[str, ...] = (),
    strict: bool = False,
    reading: Reading = PLAIN,
) -> None:
    """Writes the images of `path` to a complete .bin or .npz, or none, and prints a report.

    Args:
      path: anything that `data.path` accepts.
      output: the file to write.
      image_shape: (height, width, channels) of the images in it.
      labels, classes: see `open_source`.
      strict: fail if any file must be left out.
      reading: how stored values become pixels.

    Raises:
      UserError: the path is wrong, no image is usable, the file cannot be written, or with `strict`
        a file had to be left out; the message lists all such files.
    """
    target = Path(expanded(output))
    if target.suffix not in SUFFIXES:
        hint = near_misses(target.suffix, SUFFIXES)
        raise UserError(
            f'--output: expected a name that ends in .bin (unet.cu) or .npz, found "{output}"{hint}'
        )
    if image_shape[2] < 1:
        raise UserError(f'--channels: expected 1 (grey) or 3 (RGB), found {image_shape[2]}')
    if target.suffix == '.bin' and (reading.bits != 8 or reading.keeps):
        raise UserError(
            f'--output: {target} holds opaque pixels of 8 bits; write an .npz for --bits=16 or '
            '--background=keep'
        )
    check_file(target, '--output')
    if target.exists() and Path(expanded(path)).exists() and target.samefile(Path(expanded(path))):
        raise UserError(f'--output: {target} is the input; choose another name')
    try:
        with (
            written(target, '--output') as partial,
            _opened(path, image_shape, labels, classes, target.parent, reading) as source,
        ):
            log_pixels(source)
            write = _write_bin if target.suffix == '.bin' else _write_npz
            counts = write(source, partial)
            left_out = [*source.skipped, *counts.bad]
            if strict and left_out:
                raise _strict(left_out)
            _require_some(source, counts)
        _report(target, source, counts, left_out)
    except MemoryError:
        raise UserError(
            f'{target}: not enough memory to collect a .npz; write a .bin, which streams'
        ) from None


@contextlib.contextmanager
def _opened(
    path: str,
    shape: Shape,
    labels: str,
    classes: tuple[str, ...],
    scratch: Path,
    reading: Reading,
) -> Iterator[Source]:
    """Opens the source; a compressed tar is unpacked into `scratch` first, not into memory."""
    how: Any = {
        'image_shape': shape,
        'labels': labels,
        'classes': classes,
        'option': '--classes',
        'reading': reading,
    }
    if (tar := compressed_tar(path)) is None:
        yield open_source(path, **how, warn=False)  # `_report` lists the files that are no images
        return
    with tempfile.TemporaryDirectory(prefix='.prepare_data.', dir=scratch) as folder:
        plain = Path(folder) / 'unpacked.tar'
        decompress(tar, plain)
        yield open_unpacked_tar(plain, path, **how)


@dataclass
class _Counts:
    """Counts for the report."""

    kept: int = 0
    enlarged: int = 0  # the images among `kept` that were smaller
    # Name in the set, as in `Source.skipped`, and reason of corrupt images.
    bad: list[tuple[str, str]] = field(default_factory=list)


def _images(source: Source, counts: _Counts) -> Iterator[tuple[int, Pixels]]:
    """Yields index and pixels of every good image, in order, with a progress bar."""
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
            if isinstance(image, BadImage):
                counts.bad.append((_name_in_set(image), image.reason))
                continue
            counts.kept += 1
            counts.enlarged += image[1]
            yield index, image[0]


def _name_in_set(image: BadImage) -> str:
    """Returns the name of an image without the path of its set."""
    name = image.name
    for start in (f'{printable(image.images)}/', f'{image.images}: '):  # of a folder, an archive
        name = name.removeprefix(start)
    return name


def _write_bin(source: Source, partial: Path) -> _Counts:
    counts = _Counts()
    with partial.open('wb') as file:
        file.write(header_bytes(len(source), source.image_shape))
        for _, image in _images(source, counts):
            file.write(to_values(image).tobytes())
        file.seek(0)
        file.write(header_bytes(counts.kept, source.image_shape))
        _flush(file)
    return counts


def _write_npz(source: Source, partial: Path) -> _Counts:
    counts = _Counts()
    images = np.empty((len(source), *source.image_shape), source.reading.dtype)
    rows: list[int] = []
    for index, image in _images(source, counts):
        images[len(rows)] = plain_colours(image) if source.reading.keeps else image
        rows.append(index)
    arrays = {'images': images[: len(rows)]}
    if source.class_names:
        arrays |= {
            'labels': source.labels[rows],
            'class_names': np.array(source.class_names, np.str_),
        }
    with partial.open('wb') as file:
        # Uncompressed, so that training reads it from disk as it needs it.
        np.savez(file, **arrays)  # type: ignore[arg-type]
        _flush(file)
    return counts


def _flush(file: BinaryIO) -> None:
    """Flushes the file to the disk, so that an error appears before the file is renamed."""
    file.flush()
    os.fsync(file.fileno())


def _require_some(source: Source, counts: _Counts) -> None:
    if counts.kept == 0:
        raise UserError(
            f'{source.name}: {plural(len(counts.bad), "image")}, all corrupt, such as '
            f'{counts.bad[0][0]} ({counts.bad[0][1]})'
        )


def _strict(bad: list[tuple[str, str]]) -> UserError:
    listed = ''.join(f'\n  {name}: {reason}' for name, reason in bad)
    files = '1 file is corrupt or not an image'
    if len(bad) > 1:
        files = f'{len(bad)} files are corrupt or not images'
    return UserError(f'--strict: {files}; nothing was written:{listed}')


def _report(target: Path, source: Source, counts: _Counts, left_out: list[tuple[str, str]]) -> None:
    height, width, channels = source.image_shape
    for name, reason in left_out:
        print(f'left out {name}: {reason}')
    kept, files = plural(counts.kept, 'image'), plural(len(left_out), 'file')
    print(f'{target}: {kept} of {height}x{width}x{channels}; {files} left out')
    if source.unlabelled_by and target.suffix == '.npz':
        print(f'warning: no labels, as {source.unlabelled_by}')
    if counts.enlarged:
        print(f'note: {counts.enlarged} of {kept} had to be enlarged to {height}x{width}')
    if len(source.class_names) > 1 and target.suffix == '.bin':
        print(
            f'note: .bin has no place for labels; '
            f'write an .npz to keep the {len(source.class_names)} classes'
        )


if __name__ == '__main__':
    command.run(main)
