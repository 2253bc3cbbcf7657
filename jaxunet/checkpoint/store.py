"""Writes, reads and checks the checkpoints of a workdir.

Orbax writes them in the background to `WORKDIR/checkpoints/STEP`, each with a checksum. A
checkpoint holds plain arrays of one replica, so that it can be restored on any number of devices
and in either parallel mode.

A run starts from the first of these that exists:
  1. the newest checkpoint of its workdir that is complete and has the right checksum; damaged ones
     are reported and moved to `WORKDIR/damaged`, never deleted;
  2. `config.init_from`: weights, and Adam's moments where there are any, of another run or project;
  3. fresh weights from `config.seed`.
A workdir in which no checkpoint can be read is an error, not a fresh start.
"""

from __future__ import annotations

import dataclasses
import pathlib
import zlib
from dataclasses import dataclass

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxunet.checkpoint.keeping import Scores, preservation_policy
from jaxunet.checkpoint.state import TrainState, draw_state
from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError

FOLDER = 'checkpoints'
MAX_REASON = 400  # characters of a library's error message that are shown


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint.

    Attributes:
      state: numpy arrays.
      config: the config that the run was saved with.
      seconds: training time so far, without compiling, sampling and saving.
      class_names: names of the labels 0, 1, ...; empty for an unconditional model, and in
        checkpoints of versions that stored none.
    """

    state: TrainState
    config: Config
    seconds: float
    class_names: tuple[str, ...]


def state_template(config: Config) -> TrainState:
    """Returns the shapes and types of the state of a config, without allocating it."""
    return jax.eval_shape(jax.jit(draw_state, static_argnums=0), config)


def checksum(tree: object) -> int:
    """Returns the CRC-32 of the bytes of all leaves, in tree order."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
    return crc


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      keep: number of newest checkpoints to keep; see also `preservation_policy`.
      keep_every: also keep those at multiples of this many steps; 0 = none.
      keep_best: also keep this many with the best scores.
      scores: returns the scores of steps, of which larger ones are better.
      read_only: never change anything on disk.
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
    ) -> None:
        self.workdir, self.read_only = workdir, read_only
        self.folder = (workdir / FOLDER).resolve()
        if not read_only:
            self._set_aside_unfinished()
        # Each process reads on its own, and process 0 alone writes. If orbax coordinated them, the
        # others would wait forever for a process whose disk is full.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'process{me}'
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=(
                None if read_only else preservation_policy(keep, keep_every, keep_best, scores)
            ),
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=False,  # orbax only creates folders for all processes together
            multiprocessing_options=alone,
        )
        if not read_only:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=('state', 'meta')
        )

    def save(
        self,
        step: int,
        state: TrainState,
        config: Config,
        seconds: float,
        class_names: tuple[str, ...] = (),
    ) -> str:
        """Starts writing a checkpoint in the background; only process 0 may call this.

        A write that fails leaves the earlier checkpoints as they are.

        Args:
          state: numpy arrays.
          seconds: training time so far.

        Returns what went wrong with the previous write, or ''.

        Raises:
          CheckpointWriteError: this write could not start.
        """
        meta = {
            'config': to_dict(config),
            'checksum': checksum(state),
            'seconds': seconds,
            'class_names': list(class_names),
        }
        earlier = ''
        try:
            self.wait()
        except CheckpointWriteError as error:
            earlier = str(error)
        try:
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)
                ),
                force=True,
            )
        except Exception as error:
            raise CheckpointWriteError(self._write_failure(error)) from error
        return earlier

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          CheckpointWriteError: something could not be written.
        """
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise CheckpointWriteError(self._write_failure(error)) from error

    def restore(self, step: int | None = None) -> Restored | None:
        """Returns the newest readable checkpoint, or that of `step`; None if there is none at all.

        Damaged checkpoints that are newer are set aside, unless `read_only`.

        Raises:
          UserError: there are checkpoints, but none can be read, or one is of another version.
        """
        steps = sorted(self.manager.all_steps(), reverse=True) if step is None else [step]
        problems = []
        for candidate in steps:
            try:
                return self._read(candidate)
            except UserError:
                raise
            except Exception as error:
                problems.append(f'{self.folder / str(candidate)}: {_first_line(error)}')
                logging.warning('damaged checkpoint, trying the one before it: %s', problems[-1])
                if not self.read_only and step is None:
                    self._set_aside(self.folder / str(candidate))
                    self.manager.reload()
        if problems:
            raise UserError(
                'no readable checkpoint:\n  '
                + '\n  '.join(problems)
                + '\nTo start over, choose another --workdir.'
            )
        return None

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self.manager.latest_step()

    def close(self) -> None:
        """Waits for a write in progress and releases orbax's threads."""
        self.manager.close()

    def _read(self, step: int) -> Restored:
        """Reads one checkpoint, and raises any exception if it is damaged."""
        folder = self.folder / str(step)
        meta = self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        config = resolve(meta['config'])
        whole = state_template(config)
        # A version without `timesteps` in its config had no states of weightings and samplers.
        fields = [
            f.name
            for f in dataclasses.fields(whole)
            if 'timesteps' in meta['config'] or f.name not in ('weighting', 'timesteps')
        ]
        template = {name: getattr(whole, name) for name in fields}
        _check_method_states(folder, config, template)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template)
        restore = ocp.args.PyTreeRestore(template, restore_args=as_numpy)
        state = TrainState(
            **self.manager.restore(step, args=ocp.args.Composite(state=restore)).state
        )
        _check_arrays(state, whole)
        found = checksum(state)
        if found != meta['checksum']:
            raise ValueError(
                f'checksum: expected {meta["checksum"]:08x}, found {found:08x} in {folder}'
            )
        return Restored(state, config, meta['seconds'], tuple(meta.get('class_names', ())))

    def _set_aside_unfinished(self) -> None:
        """Moves away half-written checkpoints of a killed run, which orbax never committed."""
        if not self.folder.is_dir() or jax.process_index() != 0:
            return
        committed = ocp.utils.checkpoint_steps(self.folder)
        for entry in sorted(self.folder.iterdir()):
            if not (entry.name.isdigit() and int(entry.name) in committed):
                logging.warning(
                    'half-written checkpoint %s: ignored, moved to %s',
                    entry,
                    self.workdir / 'damaged',
                )
                self._set_aside(entry)

    def _set_aside(self, entry: pathlib.Path) -> None:
        """Moves a checkpoint to `WORKDIR/damaged`, under a name that is free there."""
        if jax.process_index() != 0:
            return
        target = self.workdir / 'damaged' / entry.name
        target.parent.mkdir(exist_ok=True)
        count = 1
        while target.exists():
            target = target.with_name(f'{entry.name}.{count}')
            count += 1
        entry.rename(target)

    def _write_failure(self, error: Exception) -> str:
        return (
            f'a checkpoint could not be written to {self.folder}: {_first_line(error)}; the last '
            f'good one is step {self._last_good()}'
        )

    def _last_good(self) -> int | None:
        steps = ocp.utils.checkpoint_steps(self.folder) if self.folder.is_dir() else []
        return max(steps, default=None)


class CheckpointWriteError(UserError):
    """A checkpoint could not be written: the disk is full, read-only or gone."""


def _check_arrays(state: TrainState, expected: TrainState) -> None:
    """Raises ValueError if an array has another shape or type than in the template."""
    for (path, got), want in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(
                f'{jax.tree_util.keystr(path)}: expected {want.dtype}{want.shape}, '
                f'found {got.dtype}{got.shape}'
            )


def _check_method_states(folder: pathlib.Path, config: Config, template: dict[str, object]) -> None:
    """Checks that the stored states of the weighting and the sampler have the expected leaves.

    Raises:
      UserError: they do not. The checkpoint is then one of another version, not a damaged one.
    """
    saved = ocp.PyTreeCheckpointHandler().metadata(folder / 'state').tree
    methods = {
        'weighting': f'loss.weighting={config.loss.weighting}',
        'timesteps': f'timesteps.sampler={config.timesteps.sampler}',
    }
    for name, method in methods.items():
        found, expected = _leaf_names(saved.get(name)), _leaf_names(template.get(name))
        if sorted(found) != sorted(expected):
            raise UserError(
                f'{folder}: was written by another version of jaxunet, whose state of {method} '
                f"holds {', '.join(found) or 'nothing'}; this one's holds "
                f'{", ".join(expected) or "nothing"}. Go on with the version that wrote it, or '
                'choose another --workdir.'
            )


def _leaf_names(tree: object) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator='.')
        for path, _ in jax.tree.leaves_with_path(tree)
    ]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f'{type(error).__name__}: {text.splitlines()[0] if text else ""}'[:MAX_REASON]


def exists(workdir: pathlib.Path) -> bool:
    """Returns True if the workdir has a checkpoint to resume from, readable or not."""
    return any(entry.name.isdigit() for entry in (workdir / FOLDER).glob('*'))


def find(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None] | None:
    """Returns (workdir, step) of a path, with step None for a workdir, which means its newest.

    Returns None if the path is neither a workdir nor one checkpoint in it.
    """
    path = pathlib.Path(path)
    if (path / FOLDER).is_dir():
        return path, None
    if path.name == FOLDER and path.is_dir():
        return path.parent, None
    if path.name.isdigit() and path.parent.name == FOLDER and path.is_dir():
        return path.parent.parent, int(path.name)
    return None


def read(path: str | pathlib.Path) -> Restored:
    """Reads the newest readable checkpoint of a workdir, or one named checkpoint.

    Changes nothing on disk.

    Raises:
      UserError: there is none, or none can be read.
    """
    found = find(path)
    if found is None:
        raise UserError(f'{path}: neither a workdir with {FOLDER}/ nor a checkpoint in one')
    workdir, step = found
    checkpoints = Checkpoints(workdir, keep=0, read_only=True)
    try:
        restored = checkpoints.restore(step)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f'{workdir / FOLDER}: no finished checkpoint in it yet')
    return restored
