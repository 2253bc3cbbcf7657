"""Checkpoints: orbax, asynchronous, checked; and what wins when several things could be restored.

A run that starts takes the first of these that exists:
  1. the newest checkpoint of its workdir whose files are complete and whose checksum holds;
  2. the one before it, and so on; each damaged one is reported and moved to `WORKDIR/damaged`, never deleted;
  3. `config.init_from`: weights (and Adam moments, where the file has them) of another run or project;
  4. fresh parameters from `config.seed`.
A workdir that has checkpoints of which none can be read is an error, not a fresh start.

A checkpoint holds plain arrays of one replica, so that it restores on any number of devices and in either parallel mode.
"""

from __future__ import annotations

import dataclasses
import pathlib
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxunet.checkpoint.state import TrainState, init_state, make_optimizer
from jaxunet.config import Config, diff, resolve, to_dict
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.runtime.errors import UserError
from jaxunet.weights.names import parameter_shapes

FOLDER = 'checkpoints'
# A resumed run may differ from the checkpoint in anything but these: they give its arrays their shape or meaning.
FIXED = ('model.', 'diffusion.', 'ema.rates', 'optimizer.name')
FREE_IN_MODEL = ('model.dropout', 'model.label_dropout', 'model.remat')


@dataclass(frozen=True)
class Restored:
    state: TrainState  # numpy arrays
    config: Config  # as saved
    seconds: float  # wall-clock of training so far, without compiling, sampling and saving
    class_names: tuple[
        str, ...
    ]  # of the labels 0, 1, ...; empty if the model is unconditional, or the version kept none


def state_template(config: Config) -> TrainState:
    """Shapes and types of the state of a config, without allocating it."""
    # The backend changes no parameter, and the machine that reads may not have the one that wrote.
    model = build_unet(config, load_ops('xla'))
    return jax.eval_shape(lambda: init_state(config, model, make_optimizer(config)))


def checksum(tree: Any) -> int:
    """CRC-32 over all leaves, in tree order."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        crc = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc)
    return crc


class Checkpoints:
    """The checkpoints of one workdir."""

    def __init__(self, workdir: pathlib.Path, *, keep: int, read_only: bool = False) -> None:
        self.workdir, self.read_only = workdir, read_only
        self.folder = (workdir / FOLDER).resolve()
        if not read_only:
            self._set_aside_unfinished()
        # Each process reads on its own and process 0 alone writes: orbax shall not wait for processes that have nothing to write, as they
        # would wait for ever for one whose disk is full.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'process{me}'
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=False,  # orbax creates folders for all processes together only
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
        """Starts writing `state` (numpy) in the background; process 0 alone may call this.

        A write that fails leaves the earlier checkpoints as they are.

        Returns: what went wrong with the write before this one, or ''.

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
        """Until everything is on disk. Raises `CheckpointWriteError` if it could not be written."""
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise CheckpointWriteError(self._write_failure(error)) from error

    def restore(self, step: int | None = None) -> Restored | None:
        """The newest readable checkpoint, or the one of `step`; None if there is none at all."""
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
        return self.manager.latest_step()

    def close(self) -> None:
        self.manager.close()

    def _read(self, step: int) -> Restored:
        folder = self.folder / str(step)
        meta = self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        config = resolve(meta['config'])
        whole = state_template(config)
        # Earlier versions had no states of weightings and samplers; their runs used none.
        fields = [
            f.name
            for f in dataclasses.fields(whole)
            if 'timesteps' in meta['config'] or f.name not in ('weighting', 'timesteps')
        ]
        template = {name: getattr(whole, name) for name in fields}
        self._check_states(folder, config, template)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template)
        restore = ocp.args.PyTreeRestore(template, restore_args=as_numpy)
        state = TrainState(
            **self.manager.restore(step, args=ocp.args.Composite(state=restore)).state
        )
        for (path, got), want in zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(whole), strict=True
        ):
            if got.shape != want.shape or got.dtype != want.dtype:
                raise ValueError(
                    f'{jax.tree_util.keystr(path)}: expected {want.dtype}{want.shape}, found {got.dtype}{got.shape}'
                )
        found = checksum(state)
        if found != meta['checksum']:
            raise ValueError(
                f'checksum: expected {meta["checksum"]:08x}, found {found:08x} in {folder}'
            )
        return Restored(
            state, config, meta['seconds'], tuple(meta.get('class_names', ()))
        )  # earlier versions kept no names

    def _check_states(self, folder: pathlib.Path, config: Config, template: dict[str, Any]) -> None:
        """Raises UserError: the state of the weighting or the sampler is that of another version, and the checkpoint not a damaged one."""
        saved = ocp.PyTreeCheckpointHandler().metadata(folder / 'state').tree
        methods = {
            'weighting': f'loss.weighting={config.loss.weighting}',
            'timesteps': f'timesteps.sampler={config.timesteps.sampler}',
        }
        for name, method in methods.items():
            there, here = (
                [
                    jax.tree_util.keystr(path, simple=True, separator='.')
                    for path, _ in jax.tree.leaves_with_path(tree.get(name))
                ]
                for tree in (saved, template)
            )
            if sorted(there) != sorted(here):
                raise UserError(
                    f'{folder}: was written by another version of jaxunet, whose state of {method} holds {", ".join(there) or "nothing"}; '
                    f"this one's holds {', '.join(here) or 'nothing'}. Go on with the version that wrote it, or choose another --workdir."
                )

    def _set_aside_unfinished(self) -> None:
        """Moves away what a killed run left half-written: folders that orbax never committed."""
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
        return f'a checkpoint could not be written to {self.folder}: {_first_line(error)}; the last good one is step {self._last_good()}'

    def _last_good(self) -> int | None:
        steps = ocp.utils.checkpoint_steps(self.folder) if self.folder.is_dir() else []
        return max(steps, default=None)


class CheckpointWriteError(UserError):
    """The disk did not take a checkpoint (full, read-only, gone)."""


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ""}'[
        :400
    ]


def check_resumable(saved: Config, now: Config, workdir: pathlib.Path) -> list[str]:
    """What differs between the saved config and this command's, if the run may go on; otherwise `UserError`."""
    changes = diff(saved, now)
    fixed = [c for c in changes if c.startswith(FIXED) and not c.startswith(FREE_IN_MODEL)]
    if fixed:
        fits = parameter_shapes(saved) == parameter_shapes(now)
        advice = (
            f', or start from its weights with --config.init_from={workdir}'
            if fits
            else '; its weights do not fit this model'
        )
        raise UserError(
            f'{workdir} holds a run with another config:\n  '
            + '\n  '.join(fixed)
            + f'\nChoose another --workdir{advice}'
        )
    return changes


def exists(workdir: pathlib.Path) -> bool:
    """Whether a run of this workdir has a checkpoint to go on from, readable or not."""
    return any(entry.name.isdigit() for entry in (workdir / FOLDER).glob('*'))


def find(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None] | None:
    """(workdir, step) if `path` is a workdir (step None: its newest) or one checkpoint in it; None if it is neither."""
    path = pathlib.Path(path)
    if (path / FOLDER).is_dir():
        return path, None
    if path.name == FOLDER and path.is_dir():
        return path.parent, None
    if path.name.isdigit() and path.parent.name == FOLDER and path.is_dir():
        return path.parent.parent, int(path.name)
    return None


def read(path: str | pathlib.Path) -> Restored:
    """The newest readable checkpoint of a workdir, or the named one. Changes nothing on disk.

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


def pick_weights(state: TrainState, config: Config, ema: str) -> tuple[Params, str]:
    """The parameters to use, and their name: `ema` = a rate of the run, '' = its first rate, 'none' = without averaging.

    Raises:
      UserError: the run keeps no such rate.
    """
    if ema == 'none':
        return state.params, 'the parameters without averaging'
    rates = [str(rate) for rate in config.ema.rates]
    rate = str(float(ema)) if ema.replace('.', '', 1).isdigit() else ema or rates[0]
    if rate not in state.ema:
        raise UserError(f'--ema: expected one of {", ".join(rates)} or none, found {ema!r}')
    return state.ema[rate], f'the average with rate {rate}'
