"""Decodes in threads: Pillow, zlib and file reads release Python's global lock."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar('Item')
Result = TypeVar('Result')

THREADS = min(16, os.cpu_count() or 1)
AHEAD = 8  # items per thread that may wait for the consumer


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Maps `items` in threads and yields the results in order, with a bounded number in flight.

    The first exception is raised; later results are dropped.
    """
    pending: collections.deque[Future[Result]] = collections.deque()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix='decode')
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > AHEAD * THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
