"""Writes, reads and checks the checkpoints of a workdir.

Orbax writes them in the background to `WORKDIR/checkpoints/STEP`, each with a checksum. A
checkpoint holds plain arrays of one replica, so that it can be restored on any number of devices
and in either parallel mode.

A run starts from the first of these that exists:
  1. the newest checkpoint of its workdir that is complete and has the right checksums; newer ones
     that are damaged are reported and moved to `WORKDIR/damaged`, which keeps a few;
  2. `config.init_from`: weights, and Adam's moments if there are any, of another run or program;
  3. fresh weights from `config.seed`.
It is an error if none of a workdir's checkpoints can be read, or the system refuses to read one.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from absl import logging

from jaxunet.checkpoint.content import OtherVersionError, check_arrays, check_method_states
from jaxunet.checkpoint.damaged import FOLDER as DAMAGED
from jaxunet.checkpoint.damaged import set_aside
from jaxunet.checkpoint.folders import FOLDER, LISTINGS, find, runs_inside, saved_steps
from jaxunet.checkpoint.keeping import Keeping, Scores, reading, remove_unread
from jaxunet.checkpoint.meta import CHECKSUM, RunFacts, read_meta, sealed
from jaxunet.checkpoint.refused import IN_TEXT, RefusedError, raise_if_whole
from jaxunet.checkpoint.state import Draw, TrainState, draw_state, state_config, traced
from jaxunet.checkpoint.writer import Writer, read_state, to_disk
from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.jax_settings import fixed_jax_settings

UNET = 'UNet'  # the network of checkpoints that name none
NO_FACTS = RunFacts()
MAX_REASON = 400  # characters of a library's error message that are shown
_Damaged: TypeAlias = list[tuple[pathlib.Path, Exception]]


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint.

    Attributes:
      workdir: the folder of the run.
      state: numpy arrays.
      config: the config that the run was saved with.
      facts: about the run.
    """

    workdir: pathlib.Path
    state: TrainState
    config: Config
    facts: RunFacts


@fixed_jax_settings()
def state_template(config: Config, draw: Draw = draw_state) -> TrainState:
    """Returns the shapes and types of the state of a config, without allocating it."""
    return traced(draw, state_config(config)).shapes


def checksum(tree: object) -> int:
    """Returns the CRC-32 of the bytes of all leaves, in tree order."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
    return crc


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      keep: number of newest checkpoints to keep; see also `Keeping`.
      keep_every: also keep those at multiples of this many steps; 0 = none.
      keep_best: also keep this many with the best scores.
      scores: returns scores by step; larger ones are better.
      read_only: never change anything on disk.
      draw: draws the state before step 0 of a config; checkpoints must have its shapes.
      network: what is trained; checkpoints of another network are refused.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        keep: int,
        keep_every: int = 0,
        keep_best: int = 0,
        scores: Scores = dict,
        read_only: bool = False,
        draw: Draw = draw_state,
        network: str = UNET,
    ) -> None:
        self.workdir, self.read_only = workdir, read_only
        self._draw, self._network = draw, network
        self._keeping = Keeping(keep, keep_every, keep_best, scores)
        self.folder = (workdir / FOLDER).resolve()
        self._writer: Writer | None = None
        if not read_only:
            self._set_aside_unfinished()
            self._writer = Writer(workdir)

    def save(
        self,
        step: int,
        state: TrainState,
        config: Config,
        facts: RunFacts = NO_FACTS,
    ) -> str:
        """Starts writing a checkpoint in the background; only process 0 may call this.

        A write that fails leaves the earlier checkpoints as they are. They are also kept until the
        new one has been read back.

        Args:
          state: numpy arrays.

        Returns the error of the previous write, or ''.

        Raises:
          CheckpointWriteError: this write could not start.
        """
        assert self._writer is not None, 'read_only'
        state_checksum = checksum(state)
        meta = sealed(
            {
                'config': to_dict(config),
                'checksum': state_checksum,
                **facts.meta(),
                **({'network': self._network} if self._network != UNET else {}),
            }
        )
        earlier = ''
        try:
            self.wait()
        except CheckpointWriteError as error:
            earlier = str(error)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        try:
            self._writer.start(
                step, state, meta, lambda: self._check_written(step, shapes, state_checksum)
            )
        except Exception as error:
            raise CheckpointWriteError(self._write_failure(error)) from error
        return earlier

    def wait(self) -> None:
        """Waits until everything is on disk, has been read back, and older ones are removed.

        Raises:
          CheckpointWriteError: something could not be written.
        """
        try:
            if self._writer is not None:
                self._writer.wait()
        except Exception as error:
            raise CheckpointWriteError(self._write_failure(error)) from error

    def restore(self, step: int | None = None) -> Restored | None:
        """Returns the newest readable checkpoint, or that of `step`; None if there is none at all.

        Damaged checkpoints that are newer are set aside, unless `read_only`. If a run removes and
        writes checkpoints meanwhile, they are listed again.

        Raises:
          UserError: no checkpoint can be read, the system refuses one, or one is another version's.
        """
        damaged: _Damaged = []
        for _ in range(LISTINGS):
            steps = self.steps() if step is None else [step]
            restored, damaged = self._first_readable(steps)
            if restored is not None:
                self._skip(damaged, self.folder / str(int(restored.state.step)))
                return restored
            if step is not None or self.steps() == steps:
                break
        if damaged and isinstance(damaged[0][1], OtherVersionError):
            raise damaged[0][1]
        if damaged:
            lines = [f'{folder}: {self._first_line(error)}' for folder, error in damaged]
            advice = 'To start over, choose another --workdir.'
            if self.read_only and step is None:
                advice = 'Give another run.'
            elif self.read_only:
                advice = "Give the run's workdir or another of its checkpoints."
            raise UserError('\n  '.join(['no readable checkpoint:', *lines]) + f'\n{advice}')
        return None

    def _first_readable(self, steps: Sequence[int]) -> tuple[Restored | None, _Damaged]:
        """Returns the first readable checkpoint of `steps`, and the damaged ones before it.

        The search ends at a checkpoint that has just been removed.

        Raises:
          UserError: as `restore`.
        """
        damaged: _Damaged = []
        for step in steps:
            folder = self.folder / str(step)
            try:
                return self._read(step), damaged
            except Exception as error:
                damaged.append((folder, error))
                if not folder.exists():
                    break
                raise_if_whole(folder, error)
                if isinstance(error, OtherVersionError) and error.certain:
                    raise
        return None, damaged

    def _skip(self, damaged: _Damaged, good: pathlib.Path) -> None:
        """Reports damaged checkpoints that are newer than a good one, and sets them aside."""
        for folder, error in reversed(damaged):
            logging.warning(
                'damaged checkpoint %s: using %s instead (%s)',
                folder,
                good,
                self._first_line(error),
            )
            if not self.read_only:
                self._set_aside(folder)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, newest first."""
        return saved_steps(self._place())

    def set_aside_after(self, step: int) -> None:
        """Moves the checkpoints of later steps to `WORKDIR/damaged`."""
        for later in self.steps():
            if later > step:
                self._set_aside(self.folder / str(later))

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, written or being written, or None."""
        writing = self._writer.writing if self._writer is not None else None
        return max(self.steps()[:1] + ([] if writing is None else [writing]), default=None)

    def close(self) -> None:
        """Waits for a write in progress and releases orbax's threads."""
        if self._writer is not None:
            self._writer.close()

    def _place(self) -> pathlib.Path:
        """Returns the workdir, also if it has been moved since."""
        return self.workdir if self._writer is None else self._writer.place

    def _read(self, step: int) -> Restored:
        """Reads one checkpoint; a damaged one may raise any exception."""
        name = self.folder / str(step)
        with reading(self._place() / FOLDER / str(step)) as folder:
            meta = read_meta(folder)
            intact = CHECKSUM in meta
            if (network := meta.get('network', UNET)) != self._network:
                raise OtherVersionError(
                    f'{name}: expected a checkpoint of a {self._network}, found that of a '
                    f'{network}',
                    certain=intact,
                )
            try:
                config = resolve(meta['config'])
            except UserError as error:
                raise OtherVersionError(f'{name}: {error}', certain=intact) from None
            whole = state_template(config, self._draw)
            fields = _stored_fields(whole, meta['config'])
            check_method_states(name, folder, config, whole, fields)
            state = read_state(folder, whole, fields)
        check_arrays(state, whole)
        _check_sum(state, meta['checksum'], name)
        return Restored(
            workdir=self.workdir,
            state=state,
            config=config,
            facts=RunFacts.of(meta),
        )

    def _check_written(self, step: int, shapes: TrainState, expected: int) -> None:
        """Waits until a checkpoint is on the disk, reads it back, and removes older ones.

        If the system refuses to read it, all are kept.

        Raises:
          Exception: it is damaged, or cannot reach the disk; it is in `WORKDIR/damaged`.
        """
        folder = self._place() / FOLDER / str(step)
        try:
            to_disk(folder)
        except OSError:
            if folder.exists():
                self._set_aside(folder)
            raise
        try:
            with reading(folder) as place:
                read_meta(place)
                _check_sum(read_state(place, shapes), expected, self.folder / str(step))
        except Exception as error:
            try:
                raise_if_whole(self.folder / str(step), error)
            except (MemoryError, RefusedError) as refused:
                logging.warning(
                    '%s: cannot be read back now (%s), so no older checkpoint is removed',
                    self.folder / str(step),
                    self._first_line(refused.__cause__ or refused),
                )
                return
            if folder.exists():
                self._set_aside(folder)
            raise
        steps = saved_steps(self._place())
        for old in sorted({*steps} - self._keeping.kept(steps)):
            remove_unread(self._place() / FOLDER / str(old))

    def _set_aside_unfinished(self) -> None:
        """Moves away half-written checkpoints of a killed run, which orbax never committed."""
        if not self.folder.is_dir() or jax.process_index() != 0:
            return
        committed = saved_steps(self.workdir)
        for entry in sorted(self.folder.iterdir()):
            if not (entry.name.isdecimal() and int(entry.name) in committed):
                logging.warning(
                    'half-written checkpoint %s: ignored, moved to %s',
                    entry,
                    self.workdir / DAMAGED,
                )
                self._set_aside(entry)

    def _set_aside(self, entry: pathlib.Path) -> None:
        if jax.process_index() == 0:
            set_aside(self._place(), entry)

    def _write_failure(self, error: Exception) -> str:
        steps = self.steps()
        good = f'the last good one is step {steps[0]}' if steps else 'there is no good one yet'
        # TensorStore states the system's reason last, after long paths.
        match = IN_TEXT.search(str(error))
        reason = os.strerror(int(match[1])) if match else self._first_line(error)
        return f'a checkpoint could not be written to {self.folder}: {reason}; {good}'

    def _first_line(self, error: BaseException) -> str:
        text = str(error).strip().replace(str(self._place()), str(self.workdir))
        return f'{type(error).__name__}: {text.splitlines()[0] if text else ""}'[:MAX_REASON]


class CheckpointWriteError(UserError):
    """A checkpoint could not be written: the disk is full, read-only or gone."""


def _stored_fields(template: TrainState, config: Fields) -> list[str]:
    """Returns the fields of the state that existed in the version that wrote this config.

    The other fields get their defaults.
    """
    missing = set() if 'timesteps' in config else {'weighting', 'timesteps'}
    if 'spike_sigmas' not in config.get('train', {}):
        missing.add('recent_norms')
    if 'consistency_guidance' not in config.get('diffusion', {}):
        missing.add('teacher')
    return [f.name for f in dataclasses.fields(template) if f.name not in missing]


def _check_sum(state: TrainState, expected: int, name: pathlib.Path) -> None:
    if (found := checksum(state)) != expected:
        raise ValueError(f'checksum: expected {expected:08x}, found {found:08x} in {name}')


def read(path: str | pathlib.Path) -> Restored:
    """Reads the newest readable checkpoint of a workdir, or one named checkpoint.

    Changes nothing on disk.

    Raises:
      UserError: there is none, or none can be read.
    """
    place = find(path)
    if place is None:
        raise UserError(
            f'{path}: neither a workdir with {FOLDER}/ nor a checkpoint in one{runs_inside(path)}'
        )
    workdir, step = place
    checkpoints = Checkpoints(workdir, keep=0, read_only=True)
    restored = checkpoints.restore(step)
    if restored is None:
        raise UserError(f'{workdir / FOLDER}: no finished checkpoint in it yet')
    return restored
