"""One point of a sweep, measured in this process with the pieces that training uses.

    python -m jaxunet.sweep.measure TASK     # JSON with the fields of `Task`; prints one JSON row, and all else to stderr
    python -m jaxunet.sweep.measure probe    # what this machine is, likewise

`python -m jaxunet.sweep` starts it; each log in OUTPUT/logs begins with the command that repeats its point by hand.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxunet.benchmark.jax_side import timed_compile
from jaxunet.benchmark.timing import garbage_set_aside
from jaxunet.checkpoint.state import TrainState, fresh_state, make_optimizer
from jaxunet.config import Config, cli, resolve
from jaxunet.data import pipeline
from jaxunet.data.order import batch_indices
from jaxunet.data.sources import Source, open_images
from jaxunet.data.threads import THREADS
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import describe, load_ops
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import provenance
from jaxunet.runtime.subprocesses import OUT_OF_MEMORY
from jaxunet.sweep.points import WORKERS
from jaxunet.sweep.runner import ERROR, OK, Task
from jaxunet.training.calls import steps_of_call
from jaxunet.training.loop import IN_FLIGHT
from jaxunet.training.parallel import CompiledStep, Data, Parallel
from jaxunet.training.step import Metrics, TrainStep, make_train_step

WINDOWS = 5  # of the timed steps; the median of their rates is the point's, so that one hiccup of the machine does not show
MIN_CALLS = 5  # are timed whatever the time limit


def measure(task: Task) -> dict[str, Any]:
    """Compiles and runs the training step of a config, from random weights in the last layers too.

    (Those start at zero in training, and a network of zeros takes a GPU less power than a trained one, so it clocks higher.)

    Returns a row: `lower_s` and `compile_s` (`compile_cached`: all of it was kept from before; with jit off these are the rest
    of the first step, and the compiling of all the little programs in it), `steps` timed after `warmup` others, `step_ms`:
    `median` and `quartiles`, `images_per_s` (median over `WINDOWS` equal parts of the timed steps) and `images_per_s_range`, `peak_bytes`
    of the fullest device, or where the backend does not count them (`peak_source`) of this process; `loss` of the last step.

    Raises:
      UserError: the config does not fit the data or the machine.
    """
    config = resolve(task.config)
    cli.enable_compilation_cache()
    parallel = Parallel(config)
    model = build_unet(config, load_ops(config.backend, config.precision))
    logging.info('%s', describe(config.backend, config.precision))
    source = open_images(config)
    cache = pipeline.choose_cache(config, source)
    if (
        WORKERS in task.varied
        and config.data.num_workers
        and (cache == 'device' or source.in_memory)
    ):
        where = 'device memory' if cache == 'device' else 'memory, decoded'
        raise UserError(
            f'{WORKERS}: {config.data.num_workers} workers have nothing to do, as {config.data.path} lies in {where}'
        )
    state = parallel.replicate(fresh_state(config.replace(model={'zero_init': False})))
    data = _first_data(parallel, source, config, cache)

    def make_step(axis: str | None) -> TrainStep:
        return make_train_step(
            config, model, make_diffusion(config.diffusion), make_optimizer(config), axis_name=axis
        )

    programs = Programs()
    unit = 1
    if task.jit:
        unit = steps_of_call(
            config, resident=cache == 'device', platform=parallel.devices[0].platform
        )
        step, lower_s, compile_s = timed_compile(
            lambda: parallel.compile(make_step, state, data, steps=unit, keep=True)
        )
    else:
        # Thousands of programs, each too quick to be kept by itself; another attempt need not make them again.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
        step = eager(make_step(None), config)
        _, lower_s, compile_s = timed_compile(lambda: jax.block_until_ready(step(state, data)[1]))
    row = {
        'lower_s': lower_s,
        'compile_s': compile_s,
        'compile_cached': programs.cached,
        'data_cache': cache,
        'steps_per_call': unit,
    }
    if task.compile_only:
        return row
    warmup = task.warmup if cache == 'device' else max(task.warmup, _read_ahead(config))
    with _feed(
        parallel,
        source,
        config,
        data if cache == 'device' else None,
        warmup + task.steps + IN_FLIGHT,
    ) as feed:
        calls = -(-warmup // unit), -(-task.steps // unit)
        ends, loss = run(
            step,
            state,
            feed,
            parallel.local,
            *calls,
            task.max_seconds,
            in_flight=max(IN_FLIGHT // unit, 1),
        )
    return (
        row
        | statistics(ends, config.data.batch_size, unit)
        | {'warmup': calls[0] * unit, 'loss': loss}
        | _peak(parallel)
    )


class Programs:
    """Counts programs that are made ready from now on, and those of them that came from the compilation cache."""

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
        """Whether all of them did. None is made where the whole step is a kept one (`jaxunet.runtime.compiled_cache`)."""
        return self.hits == self.made


def eager(step: TrainStep, config: Config) -> CompiledStep:
    """The training step as Python calls it, on one device: every JAX operation is a program of its own, as without `jax.jit`."""

    def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
        size = config.data.batch_size
        row = jnp.arange(size, dtype=jnp.int32)
        if 'image' in data:
            return step(state, {**data, 'row': row})
        index = batch_indices(state.step, size, data['images'].shape[0], config.seed)
        return step(
            state, {'image': data['images'][index], 'label': data['labels'][index], 'row': row}
        )

    return whole


def run(
    step: CompiledStep,
    state: TrainState,
    feed: Callable[[], Data],
    local: Callable[[Any], Any],
    warmup: int,
    steps: int,
    max_seconds: float,
    in_flight: int = IN_FLIGHT,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], float | None]:
    """Calls of the compiled step as the training loop does them, up to `in_flight` queued.

    Returns the times at which the last warm-up call and every timed call were done, and the loss of the last step (None: not finite).
    Calls follow the timed ones, so that these end in a full queue too.
    """
    queue: collections.deque[Metrics] = collections.deque()
    ends: list[float] = []
    loss = math.nan
    with garbage_set_aside():
        for i in range(warmup + steps + in_flight):
            state, metrics = step(state, feed())
            queue.append(local(metrics))
            if len(queue) <= in_flight:
                continue
            loss = float(np.atleast_1d(queue.popleft()['step_loss'])[-1])  # waits for the call
            if i - in_flight >= warmup - 1:
                ends.append(clock())
                if len(ends) > MIN_CALLS and ends[-1] - ends[0] > max_seconds:
                    break
        jax.block_until_ready(state)
    return ends, loss if math.isfinite(loss) else None


def statistics(ends: list[float], batch: int, unit: int = 1) -> dict[str, Any]:
    """Of calls of `unit` steps that ended at these times, the first of which only starts the clock."""
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


def _first_data(parallel: Parallel, source: Source, config: Config, cache: str) -> Data:
    """What the step is compiled for: the resident set, or a batch of zeros."""
    if cache == 'device':
        images, labels = pipeline.load_all(source, progress=False)
        return parallel.replicate({'images': images, 'labels': labels})
    size = config.data.batch_size
    return parallel.put_batch(
        {
            'image': np.zeros((size, *config.image_shape), np.uint8),
            'label': np.zeros(size, np.int32),
        }
    )


def _read_ahead(config: Config) -> int:
    """Steps after which a stream is in its stride: twice its threads are read ahead, and started as many at a time."""
    return 2 * max(THREADS, config.data.num_workers + 2)


@contextlib.contextmanager
def _feed(
    parallel: Parallel, source: Source, config: Config, resident: Data | None, steps: int
) -> Iterator[Callable[[], Data]]:
    """What gives each of so many steps its data."""
    if resident is not None:
        yield lambda: resident
        return
    config = config.replace(train={'steps': steps})
    with pipeline.stream(source, config, 0, parallel.local_rows) as batches:
        yield lambda: parallel.put_batch(next(batches))


def _peak(parallel: Parallel) -> dict[str, Any]:
    stats = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in parallel.devices]
    if all(stats):
        return {'peak_bytes': max(int(s) for s in stats if s), 'peak_source': 'device'}
    unit = 1 if sys.platform == 'darwin' else 1024
    return {
        'peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        'peak_source': 'process',
    }


def outcome(task: Task) -> dict[str, Any]:
    """`measure` with its failures as rows: `status`, and the `reason` if it is not ok."""
    try:
        return {'status': OK, **measure(task)}
    except UserError as error:
        return {'status': ERROR, 'reason': str(error)}
    except MemoryError:
        return {'status': OUT_OF_MEMORY, 'reason': 'this machine has no more memory'}
    except Exception as error:
        traceback.print_exc()
        message = f'{type(error).__name__}: {error}'.split('\n')[0][:400]
        return {
            'status': OUT_OF_MEMORY if 'RESOURCE_EXHAUSTED' in message else ERROR,
            'reason': message,
        }


def _watch_parent() -> None:
    """A point must not go on timing, and disturb others, when the sweep that wants it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name='watch the sweep').start()


def main(argument: str) -> None:
    answer = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print is no part of the answer
    _watch_parent()
    logging.set_verbosity(logging.INFO)
    if argument == 'probe':
        row: dict[str, Any] = {
            'platform': jax.default_backend(),
            'devices': len(jax.devices()),
            'provenance': provenance(),
        }
    else:
        row = outcome(Task(**json.loads(argument)))
    print(json.dumps(row), file=answer, flush=True)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # the answer is out: no thread of a library may hold the next point up


if __name__ == '__main__':
    main(sys.argv[1])
