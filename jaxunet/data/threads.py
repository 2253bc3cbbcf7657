"""Calls a function ahead of the consumer of its results, in threads or processes.

Decoding takes threads: Pillow, zlib and file reads release Python's global lock.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

from jaxunet.runtime.errors import UserError

Item = TypeVar('Item')
Result = TypeVar('Result')

THREADS = min(16, os.cpu_count() or 1)
AHEAD = 8  # items per thread that may wait for the consumer


class Stream(Iterator[Result], Generic[Item, Result]):
    """Results of a function in the order of its items.

    `next` raises what the function raised, or UserError if a worker process died.

    Args:
      function: called with each item.
      items: what it is called with.
      pool: threads or processes that run `function`; the stream shuts them down.
      ahead: results that are made or wait while one is asked for, that one included.
    """

    def __init__(
        self, function: Callable[[Item], Result], items: Iterable[Item], pool: Executor, ahead: int
    ) -> None:
        self._function, self._items, self._ahead = function, iter(items), ahead
        self._pool: Executor | None = pool
        self._results: collections.deque[Future[Result]] = collections.deque()

    def __next__(self) -> Result:
        if self._pool is None:
            raise StopIteration
        try:
            for item in itertools.islice(self._items, self._ahead - len(self._results)):
                self._results.append(self._pool.submit(self._function, item))
            if not self._results:
                raise StopIteration
            return self._results.popleft().result()
        except BrokenProcessPool:
            self.close()
            raise UserError(
                'data.num_workers: a worker process died (was it out of memory?); '
                'use fewer workers, or 0, which decodes in threads'
            ) from None
        except BaseException:  # exhausted, a corrupt image or Ctrl-C: no result follows
            self.close()
            raise

    def close(self) -> None:
        """Ends the threads or worker processes; may be called again."""
        pool, self._pool = self._pool, None
        self._results.clear()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Stream[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Maps `items` in threads and yields the results in order, with a bounded number in flight.

    The first exception is raised; later results are dropped.
    """
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix='decode')
    with Stream(function, items, pool, AHEAD * THREADS + 1) as results:
        yield from results
