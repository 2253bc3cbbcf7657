"""From a source to the training step: the whole set for the device's memory, or a stream of batches.

Either way step s trains on the rows of `batch_indices(s, ...)`, so batches do not depend on the cache mode, the number of workers or
the number of processes, and a resumed run goes on with the batch that would have come.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import grain
import jax
import numpy as np
from absl import logging
from jaxtyping import Int32

from jaxunet.config import Config
from jaxunet.data.order import MAX_IMAGES, batch_indices
from jaxunet.data.pixels import Batch
from jaxunet.data.source import Source
from jaxunet.data.threads import THREADS, ordered_map
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar

DEVICE_SHARE = 4  # cache=auto gives the set at most 1/4 of the device's memory ...
DEVICE_BYTES = 2 * 2**30  # ... or this many bytes if the device does not tell how much it has
GRACE_SECONDS = 5.0  # of a worker process after SIGTERM
CHUNK_BYTES = 2**22  # of pixels that a thread of `load_all` decodes at a time


def images_bytes(source: Source) -> int:
    """Bytes of the whole set as uint8."""
    return len(source) * math.prod(source.image_shape)


def choose_cache(config: Config, source: Source) -> str:
    """'device' or 'stream': `data.cache`, where auto means device if the set fits well. Logs what auto chose.

    Raises:
      UserError: images that stream, and several steps in one call, which would have to wait for them.
    """
    choice = config.data.cache if config.data.cache != 'auto' else _fitting(source)
    if choice == 'stream' and config.train.steps_per_call > 1:
        raise UserError(
            f'train.steps_per_call: {config.train.steps_per_call} steps in one call need the images in device memory, but those of '
            f'{source.name} are streamed; set it to 1, or data.cache=device'
        )
    return choice


def _fitting(source: Source) -> str:
    # Not every backend has statistics, and those that have need not know a limit.
    total = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit', 0)
    limit = total // DEVICE_SHARE if total else DEVICE_BYTES
    choice = 'device' if images_bytes(source) <= limit else 'stream'
    logging.info(
        'data.cache=auto: %s (%.1f MiB of images, limit %.1f MiB)',
        choice,
        images_bytes(source) / 2**20,
        limit / 2**20,
    )
    return choice


def load_all(source: Source, progress: bool) -> tuple[Batch, Int32[np.ndarray, ' images']]:
    """All images, uint8 (n, H, W, C), and labels, int32 (n,), decoded in threads; with a progress bar if asked.

    Raises:
      UserError: an image is corrupt, or the set does not fit into this machine's memory.
    """
    n = len(source)
    try:
        images = np.empty((n, *source.image_shape), np.uint8)
        rows = max(1, CHUNK_BYTES // math.prod(source.image_shape))
        chunks = [np.arange(first, min(first + rows, n)) for first in range(0, n, rows)]

        def load(chunk: np.ndarray) -> int:
            images[chunk[0] : chunk[-1] + 1] = source.load(chunk)
            return len(chunk)

        with progress_bar(
            total=n, unit='image', desc='loading images', disable=not progress
        ) as bar:
            for done in ordered_map(load, chunks):
                bar.update(done)
    except MemoryError:
        raise UserError(
            f'{source.name}: {images_bytes(source) / 2**30:.1f} GiB of pixels do not fit into memory; set data.cache=stream'
        ) from None
    return images, source.labels


class Stream(Iterator[dict[str, np.ndarray]]):
    """Batches `{'image': uint8 (rows, H, W, C), 'label': int32 (rows,)}` in the order of the steps.

    `close` ends its threads and worker processes.
    """

    def __init__(self, batches: Any, pool: ProcessPoolExecutor | None) -> None:
        self._batches, self._pool = batches, pool

    def __next__(self) -> dict[str, np.ndarray]:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except BrokenProcessPool:
            self.close()
            raise UserError(
                'data.num_workers: a worker process died (killed for want of memory?); use fewer workers, or 0, which decodes in threads'
            ) from None
        except BaseException:  # exhausted, a corrupt image, Ctrl-C: nothing more will come
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        batches, pool, self._batches, self._pool = self._batches, self._pool, None, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if batches is not None:
            batches.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream(source: Source, config: Config, start_step: int, local_rows: slice) -> Stream:
    """The batches of steps start_step, ..., `train.steps` − 1, read ahead by threads or by `data.num_workers` processes.

    Args:
      local_rows: the rows of each global batch (`data.batch_size`) that this process loads, step 1.

    A corrupt image raises its UserError from `next`, wherever it was decoded.
    """
    if len(source) > MAX_IMAGES:
        raise UserError(
            f'{source.name}: {len(source)} images, more than the {MAX_IMAGES} that indices can number'
        )
    workers = config.data.num_workers
    if workers and source.in_memory:
        logging.info(
            '%s is decoded in memory: threads gather its batches, the %d workers are not needed',
            source.name,
            workers,
        )
        workers = 0
    load = _LoadBatch(source, config.data.batch_size, config.seed, local_rows)
    hand_on: Callable[[int], dict[str, np.ndarray]] = load
    pool = None
    if workers:
        # Spawned, as forking a process that runs JAX can deadlock. Grain's own worker processes pass batches through /dev/shm, which is
        # small in containers, and leave some there when closed early; so its threads hand the steps to a pool instead.
        pool = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context('spawn'),
            initializer=_start_worker,
            initargs=(load,),
        )
        hand_on = _InWorker(pool)
    threads = workers + 2 if workers else THREADS
    steps = grain.MapDataset.range(start_step, max(start_step, config.train.steps)).map(hand_on)
    return Stream(
        iter(
            steps.to_iter_dataset(
                grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
            )
        ),
        pool,
    )


@dataclass(frozen=True)
class _LoadBatch:
    """A step's number to its rows, in whatever process."""

    source: Source
    batch_size: int
    seed: int
    rows: slice

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        indices = np.asarray(
            batch_indices(int(step), self.batch_size, len(self.source), self.seed)
        )[self.rows]
        return {'image': self.source.load(indices), 'label': self.source.labels[indices]}


@dataclass(frozen=True)
class _InWorker:
    """A step's number to its rows, by way of a worker process."""

    pool: ProcessPoolExecutor

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        return self.pool.submit(_work, int(step)).result()


_loads: list[_LoadBatch] = []  # in a worker: what it was started with


def _work(step: int) -> dict[str, np.ndarray]:
    return _loads[0](step)


def _start_worker(load: _LoadBatch) -> None:
    """Leaves Ctrl-C and SIGTERM, which often reach the whole process group, to the main process; ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_soon)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(
        target=_end_with, args=(parent.sentinel,), daemon=True, name='watch the main process'
    ).start()
    _loads.append(load)


def _end_soon(*_: object) -> None:
    """The main process may want some more batches until it has saved."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
