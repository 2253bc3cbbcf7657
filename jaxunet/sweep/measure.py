"""Measures one point of a sweep in this process, with the session that training uses.

    python -m jaxunet.sweep.measure TASK     # JSON with the fields of `Task`; prints one JSON row
    python -m jaxunet.sweep.measure probe # prints this machine's properties as a JSON row

Everything else goes to stderr. `python -m jaxunet.sweep` starts these processes; each log in
OUTPUT/logs begins with the command that repeats its point by hand.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from jaxunet.benchmark.jax_side import timed_compile
from jaxunet.config import PRECISIONS, Config, resolve
from jaxunet.data.sources import open_images
from jaxunet.data.threads import THREADS
from jaxunet.ops.backends import measured
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.garbage import garbage_set_aside
from jaxunet.runtime.out_of_memory import OutOfMemoryError, is_out_of_memory
from jaxunet.runtime.rows import Row, provenance
from jaxunet.runtime.subprocesses import OUT_OF_MEMORY
from jaxunet.sweep.points import WORKERS
from jaxunet.sweep.row import ERROR, OK
from jaxunet.sweep.runner import Task
from jaxunet.training.eager import eager
from jaxunet.training.parallel import Data
from jaxunet.training.session import Session
from jaxunet.training.step import Metrics

# The timed steps are split into this many windows. The point's rate is the median over windows, so
# that one hiccup of the machine does not change it.
WINDOWS = 5
MIN_CALLS = 5  # calls that are timed even beyond the time limit


def measure(task: Task) -> Row:
    """Compiles and runs the training step of a config.

    Returns a row with
      lower_s, compile_s: seconds. With jit off, the rest of the first step, and compiling all the
        small programs in it.
      compile_cached: all programs came from a cache.
      ops: the backend of each op (`jaxunet.ops.backends.Kernels`).
      data_cache: device or stream.
      steps_per_call: optimizer steps per call of the compiled program.
      steps: number of timed steps.
      warmup: number of steps before them.
      step_ms: `median` and `quartiles` of the milliseconds per step.
      images_per_s, images_per_s_range: median and range over `WINDOWS`.
      peak_bytes: memory of the fullest device, or of this process if the backend does not count
        that of devices (`peak_source`).
      loss: loss of the last step; None if it is not finite.

    Raises:
      UserError: the config does not fit the data or the machine.
    """
    config = resolve(task.config)
    if not task.jit:
        config = config.replace(train={'steps_per_call': 1})
    compiled_cache.enable_compilation_cache()
    with Session(config, open_images(config)) as session:
        _check_workers(task, session)
        session.load_random()
        row = _compile(session, jit=task.jit)
        unit = session.steps_per_call
        warmup = task.warmup if session.resident else max(task.warmup, _read_ahead(config))
        warmup_calls, timed_calls = -(-warmup // unit), -(-task.steps // unit)
        ahead = session.calls_ahead
        session.open_stream(end=(warmup_calls + timed_calls + ahead) * unit)
        ends, loss = run(
            session.call,
            session.next_data,
            session.parallel.shards,
            warmup_calls,
            timed_calls,
            task.max_seconds,
            in_flight=ahead,
        )
        return (
            row
            | statistics(ends, config.data.batch_size, unit)
            | {'warmup': warmup_calls * unit, 'loss': loss}
            | _peak(session.parallel.devices)
        )


def _check_workers(task: Task, session: Session) -> None:
    """Raises UserError if the sweep varies the number of workers and the run uses none."""
    data = session.config.data
    if (
        WORKERS in task.varied
        and data.num_workers
        and (session.resident or session.source.in_memory)
    ):
        where = 'device memory' if session.resident else 'memory, decoded'
        raise UserError(
            f'{WORKERS}: {data.num_workers} workers have nothing to do, as {data.path} lies in '
            f'{where}'
        )


def _compile(session: Session, *, jit: bool) -> Row:
    """Makes the session's step ready, and returns how long that took."""
    programs = Programs()
    if jit:
        timed = timed_compile(lambda: session.compile(cache=True))
        lower_s, compile_s = timed.lower_s, timed.compile_s
    else:
        # Without jit there are thousands of small programs, which compile too fast to be cached by
        # default. Cached programs save another attempt their compilation.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
        step = eager(session.make_step(None), session.config)
        state, data = session.state, session.data
        metrics = timed_compile(lambda: jax.block_until_ready(step(state, data)[1]))
        lower_s, compile_s = metrics.lower_s, metrics.compile_s
        session.step = step
    return {
        'lower_s': lower_s,
        'compile_s': compile_s,
        'compile_cached': programs.cached,
        'ops': str(session.kernels),
        'data_cache': 'device' if session.resident else 'stream',
        'steps_per_call': session.steps_per_call,
    }


class Programs:
    """Counts the programs made ready from now on, and how many came from the compilation cache."""

    def __init__(self) -> None:
        self.made = self.hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._made)
        jax.monitoring.register_event_listener(self._hit)

    def _made(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.made += event == '/jax/core/compile/backend_compile_duration'

    def _hit(self, event: str, **_: str | int) -> None:
        self.hits += event == '/jax/compilation_cache/cache_hits'

    @property
    def cached(self) -> bool:
        """True if all programs came from the cache.

        It is also True if no program was made at all, because the step itself came from
        `jaxunet.runtime.compiled_cache`.
        """
        return self.hits == self.made


def run(
    call: Callable[[Data], Metrics],
    next_data: Callable[[], Data],
    shards: Callable[[Metrics], Metrics],
    warmup: int,
    calls: int,
    max_seconds: float,
    in_flight: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], float | None]:
    """Calls the step as the training loop does, with up to `in_flight` calls queued.

    Further calls follow the timed ones, so that the queue is still full when the timed ones end.

    Args:
      call, next_data: methods of `Session`.
      shards: method of `Parallel`.
      warmup: calls before the timed ones.
      calls: calls to time; fewer if they take more than `max_seconds`, but at least `MIN_CALLS`.
      in_flight: `Session.calls_ahead`.

    Returns the times at which the last warm-up call and each timed call were done, and the loss of
    the last step (None if it is not finite).
    """
    queue: collections.deque[Metrics] = collections.deque()
    ends: list[float] = []
    loss = math.nan
    with garbage_set_aside():
        for i in range(warmup + calls + in_flight):
            queue.append(shards(call(next_data())))
            if len(queue) <= in_flight:
                continue
            loss = float(np.ravel(queue.popleft()['step_loss'])[-1])  # waits for the call
            if i - in_flight >= warmup - 1:
                ends.append(clock())
                if len(ends) > MIN_CALLS and ends[-1] - ends[0] > max_seconds:
                    break
        jax.block_until_ready(list(queue))
    return ends, loss if math.isfinite(loss) else None


def statistics(ends: list[float], batch: int, unit: int = 1) -> Row:
    """Returns the step times and rates of calls that ended at these times.

    Args:
      ends: end times of the calls in seconds; the first one only starts the clock.
      batch: images per step.
      unit: steps per call.
    """
    times = np.diff(ends) * 1e3 / unit
    low, median, high = (float(v) for v in np.percentile(times, (25, 50, 75)))
    bounds = np.linspace(0, len(times), min(WINDOWS, len(times)) + 1).astype(int)
    rates = [batch * unit * int(b - a) / (ends[b] - ends[a]) for a, b in itertools.pairwise(bounds)]
    return {
        'steps': len(times) * unit,
        'step_ms': {'median': median, 'quartiles': [low, high]},
        'images_per_s': float(np.median(rates)),
        'images_per_s_range': [min(rates), max(rates)],
    }


def _read_ahead(config: Config) -> int:
    """Returns the number of steps after which a stream of batches runs steadily.

    A stream reads two batches per thread ahead, and starts to read them all at the same time.
    """
    return 2 * max(THREADS, config.data.num_workers + 2)


def _peak(devices: Sequence[jax.Device]) -> Row:
    """Returns the peak memory of the fullest device, or of this process if no device counts it."""
    stats = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in devices]
    if all(stats):
        return {'peak_bytes': max(int(s) for s in stats if s), 'peak_source': 'device'}
    unit = 1 if sys.platform == 'darwin' else 1024  # bytes in a unit of ru_maxrss
    return {
        'peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        'peak_source': 'process',
    }


def outcome(task: Task) -> Row:
    """Measures a point; a failure becomes a row with `status` and `reason`."""
    try:
        return {'status': OK, **measure(task)}
    except OutOfMemoryError as error:
        return {'status': OUT_OF_MEMORY, 'reason': str(error)}
    except UserError as error:
        return {'status': ERROR, 'reason': str(error)}
    except MemoryError:
        return {'status': OUT_OF_MEMORY, 'reason': 'this machine has no more memory'}
    except Exception as error:
        traceback.print_exc()
        message = f'{type(error).__name__}: {error}'.split('\n')[0][:400]
        return {'status': OUT_OF_MEMORY if is_out_of_memory(error) else ERROR, 'reason': message}


def _watch_parent() -> None:
    """Ends this process when the sweep that started it is gone, so it does not disturb others."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name='watch the sweep').start()


def probe() -> Row:
    """Returns the attributes of `Machine`, as JAX sees them in this process."""
    return {
        'platform': jax.default_backend(),
        'devices': len(jax.devices()),
        'provenance': provenance(),
        'auto': {p: choice for p in PRECISIONS if (choice := measured(p))},
    }


def main(argument: str) -> None:
    """Prints the row of a task, or of the probe, and ends the process."""
    answer = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print goes to stderr, not into the row
    _watch_parent()
    logging.set_verbosity(logging.INFO)
    row = probe() if argument == 'probe' else outcome(Task(**json.loads(argument)))
    print(json.dumps(row), file=answer, flush=True)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # no thread of a library may delay the next point


if __name__ == '__main__':
    main(sys.argv[1])
