"""Snapshots of a run's power-function averages, from which other widths can be computed.

A run with `ema.widths` writes `WORKDIR/snapshots/STEP.safetensors` every `ema.snapshot_every` steps
and keeps all of them. A snapshot stores its averages in float16, half the size of float32. This
rounding causes an error of 1e-4 to 4e-4 of the weights' norm (see `power_average.combine`), below
the 1e-3 that is allowed. Averages beyond float16's range are stored in float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxunet.checkpoint.meta import check_seal, sealed
from jaxunet.checkpoint.power_average import ROUNDING
from jaxunet.checkpoint.store import checksum
from jaxunet.config import Config
from jaxunet.config.relations import MAX_WIDTH
from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.untrusted import check_fields, one_line, parse_json, shown
from jaxunet.runtime.whole_files import replacing
from jaxunet.weights.safetensors_file import write_safetensors

FOLDER = 'snapshots'
SUFFIX = '.safetensors'
METADATA = 'snapshot'  # a single entry, because the library writes several in random order
FIELDS = {'updates': int, 'widths': list, 'dtype': str, 'checksum': int}
ADVICE = 'move it away to go without it'


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on disk.

    Attributes:
      step: batches consumed by the run.
      updates: updates of the weights; fewer than `step` if steps were skipped.
      dtype: type of the stored arrays, float16 or float32.
      checksum: CRC-32 of the arrays, in the order of their names.
    """

    path: pathlib.Path
    step: int
    updates: int
    widths: tuple[float, ...]
    dtype: str
    checksum: int

    def read(self) -> dict[float, list[np.ndarray]]:
        """Returns the arrays of each average by width, in tree order, in their stored type.

        Raises:
          UserError: the file is damaged.
        """
        with _readable(self.path):
            arrays = safetensors.numpy.load_file(self.path)
        found = checksum([arrays[name] for name in sorted(arrays)])
        if found != self.checksum:
            raise _damaged(self.path, f'checksum: expected {self.checksum:08x}, found {found:08x}')
        count = len(arrays) // len(self.widths)
        names = {width: [_name(width, i) for i in range(count)] for width in self.widths}
        if arrays.keys() != {name for those in names.values() for name in those}:
            raise _damaged(self.path, f'widths {shown(self.widths)} have other arrays')
        return {width: [arrays[name] for name in those] for width, those in names.items()}


def spacing(config: Config, steps_per_call: int) -> int:
    """Returns the steps between snapshots, a multiple of `steps_per_call`; 0 = no snapshots."""
    return -(-config.snapshot_every // steps_per_call) * steps_per_call


def find_snapshots(workdir: pathlib.Path, end: int) -> list[Snapshot]:
    """Returns the snapshots of a run up to step `end` that have updates, oldest first.

    Raises:
      UserError: a file is damaged.
    """
    headers = [_header(path) for path in _files(workdir) if int(path.stem) <= end]
    return sorted((s for s in headers if s.updates), key=lambda snapshot: snapshot.step)


class SnapshotWriter:
    """Writes the snapshots of a run, each in a thread beside the training steps.

    Args:
      start: the step that the run starts from. Later snapshots are deleted: a run that was killed
        after its last checkpoint has taken steps that it will take again.
    """

    def __init__(self, workdir: pathlib.Path, config: Config, start: int) -> None:
        self.folder, self._names = workdir / FOLDER, config.ema.width_names
        self._pool = ThreadPoolExecutor(1, 'snapshots')
        self._pending: Future[None] | None = None
        for path in _files(workdir):
            if int(path.stem) > start:
                path.unlink()

    def write(self, step: int, updates: int, averages: Mapping[str, Params]) -> str:
        """Waits for the previous snapshot, then starts to write this one.

        Args:
          averages: numpy arrays by the names in `EmaConfig.width_names`.

        Returns the error of the previous write, or ''.
        """
        earlier = self.wait()
        trees = {width: averages[name] for name, width in self._names.items()}
        self._pending = self._pool.submit(self._write, step, updates, trees)
        return earlier

    def wait(self) -> str:
        """Waits until everything is on disk; returns the error, or ''."""
        if self._pending is None:
            return ''
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except OSError as error:
            return (
                f'a snapshot of the averages could not be written to {self.folder}: {error}; '
                'averages of other widths will be less exact'
            )
        return ''

    def close(self) -> None:
        """Waits for a write in progress and ends the thread."""
        self._pool.shutdown()

    def _write(self, step: int, updates: int, trees: Mapping[float, Params]) -> None:
        arrays = {
            _name(width, i): np.asarray(leaf)
            for width, tree in trees.items()
            for i, leaf in enumerate(jax.tree.leaves(tree))
        }
        limit = float(np.finfo(np.float16).max)
        fits = all(np.abs(leaf).max() <= limit for leaf in arrays.values())
        dtype = 'float16' if fits else 'float32'
        arrays = {name: np.ascontiguousarray(leaf, dtype) for name, leaf in arrays.items()}
        metadata = sealed(
            {
                'updates': updates,
                'widths': list(trees),
                'dtype': dtype,
                'checksum': checksum([arrays[name] for name in sorted(arrays)]),
            }
        )
        path = self.folder / f'{step}{SUFFIX}'
        with replacing(path) as partial, partial.open('wb') as file:
            write_safetensors(file, arrays, {METADATA: json.dumps(metadata)})
            file.flush()
            os.fsync(file.fileno())


def _files(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in (workdir / FOLDER).glob(f'*{SUFFIX}') if path.stem.isdecimal())


def _name(width: float, index: int) -> str:
    return f'{width}/{index}'


def _header(path: pathlib.Path) -> Snapshot:
    check_regular(path)
    with _readable(path), safetensors.safe_open(path, framework='numpy') as file:
        text = (file.metadata() or {}).get(METADATA, '')
    metadata = parse_json(text, f'{path}: {METADATA}', advice=ADVICE)
    check_fields(metadata, FIELDS, f'{path}: {METADATA}', advice=ADVICE)
    try:
        check_seal(metadata)  # snapshots of earlier versions have none
    except ValueError:
        raise _damaged(path, f'the checksum of {METADATA} is wrong') from None
    step, updates = int(path.stem), metadata['updates']
    widths, dtype = metadata['widths'], metadata['dtype']
    if dtype not in ROUNDING:
        raise _damaged(path, f'dtype {shown(dtype)}')
    if not widths or len(set(map(shown, widths))) < len(widths):
        raise _damaged(path, f'expected distinct widths, found {shown(widths)}')
    if not all(type(width) in (int, float) and 0 < width < MAX_WIDTH for width in widths):
        raise _damaged(path, f'expected widths below {MAX_WIDTH:.4f}, found {shown(widths)}')
    if not 0 <= updates <= step:
        raise _damaged(path, f'expected at most {step} updates, found {shown(updates)}')
    return Snapshot(
        path,
        step,
        updates,
        tuple(map(float, widths)),
        dtype,
        metadata['checksum'],
    )


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Raises UserError if the block cannot read a snapshot, or if it is damaged."""
    try:
        with path.open('rb'):  # the library gives no reason why it cannot open a file
            yield
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read: {error.strerror or error}; it may be whole, so repeat the '
            f'command once it can be read, or {ADVICE}'
        ) from None
    except (ValueError, safetensors.SafetensorError) as error:
        raise _damaged(path, one_line(error)) from None


def _damaged(path: pathlib.Path, reason: str) -> UserError:
    return UserError(f'{path}: damaged snapshot ({reason}); {ADVICE}')
