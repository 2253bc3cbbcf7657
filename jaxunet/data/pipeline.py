"""Feeds the training step: the whole set for the device's memory, or a stream of batches.

Either way step s trains on the rows of `batch_indices(s, ...)`; only a stream of a set that is read
in large pieces takes those of `piecewise_indices(s, ...)`. Batches do not depend on the cache mode
otherwise, or on the number of workers or processes, and a resumed run continues with the next
batch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait

import jax
import numpy as np
from absl import logging
from jaxtyping import Int32

from jaxunet.config import Config
from jaxunet.data.crop import Batch, random_crops
from jaxunet.data.order import MAX_IMAGES, batch_indices, piecewise_indices
from jaxunet.data.source import ArraySource, Source, of_pixels
from jaxunet.data.threads import THREADS, Stream, ordered_map
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import terminating
from jaxunet.runtime.progress import progress_bar

DEVICE_SHARE = 4  # cache=auto gives the set at most 1/4 of the device's memory
DEVICE_BYTES = 2 * 2**30  # cache=auto's limit where the device does not report its memory
GRACE_SECONDS = 5.0  # a worker process keeps working this long after SIGTERM
CROPS = 0x63726F70  # tells the random numbers of crops from others of the seed
CHUNK_BYTES = 2**22  # bytes of pixels that a thread of `load_all` decodes at a time

# A batch on the host: `image`, pixels (rows, H, W, C), and `label`, int32 (rows,).
HostBatch = dict[str, np.ndarray]


def images_bytes(source: Source) -> int:
    """Returns the bytes of the pixels of the whole set."""
    return len(source) * math.prod(source.image_shape) * source.reading.dtype.itemsize


def choose_cache(config: Config, source: Source) -> str:
    """Returns device or stream: `data.cache`, or what auto chooses, which is logged.

    Workers that the choice leaves without work are logged, too.
    """
    choice = config.data.cache
    if choice == 'auto' and config.data.crop == 'random':
        choice = 'stream'
        logging.info('data.cache=auto: stream, as data.crop=random cuts images anew every epoch')
    elif choice == 'auto':
        choice = _fitting(source)
    if choice == 'device' and config.data.num_workers:
        logging.info(
            'data.num_workers: the %d workers are not used, as the images lie in device memory%s',
            config.data.num_workers,
            '' if source.in_memory else '; data.cache=stream uses them',
        )
    return choice


def _fitting(source: Source) -> str:
    """Returns device if the set takes at most the share of a device's memory that auto allows."""
    # Some backends have no memory statistics, or statistics without a limit.
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
    """Decodes all images in threads; returns pixels (n, H, W, C) and labels, int32 (n,).

    Args:
      progress: show a progress bar.

    Raises:
      UserError: an image is corrupt, or the set does not fit into this machine's memory.
    """
    n = len(source)
    try:
        images = np.empty((n, *source.image_shape), source.reading.dtype)
        rows = max(1, CHUNK_BYTES // math.prod(source.image_shape))
        chunks = [np.arange(first, min(first + rows, n)) for first in range(0, n, rows)]

        def load(chunk: np.ndarray) -> int:
            images[chunk[0] : chunk[-1] + 1] = source.load(chunk)
            return len(chunk)

        bar = progress_bar(total=n, unit='image', desc='loading images', disable=not progress)
        with bar:
            for done in ordered_map(load, chunks):
                bar.update(done)
    except MemoryError:
        raise UserError(
            f'{source.name}: {images_bytes(source) / 2**30:.1f} GiB of pixels do not fit into '
            'memory; set data.cache=stream'
        ) from None
    return images, source.labels


def decoded(source: Source) -> ArraySource:
    """Returns the images of a source, and their pictures, in memory; raises as `load_all` does."""
    images, labels = load_all(source, progress=False)
    result = of_pixels(source.name, images, source.reading, labels, source.class_names)
    if source.pictures is not None:
        result.pictures = decoded(source.pictures)
    return result


def stream(
    source: Source, config: Config, start_step: int, local_rows: slice
) -> Stream[int, HostBatch]:
    """Returns the batches of steps start_step, ..., `train.steps` − 1.

    Threads, or `data.num_workers` processes, decode them ahead of time.

    Args:
      local_rows: rows of each global batch (`data.batch_size`) that this process loads; a slice
        with step 1.

    Raises:
      UserError: more images than indices can number, or the system lacks what workers need.
    """
    if len(source) > MAX_IMAGES:
        raise UserError(
            f'{source.name}: {len(source)} images, '
            f'more than the {MAX_IMAGES} that indices can number'
        )
    workers = config.data.num_workers
    if workers and source.in_memory:
        logging.info(
            '%s is decoded in memory: threads gather its batches; the %d workers are not used',
            source.name,
            workers,
        )
        workers = 0
    least = config.data.crop_least if config.data.crop == 'random' else None
    load = _LoadBatch(source, config.data.batch_size, config.seed, local_rows, least)
    steps = range(start_step, config.train.steps)
    if not workers:
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix='decode')
        return Stream(load, steps, pool, 2 * THREADS)
    # Workers are spawned, because forking a process that runs JAX can deadlock.
    try:
        processes = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context('spawn'),
            initializer=_start_worker,
            initargs=(load,),
        )
    except OSError as error:  # some containers lack /dev/shm, where its semaphores are
        raise UserError(
            f'data.num_workers: {workers}: semaphores cannot be made: '
            f'{error.strerror or error}; check /dev/shm, or set it to 0: threads decode then'
        ) from None
    return Stream(_work, steps, processes, 2 * (workers + 2))


@dataclass(frozen=True)
class _LoadBatch:
    """Loads a step's rows, given its number, in this process.

    Fields:
      rows: this process's rows of the global batch.
      crop_least: smallest random crop; None = no random crops.
    """

    source: Source
    batch_size: int
    seed: int
    rows: slice
    crop_least: float | None = None

    def __call__(self, step: int) -> HostBatch:
        pieces = self.source.pieces
        indices = np.asarray(
            batch_indices(step, self.batch_size, len(self.source), self.seed)
            if pieces is None
            else piecewise_indices(step, self.batch_size, pieces, self.seed)
        )[self.rows]
        crops = None
        if self.crop_least is not None:
            # Drawn for the whole batch, so that they do not depend on the number of processes.
            random = np.random.default_rng((CROPS, self.seed, step))
            side = min(self.source.image_shape[:2])
            crops = random_crops(random, self.batch_size, side, self.crop_least)[self.rows]
        return {'image': self.source.load(indices, crops), 'label': self.source.labels[indices]}


_loads: list[_LoadBatch] = []  # in a worker process: set when it starts


def _work(step: int) -> HostBatch:
    return _loads[0](step)


def _start_worker(load: _LoadBatch) -> None:
    """Prepares a worker process, which ends with the main process.

    Ctrl-C, SIGTERM and SIGHUP often reach the whole process group; the main process handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in terminating():
        signal.signal(number, _end_soon)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(
        target=_end_with, args=(parent.sentinel,), daemon=True, name='watch the main process'
    ).start()
    _loads.append(load)


def _end_soon(*_: object) -> None:
    """Ends the worker after a delay, as the main process may need more batches until it saves."""
    if not any(signal.getitimer(signal.ITIMER_REAL)):  # the first time
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)  # then SIGALRM ends the process


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
