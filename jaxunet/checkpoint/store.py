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
import pathlib
import zlib
from dataclasses import dataclass

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxunet.checkpoint.content import OtherVersionError, check_arrays, check_method_states
from jaxunet.checkpoint.damaged import FOLDER as DAMAGED
from jaxunet.checkpoint.damaged import set_aside
from jaxunet.checkpoint.keeping import Scores, preservation_policy
from jaxunet.checkpoint.meta import RunFacts, check_seal, sealed
from jaxunet.checkpoint.refused import raise_if_whole
from jaxunet.checkpoint.state import Draw, TrainState, draw_state, drawing_device, state_config
from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.own_types import own_types

FOLDER = 'checkpoints'
UNET = 'UNet'  # the network of checkpoints that name none
# A write has practically no time limit: orbax measures it by the wall clock, which may jump.
WRITE_SECONDS = 5 * 10**9
NO_FACTS = RunFacts()
MAX_REASON = 400  # characters of a library's error message that are shown


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


@own_types()
def state_template(config: Config, draw: Draw = draw_state) -> TrainState:
    """Returns the shapes and types of the state of a config, without allocating it."""
    with jax.default_device(drawing_device()):
        return jax.eval_shape(jax.jit(draw, static_argnums=0), state_config(config))


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
        self.folder = (workdir / FOLDER).resolve()
        if not read_only:
            self._set_aside_unfinished()
        # Each process reads by itself, and only process 0 writes. If orbax coordinated the
        # processes, the others would wait forever for a process whose disk is full.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'process{me}'
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=(
                None if read_only else preservation_policy(keep, keep_every, keep_best, scores)
            ),
            enable_async_checkpointing=not read_only,
            async_options=ocp.options.AsyncOptions(timeout_secs=WRITE_SECONDS),
            read_only=read_only,
            create=False,  # orbax only creates folders for all processes together
            multiprocessing_options=alone,
        )
        if not read_only:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f'--workdir: {self.folder}: cannot be made: {error.strerror or error}'
                ) from None
        self.manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=('state', 'meta')
        )

    def save(
        self,
        step: int,
        state: TrainState,
        config: Config,
        facts: RunFacts = NO_FACTS,
    ) -> str:
        """Starts writing a checkpoint in the background; only process 0 may call this.

        A write that fails leaves the earlier checkpoints as they are.

        Args:
          state: numpy arrays.

        Returns the error of the previous write, or ''.

        Raises:
          CheckpointWriteError: this write could not start.
        """
        meta = sealed(
            {
                'config': to_dict(config),
                'checksum': checksum(state),
                **facts.meta(),
                **({'network': self._network} if self._network != UNET else {}),
            }
        )
        earlier = ''
        try:
            self.wait()
        except CheckpointWriteError as error:
            earlier = str(error)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
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
          UserError: no checkpoint can be read, the system refuses one, or one is another version's.
        """
        steps = self.steps() if step is None else [step]
        damaged: list[tuple[pathlib.Path, Exception]] = []
        for candidate in steps:
            folder = self.folder / str(candidate)
            try:
                restored = self._read(candidate)
            except Exception as error:
                raise_if_whole(folder, error)
                if isinstance(error, OtherVersionError) and error.certain:
                    raise
                damaged.append((folder, error))
            else:
                self._skip(damaged, folder)
                return restored
        if damaged and isinstance(damaged[0][1], OtherVersionError):
            raise damaged[0][1]
        if damaged:
            lines = [f'{folder}: {_first_line(error)}' for folder, error in damaged]
            advice = 'To start over, choose another --workdir.'
            if self.read_only and step is None:
                advice = 'Give another run.'
            elif self.read_only:
                advice = "Give the run's workdir or another of its checkpoints."
            raise UserError('\n  '.join(['no readable checkpoint:', *lines]) + f'\n{advice}')
        return None

    def _skip(self, damaged: list[tuple[pathlib.Path, Exception]], good: pathlib.Path) -> None:
        """Reports damaged checkpoints that are newer than a good one, and sets them aside."""
        for folder, error in reversed(damaged):
            logging.warning(
                'damaged checkpoint %s: using %s instead (%s)', folder, good, _first_line(error)
            )
            if not self.read_only:
                self._set_aside(folder)
        if damaged and not self.read_only:
            self.manager.reload()

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def set_aside_after(self, step: int) -> None:
        """Moves the checkpoints of later steps to `WORKDIR/damaged`."""
        for later in self.steps():
            if later > step:
                self._set_aside(self.folder / str(later))
        self.manager.reload()

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self.manager.latest_step()

    def close(self) -> None:
        """Waits for a write in progress and releases orbax's threads."""
        self.manager.close()

    def _read(self, step: int) -> Restored:
        """Reads one checkpoint; a damaged one may raise any exception."""
        folder = self.folder / str(step)
        meta = self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        intact = check_seal(meta)
        if (network := meta.get('network', UNET)) != self._network:
            raise OtherVersionError(
                f'{folder}: expected a checkpoint of a {self._network}, found that of a {network}',
                certain=intact,
            )
        try:
            config = resolve(meta['config'])
        except UserError as error:
            raise OtherVersionError(f'{folder}: {error}', certain=intact) from None
        whole = state_template(config, self._draw)
        fields = _stored_fields(whole, meta['config'])
        template = {name: getattr(whole, name) for name in fields}
        check_method_states(folder, config, template)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template)
        restore = ocp.args.PyTreeRestore(template, restore_args=as_numpy)
        state = TrainState(
            **self.manager.restore(step, args=ocp.args.Composite(state=restore)).state
        )
        check_arrays(state, whole)
        found = checksum(state)
        if found != meta['checksum']:
            raise ValueError(
                f'checksum: expected {meta["checksum"]:08x}, found {found:08x} in {folder}'
            )
        return Restored(
            workdir=self.workdir,
            state=state,
            config=config,
            facts=RunFacts.of(meta),
        )

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
                    self.workdir / DAMAGED,
                )
                self._set_aside(entry)

    def _set_aside(self, entry: pathlib.Path) -> None:
        if jax.process_index() == 0:
            set_aside(self.workdir, entry)

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


def _stored_fields(template: TrainState, config: Fields) -> list[str]:
    """Returns the fields of the state that existed in the version that wrote this config.

    The other fields get their defaults.
    """
    missing = set() if 'timesteps' in config else {'weighting', 'timesteps'}
    if 'spike_sigmas' not in config.get('train', {}):
        missing.add('recent_norms')
    return [f.name for f in dataclasses.fields(template) if f.name not in missing]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f'{type(error).__name__}: {text.splitlines()[0] if text else ""}'[:MAX_REASON]


def find(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None] | None:
    """Returns (workdir, step) of a path; step is None, the newest, for a workdir itself.

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
        inside = sorted(p.parent.name for p in pathlib.Path(path).glob(f'*/{FOLDER}'))
        hint = f'; it holds the workdirs {listed(inside)}' if inside else ''
        raise UserError(f'{path}: neither a workdir with {FOLDER}/ nor a checkpoint in one{hint}')
    workdir, step = found
    checkpoints = Checkpoints(workdir, keep=0, read_only=True)
    try:
        restored = checkpoints.restore(step)
    finally:
        quietly(str(workdir / FOLDER), checkpoints.close)
    if restored is None:
        raise UserError(f'{workdir / FOLDER}: no finished checkpoint in it yet')
    return restored
