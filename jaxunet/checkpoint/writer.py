"""Reads and writes the files of single checkpoints with orbax.

Orbax never gets a path that a user chose: it puts paths into patterns, in which `[` means something
else. See `plain_path`.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxunet.checkpoint.folders import FOLDER
from jaxunet.checkpoint.state import TrainState
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import file_above
from jaxunet.runtime.plain_path import plain_path, removed

# A write has practically no time limit: orbax measures it by the wall clock, which may jump.
WRITE_SECONDS = 5 * 10**9


def orbax() -> Any:
    """Returns the module `orbax.checkpoint`, which is slow to import: not all starts need it."""
    import orbax.checkpoint  # noqa: PLC0415

    return orbax.checkpoint


def alone() -> Any:
    """Returns orbax's options with which each process reads by itself, and only process 0 writes.

    If orbax coordinated the processes, the others would wait forever for a process whose disk is
    full.
    """
    me = jax.process_index()
    return orbax().options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'process{me}'
    )


def read_state(
    folder: pathlib.Path, shapes: TrainState, fields: Sequence[str] | None = None
) -> TrainState:
    """Reads the state of one checkpoint as numpy arrays; a damaged one may raise any exception.

    Args:
      folder: of the checkpoint.
      shapes: the state, or its shapes and types.
      fields: names of the fields that are stored; the others get their defaults. None = all.
    """
    ocp = orbax()
    names = [f.name for f in dataclasses.fields(shapes)] if fields is None else fields
    template = {name: getattr(shapes, name) for name in names}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone())
    try:
        restored = handler.restore(
            folder / 'state', args=ocp.args.PyTreeRestore(template, restore_args=as_numpy)
        )
    finally:
        handler.close()
    return TrainState(**restored)


def to_disk(folder: pathlib.Path) -> None:
    """Waits until a folder and its files are on the disk, so that they survive a loss of power.

    Raises:
      OSError: the disk is full, or fails.
    """
    inside = [
        os.path.join(parent, name)
        for parent, _, files in os.walk(folder, topdown=False)
        for name in (*files, '')
    ]
    for path in (*inside, str(folder.parent)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not for folders everywhere
                raise
        finally:
            os.close(descriptor)


# Runs in several threads save in turn: orbax numbers the saves of a process, and one that begins
# beside another may take its folder for made before it is.
ONE_AT_A_TIME = threading.Lock()


class Writer:
    """Writes the checkpoints of a workdir one after the other, in a thread.

    Attributes:
      writing: the step that is being written, or None.

    Raises:
      UserError: the folder cannot be made or opened.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        self._workdir = workdir
        self.writing: int | None = None
        self._pending: Future[None] | None = None
        try:
            (workdir / FOLDER).resolve().mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            why = file_above(workdir / FOLDER) or f': {error.strerror or error}'
            raise UserError(f'--workdir: {workdir / FOLDER}: cannot be made{why}') from None
        self.place = plain_path(workdir, self._descriptor)
        self._pool = ThreadPoolExecutor(1, 'checkpoints')
        ocp = orbax()
        options = ocp.AsyncOptions(timeout_secs=WRITE_SECONDS)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                'state',
                'meta',
                composite_options=ocp.CompositeOptions(
                    multiprocessing_options=alone(), async_options=options
                ),
            ),
            async_options=options,
            multiprocessing_options=alone(),
        )

    def start(
        self, step: int, state: TrainState, meta: Mapping[str, Any], then: Callable[[], None]
    ) -> None:
        """Starts writing a checkpoint; an earlier one must be done (`wait`).

        Args:
          state: numpy arrays.
          then: called in the thread when everything is on disk.

        Raises:
          Exception: the write could not start.
        """
        if removed(self._descriptor):
            self._workdir.mkdir(parents=True, exist_ok=True)
            anew = os.open(self._workdir, os.O_RDONLY | os.O_DIRECTORY)
            os.dup2(anew, self._descriptor, inheritable=False)
            os.close(anew)
        (self.place / FOLDER).resolve().mkdir(parents=True, exist_ok=True)

        def finish() -> None:
            try:
                self._orbax.wait_until_finished()
            finally:
                ONE_AT_A_TIME.release()
            then()

        ocp = orbax()
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)
        )
        ONE_AT_A_TIME.acquire()
        try:
            self._orbax.save(self.place / FOLDER / str(step), args=arguments)
            self.writing = step
            self._pending = self._pool.submit(finish)
        except BaseException:
            ONE_AT_A_TIME.release()
            raise

    def wait(self) -> None:
        """Waits for the last write and what follows it.

        Raises:
          Exception: it failed.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        finally:
            self.writing = None

    def close(self) -> None:
        """Waits for a write in progress, and ends the threads.

        Raises:
          Exception: the write failed.
        """
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._orbax.close()
            os.close(self._descriptor)
