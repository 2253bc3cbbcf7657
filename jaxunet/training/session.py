"""A training session: from a config and its images to a compiled step, its state and its feed.

    with Session(config, source) as session:
        session.load(fresh_state(config))
        session.open_stream()
        session.compile()
        metrics = session.call(session.next_data())

The step can be compiled before there is a state: `expect` takes its shapes, and `put` the state.
`load` does both.

The training loop, sweeps, profiles and benchmarks all run their steps this way, so they measure the
step that trains.
"""

from __future__ import annotations

import contextlib
import math

import jax
import numpy as np
from absl import logging

from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import TrainState, fresh_state
from jaxunet.config import Config, ParallelConfig
from jaxunet.config.relations import MAX_STEPS_PER_CALL, step_counts
from jaxunet.data import pipeline
from jaxunet.data.pairs import with_pictures
from jaxunet.data.source import Source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.low_res import check_condition
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import Kernels, choose
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.paths import shown_path
from jaxunet.training.gradients import LossFn
from jaxunet.training.parallel import CompiledStep, Data, Parallel
from jaxunet.training.step import Metrics, TrainStep, make_train_step

STEP_MEMORY = (  # for `memory_for`
    'a training step',
    'lower data.batch_size, raise optimizer.accumulate_steps (the same batch in more parts) or set '
    'model.remat=True',
)
STREAMED_BYTES = 2**26  # limit of the streamed batches of a call; a device holds those of two calls
IN_FLIGHT = 8  # steps to queue before the oldest's metrics are read, so the device rarely waits


class Session:
    """The training step of a config with everything it runs on.

    Args:
      images: resident images that an earlier session of this source and these devices has loaded;
        empty = this session fills it. None = there are no others.

    Attributes:
      kernels: those of its backend.
      parallel: the devices.
      resident: the images are kept in device memory, else they are streamed.
      steps_per_call: optimizer steps per call of `step`; known after `expect`.
      state: the training state on the devices, after `put`; `call` replaces it. Its shapes, types
        and shardings, after `expect`.
      data: the images that `step` is called with, after `expect`. Before the first streamed
        batches, batches of zeros.
      step: the compiled step, after `compile`.

    Raises:
      UserError: the config does not fit the devices, the images or its backend, or that is missing.
    """

    kernels: Kernels
    parallel: Parallel
    resident: bool
    steps_per_call: int
    state: TrainState
    data: Data
    step: CompiledStep
    _loss: LossFn | None = None  # of another network than `_model`

    def __init__(self, config: Config, source: Source, images: Data | None = None) -> None:
        check_condition(config)
        self.kernels = choose(config.backend, config.precision)
        self.kernels.check_averages(config)
        self.config, self.source = config, with_pictures(source)
        if self.source.image_shape != config.loaded_shape and config.picture_path:
            raise UserError(
                f'data.condition: expected images with pictures of {config.picture_channels} '
                f'channels beside them, found {source.name} alone'
            )
        self.parallel = Parallel(config, self.kernels)
        if len(self.parallel.devices) == 1:
            for name in ('shard_optimizer', 'reduce_dtype'):
                if getattr(config.parallel, name) != getattr(ParallelConfig, name):
                    logging.warning('parallel.%s: has no effect on a single device', name)
        self._model = build_unet(config, self.kernels.ops)
        logging.info('%s', self.kernels)
        self._diffusion = make_diffusion(config.diffusion)
        self._optimizer = make_optimizer(config)
        self.resident = pipeline.choose_cache(config, self.source) == 'device'
        self._images = {} if images is None else images
        self._first_step = 0
        self._stream: pipeline.Stream | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, state: TrainState, *, progress: bool = False) -> None:
        """Puts a numpy state on the devices, and the images too if they are resident.

        Args:
          progress: show a progress bar while images are decoded.

        Raises:
          UserError: as `expect` and `put`.
        """
        self.expect(state, int(state.step), progress=progress)
        self.put(state)

    def load_random(self, *, progress: bool = False) -> None:
        """Loads a fresh state with random last layers, to time steps.

        In training they start at zero, but with zeros a GPU draws less power than with a trained
        network, so its clock would be higher. Argument and errors as `load`.
        """
        state = fresh_state(self.config.replace(model={'zero_init': False}))
        self.load(state, progress=progress)

    def expect(self, shapes: TrainState, step: int, *, progress: bool = False) -> None:
        """Gets ready for a state, and puts the images on the devices if they are resident.

        Args:
          shapes: the numpy state, or its shapes and types.
          step: the step of the state.
          progress: show a progress bar while images are decoded.

        Raises:
          UserError: `train.steps_per_call` does not fit `step`, an image is corrupt, or the devices
            have no memory left.
        """
        self._first_step = step
        self.steps_per_call = choose_steps_per_call(
            self.config,
            resident=self.resident,
            platform=self.parallel.devices[0].platform,
            start=self._first_step,
        )
        self.state = self.parallel.replicated_shapes(shapes)
        if self.resident:
            self._load_images(progress)
            self.data = self._images
            return
        rows = self.config.data.batch_size // jax.process_count()
        zeros = {
            'image': np.zeros((rows, *self.config.loaded_shape), self.source.reading.dtype),
            'label': np.zeros(rows, np.int32),
        }
        self.data = self.parallel.put_batches([zeros] * self.steps_per_call)

    def _load_images(self, progress: bool) -> None:
        if self._images:
            return
        with memory_for(
            f'the images in {shown_path(self.config.data.path)}', 'set data.cache=stream'
        ):
            images, labels = pipeline.load_all(self.source, progress=progress)
            self._images |= self.parallel.replicate({'images': images, 'labels': labels})

    @memory_for('weights, averages and optimizer', 'choose a smaller network (model)')
    def put(self, state: TrainState) -> None:
        """Puts a numpy state, of the shapes and the step that were expected, on the devices.

        Raises:
          OutOfMemoryError: the devices have no memory left.
        """
        self.state = self.parallel.replicate(state)

    def open_stream(self, end: int | None = None) -> None:
        """Starts reading batches ahead, from the step of the state; does nothing if `resident`.

        Args:
          end: the step before which the stream ends; default: `train.steps`.
        """
        if self.resident:
            return
        config = self.config if end is None else self.config.replace(train={'steps': end})
        self._stream = pipeline.stream(
            self.source, config, self._first_step, self.parallel.local_rows
        )

    def make_step(self, axis_name: str | None) -> TrainStep:
        """Returns the training step, not compiled; `axis_name` as in `make_train_step`."""
        return make_train_step(
            self.config,
            self._model,
            self._diffusion,
            self._optimizer,
            self.kernels,
            axis_name=axis_name,
            loss=self._loss,
        )

    @memory_for(*STEP_MEMORY)
    def compile(self, *, cache: bool = False) -> jax.stages.Compiled:
        """Compiles `step` for the expected state and the data.

        Args:
          cache: look the step up in `jaxunet.runtime.compiled_cache` first, and keep it there.

        Raises:
          OutOfMemoryError: the step does not fit into the devices' memory.
        """
        compiled = self.parallel.compile(
            self.make_step,
            self.state,
            self._with_stop(self.data, False),
            steps=self.steps_per_call,
            cache=cache,
        )
        self.step = compiled
        return compiled

    @memory_for(*STEP_MEMORY)
    def next_data(self) -> Data:
        """Returns the data of the next call: the resident images, or the next streamed batches.

        Raises:
          UserError: an image of the stream is corrupt, or there is no memory left.
        """
        if self._stream is not None:
            batches = [next(self._stream) for _ in range(self.steps_per_call)]
            self.data = self.parallel.put_batches(batches)
        return self.data

    @property
    def calls_ahead(self) -> int:
        """Calls to queue, in training, sweeps and profiles, before the oldest's metrics are read.

        On a CPU it is 1: a longer queue gains nothing, and a run that stops waits for all of it.
        """
        if self.parallel.devices[0].platform == 'cpu':
            return 1
        return max(IN_FLIGHT // self.steps_per_call, 1)

    @memory_for(*STEP_MEMORY)
    def call(self, data: Data, *, stop: bool = False) -> Metrics:
        """Runs the next `steps_per_call` steps; returns before they are done.

        Args:
          data: from `next_data`.
          stop: this process was asked to stop. In a run of several processes the metric `STOP`
            then tells all of them.

        Returns the steps' metrics on all devices; `parallel.shards` gives those of one.

        Raises:
          OutOfMemoryError: now or, with JAX's own error, where a result is read. The state may be
            lost then (`is_whole`).
        """
        self.state, metrics = self.step(self.state, self._with_stop(data, stop))
        return metrics

    def is_whole(self) -> bool:
        """Returns True if `state` can be read, once the calls so far are done.

        A call gives the memory of its state to the next one, so that it is lost if the call fails.
        """
        try:
            jax.block_until_ready(self.state)
        except RuntimeError:  # the error of that call, or the memory was given away
            return False
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def close(self) -> None:
        """Waits for the steps in flight, and ends the stream's threads and processes."""
        if hasattr(self, 'state'):
            # The process would crash if it ended during a step. A step that failed has already
            # raised its error where its result was read.
            with contextlib.suppress(Exception):
                jax.block_until_ready(self.state)
        if self._stream is not None:
            self._stream.close()

    def _with_stop(self, data: Data, stop: bool) -> Data:
        return data if jax.process_count() == 1 else self.parallel.with_stop(data, stop)


def check_steps_per_call(config: Config, start: int) -> None:
    """Checks that a run can resume from the step `start`.

    Raises:
      UserError: `train.steps_per_call` does not divide it.
    """
    asked = config.train.steps_per_call
    if asked and start % asked:
        raise UserError(
            f'train.steps_per_call: {asked} does not divide {start}, the step to resume from; '
            'set it to 0, to 1 or to a divisor'
        )


def choose_steps_per_call(config: Config, *, resident: bool, platform: str, start: int = 0) -> int:
    """Returns `train.steps_per_call`, or chooses a number and logs it where that is 0.

    On a GPU the choice is the largest number up to `MAX_STEPS_PER_CALL` that divides `start` and
    all step counts of the config; the streamed batches of a call take at most `STREAMED_BYTES`. On
    a CPU it is 1, as XLA runs loops of steps slowly there.

    Args:
      resident: the images are kept in device memory.
      platform: of the devices, such as gpu or cpu.
      start: the step to resume from.

    Raises:
      UserError: `train.steps_per_call` does not divide `start`.
    """
    asked = config.train.steps_per_call
    check_steps_per_call(config, start)
    if asked > 1 and platform == 'cpu':
        logging.warning(
            'train.steps_per_call: XLA runs a loop of %d steps slowly on a CPU; 1 is faster there',
            asked,
        )
    if asked:
        return asked
    if platform != 'gpu':
        return 1
    limit = MAX_STEPS_PER_CALL
    if not resident:
        image = math.prod(config.loaded_shape) * config.data.bits // 8
        batch = config.data.batch_size // jax.process_count() * image
        limit = min(limit, max(STREAMED_BYTES // batch, 1))
    counts = step_counts(config)
    common = math.gcd(start, *counts.values())
    chosen = max(n for n in range(1, limit + 1) if common % n == 0)
    if chosen > 1 or limit == 1:
        logging.info('train.steps_per_call=0: chose %d', chosen)
    else:
        logging.warning(
            'train.steps_per_call=0: chose 1, as no larger number up to %d divides %s and '
            'step %d, from which the run resumes',
            limit,
            ', '.join(name for name, count in counts.items() if count),
            start,
        )
    return chosen
