"""Stores finished samples on disk, so that an interrupted command can resume.

While a command draws the output `X`, the folder `X.partial` holds `run.json`, which identifies the
samples, and one file `FIRST-END.npz` per finished batch with samples FIRST..END−1. A file gets its
name only when it is complete. Several processes may write to one folder.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import logging
from jaxtyping import UInt8

from jaxunet.data.images import save_images
from jaxunet.metrics.arrays import read_arrays
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import parse_json, plain, shown

IDENTITY = 'run.json'


class Parts:
    """The finished samples of one output.

    Args:
      output: final path of the images.
      identity: everything that determines the pixels of sample i (weights, sampler, seed, ...), as
        JSON values.

    Raises:
      UserError: `X.partial` holds samples of another identity, or something else.
    """

    def __init__(self, output: str | os.PathLike[str], identity: Mapping[str, object]) -> None:
        path = Path(output).resolve()
        self.folder = path.with_name(f'{path.name}.partial')
        self.identity = json.loads(json.dumps(dict(identity)))
        self._check()

    def _check(self) -> None:
        """Raises `UserError` if the folder exists and belongs to other samples."""
        advice = (
            'repeat the command that wrote it, remove it to start over, or choose another --output'
        )
        if not self.folder.exists():
            return
        try:
            text = (self.folder / IDENTITY).read_bytes()
        except FileNotFoundError:
            # A process killed before it wrote run.json leaves at most incomplete files.
            if self.folder.is_dir() and all(
                p.name.endswith('.partial') for p in self.folder.iterdir()
            ):
                return
            raise UserError(
                f'{self.folder}: expected the samples of an interrupted run, '
                f'found no {IDENTITY} in it; {advice}'
            ) from None
        except OSError as error:
            raise UserError(
                f'{self.folder / IDENTITY}: cannot be read: {error.strerror or error}; {advice}'
            ) from None
        found = parse_json(text, str(self.folder / IDENTITY), advice=advice, finite=False)
        names = sorted(found.keys() | self.identity.keys())
        changed = [
            f'{plain(n)}: {shown(found.get(n))} there, {shown(self.identity.get(n))} now'
            for n in names
            if found.get(n) != self.identity.get(n)
        ]
        if changed:
            raise UserError(
                f'{self.folder}: holds the samples of another run ({"; ".join(changed[:20])}); '
                f'{advice}'
            )

    def finished(self) -> list[tuple[int, int]]:
        """Returns (first, end) of every stored batch, ascending."""
        names = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(
            (int(match[1]), int(match[2]))
            for name in names
            if (match := re.fullmatch(r'(\d+)-(\d+)\.npz', name))
        )

    def missing(self, first: int, end: int, size: int) -> list[tuple[int, int]]:
        """Returns the missing samples of first..end−1 as ranges (start, stop), ascending.

        Args:
          size: maximum length of a range.
        """
        ranges = []
        for part_first, part_end in [*self.finished(), (end, end)]:
            stop = min(part_first, end)
            ranges += [(start, min(start + size, stop)) for start in range(first, stop, size)]
            first = max(first, part_end)
        return ranges

    def save(self, first: int, images: UInt8[np.ndarray, 'samples height width channels']) -> None:
        """Stores the samples first, first + 1, ...

        Raises:
          UserError: the file cannot be written.
        """
        self.create()
        save_images(self._path(first, first + len(images)), images)

    def exists(self) -> bool:
        """Returns True if the folder exists and is identified by `run.json`."""
        return (self.folder / IDENTITY).is_file()

    def create(self) -> None:
        """Creates the folder with its `run.json` unless it exists.

        Raises:
          UserError: the folder cannot be written.
        """
        if self.exists():
            return
        partial = self.folder / f'{IDENTITY}.{uuid.uuid4().hex}.partial'
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.identity, indent=1), encoding='utf-8')
            partial.replace(self.folder / IDENTITY)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f'{self.folder}: cannot be written: {reason}; '
                'check the folder, its permissions and the free space'
            ) from error

    def _path(self, first: int, end: int) -> Path:
        return self.folder / f'{first:06d}-{end:06d}.npz'

    def load(self, count: int) -> UInt8[np.ndarray, 'samples height width channels'] | None:
        """Returns samples 0..count−1, or None if some are missing.

        A batch that cannot be read is removed with a warning and counts as missing.
        """
        images = None
        done = 0
        for first, end in self.finished():
            if first > done or done >= count:
                break
            part = self._read(first, end)
            if part is None:
                return None
            if images is None:
                images = np.empty((count, *part.shape[1:]), np.uint8)
            stop = min(end, count)
            images[first:stop] = part[: stop - first]
            done = max(done, stop)
        return images if done >= count else None

    def _read(self, first: int, end: int) -> np.ndarray | None:
        path = self._path(first, end)
        try:
            part = read_arrays(path, ('images',))['images']
            if part.dtype == np.uint8 and part.ndim == 4 and len(part) == end - first:
                return part
            problem = f'{part.dtype} of shape {part.shape}'
        except (UserError, OSError, KeyError) as error:
            problem = str(error)
        logging.warning('%s: damaged (%s); its samples are drawn again', path, problem)
        path.unlink(missing_ok=True)
        return None

    def remove(self) -> None:
        """Deletes the folder, after its samples were written to the output.

        Also deletes the half-written outputs of killed processes.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        output = glob.escape(self.folder.name.removesuffix('.partial'))
        for left in self.folder.parent.glob(f'.{output}.*.partial'):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
