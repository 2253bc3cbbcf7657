"""Stores finished samples on disk, so that an interrupted command can resume.

While a command draws the output `X`, the folder `X.partial` (for a URL, one in the cache folder)
holds `run.json`, which identifies the samples, and one file `FIRST-END.npz` per finished batch with
samples FIRST..END−1 and, if each is made from a picture, the pictures' checksums. A file gets its
name only when it is complete. Several processes may write to one folder.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import logging
from jaxtyping import UInt, UInt32

from jaxunet.metrics.arrays import DamagedError, read_arrays
from jaxunet.runtime.archives import expanded_limit
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.paths import is_remote
from jaxunet.runtime.untrusted import parse_json, plain, shown
from jaxunet.runtime.upload import staging
from jaxunet.runtime.whole_files import name_with, written

IDENTITY = 'run.json'
ADVICE = 'repeat the command that wrote it, remove it to start over, or choose another --output'
# Of a batch: types, dimensions.
ARRAYS = {'images': ((np.uint8, np.uint16), 4), 'made_from': ((np.uint32,), 1)}


class Parts:
    """The finished samples of one output.

    Args:
      output: final path of the images.
      identity: everything that determines the pixels of all samples (weights, sampler, seed, ...),
        as JSON values.
      made_from: for every sample of this command, a checksum of the picture that it is made from;
        None if samples are not made from pictures.

    Raises:
      UserError: `X.partial` holds samples of another identity or made from other pictures, or
        anything else.
    """

    def __init__(
        self,
        output: str | os.PathLike[str],
        identity: Mapping[str, object],
        made_from: UInt32[np.ndarray, ' samples'] | None = None,
    ) -> None:
        url = os.fspath(output)
        path = staging(url) if is_remote(url) else Path(output).resolve()
        self.folder = path.with_name(name_with(path.name, '.partial'))
        self.identity = json.loads(json.dumps(dict(identity)))
        self.made_from = made_from
        expanded_limit(0)  # a mistake in its variable is told before the work
        self._check()
        if made_from is not None:
            self._check_made_from(made_from)

    def _check(self) -> None:
        """Raises `UserError` if the folder exists and belongs to other samples."""
        if not self.folder.exists():
            return
        check_regular(self.folder / IDENTITY)
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
                f'found no {IDENTITY} in it; {ADVICE}'
            ) from None
        except OSError as error:
            raise UserError(
                f'{self.folder / IDENTITY}: cannot be read: {error.strerror or error}; {ADVICE}'
            ) from None
        stored = parse_json(text, str(self.folder / IDENTITY), advice=ADVICE, finite=False)
        names = sorted(stored.keys() | self.identity.keys())
        changed = [
            f'{plain(n)}: {shown(stored.get(n))} there, {shown(self.identity.get(n))} now'
            for n in names
            if stored.get(n) != self.identity.get(n)
        ]
        if changed:
            raise UserError(
                f'{self.folder}: holds the samples of another run ({"; ".join(changed[:20])}); '
                f'{ADVICE}'
            )

    def _check_made_from(self, now: UInt32[np.ndarray, ' samples']) -> None:
        """Raises `UserError` if a stored sample was made from another picture than now."""
        for first, end in self.finished():
            there = self._read(first, end, 'made_from')
            if there is None:
                continue
            wanted = now[first:end]  # fewer than there are if this command draws fewer samples
            other = np.flatnonzero(there[: len(wanted)] != wanted)
            if other.size:
                raise UserError(
                    f'{self.folder}: holds samples that were made from other pictures, such as '
                    f'sample {first + other[0]}; {ADVICE}'
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

    def save(self, first: int, images: UInt[np.ndarray, 'samples height width channels']) -> None:
        """Stores the samples first, first + 1, ...

        Raises:
          UserError: the file cannot be written.
        """
        self.create()
        end = first + len(images)
        arrays: dict[str, np.ndarray] = {'images': images}
        if self.made_from is not None:
            arrays['made_from'] = self.made_from[first:end]
        with written(self._path(first, end)) as partial, partial.open('wb') as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

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
        with written(self.folder / IDENTITY) as partial:
            partial.write_text(json.dumps(self.identity, indent=1), encoding='utf-8')

    def _path(self, first: int, end: int) -> Path:
        return self.folder / f'{first:06d}-{end:06d}.npz'

    def load(self, count: int) -> UInt[np.ndarray, 'samples height width channels'] | None:
        """Returns samples 0..count−1, or None if some are missing.

        A damaged batch is removed with a warning and counts as missing.

        Raises:
          UserError: the system refuses to read a batch.
        """
        images = None
        there = np.zeros(count, bool)
        for first, end in self.finished():
            stop = min(end, count)
            if there[first:stop].all():
                continue
            part = self._read(first, end, 'images')
            if part is None:
                continue
            if images is None:
                images = np.empty((count, *part.shape[1:]), part.dtype)
            images[first:stop] = part[: stop - first]
            there[first:stop] = True
        return images if there.all() else None

    def _read(self, first: int, end: int, name: str) -> np.ndarray | None:
        """Returns an array of a batch; removes the file and returns None if it is damaged.

        Raises:
          UserError: the system refuses to read it; it may be whole.
        """
        path = self._path(first, end)
        try:
            array = read_arrays(path, (name,)).get(name)
            if array is None:
                problem = f'it holds no {name}'
            elif self._is_whole(name, array, end - first):
                return array
            else:
                problem = f'{name} are {array.dtype} of shape {array.shape}'
        except DamagedError as error:
            problem = str(error)
        except (UserError, OSError) as error:
            raise UserError(
                f'{error}. The finished samples are kept, and the same command goes on with them '
                'once they can be read'
            ) from None
        logging.warning('%s: damaged (%s); its samples are drawn again', path, problem)
        path.unlink(missing_ok=True)
        return None

    def _is_whole(self, name: str, array: np.ndarray, count: int) -> bool:
        types, dimensions = ARRAYS[name]
        return array.dtype in types and array.ndim == dimensions and len(array) == count

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
