"""jaxunet's side of a comparison: its network and its training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.benchmark.cases import Prepared
from jaxunet.benchmark.timing import Run
from jaxunet.benchmark.traffic import bytes_moved
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.reading import Reading
from jaxunet.data.source import Source, no_labels, of_pixels
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, middle_time, network_input, q_sample
from jaxunet.model.low_res import images_of, low_res_of
from jaxunet.model.unet import Params, UNet, build_unet
from jaxunet.ops.backends import choose
from jaxunet.training.session import Session

SYNTHETIC_IMAGES = 4096
Result = TypeVar('Result')


def synthetic_source(config: Config) -> Source:
    """Returns random images and labels, for measuring time."""
    rng, reading = np.random.default_rng(config.seed), Reading.of(config)
    shape = (SYNTHETIC_IMAGES, *config.loaded_shape)
    images = rng.integers(0, reading.top + 1, shape, reading.dtype)
    classes = config.model.num_classes
    labels = (
        rng.integers(0, classes, SYNTHETIC_IMAGES).astype(np.int32)
        if classes
        else no_labels(SYNTHETIC_IMAGES)
    )
    return of_pixels('synthetic images', images, reading, labels, tuple(map(str, range(classes))))


class JaxSide:
    """The network and the training step of one backend at one batch size and precision.

    Args:
      config: from `cases.benchmark_config`, with the backend, precision and batch size of the case.
      source: the images.
      state: numpy training state of the same model (`jaxunet.checkpoint.state.fresh_state`).

    Raises:
      UserError: the backend is missing.
    """

    def __init__(self, config: Config, source: Source, state: TrainState) -> None:
        self.config, self.source, self.start = config, source, state
        kernels = choose(config.backend, config.precision)
        self.model = build_unet(config, kernels.ops)
        self.notes = {
            'ops': str(kernels),
            'bytes_source': 'operands and results of every kernel in the optimised HLO',
            'peak_source': "XLA's memory analysis of the executable",
        }

    def prepare(self, direction: str) -> Prepared:
        """Compiles one of `cases.DEFAULT_DIRECTIONS` and runs it once."""
        return self._step() if direction == 'step' else self._model(direction)

    def _step(self) -> Prepared:
        session = Session(self.config, self.source)
        session.load(self.start)
        session.open_stream()
        timed = timed_compile(session.compile)
        unit = session.steps_per_call
        held = [session]  # a list, so that `close` can empty it and free the state and images

        def run(steps: int) -> None:
            (session,) = held
            metrics = None
            for _ in range(steps // unit):
                metrics = session.call(session.next_data())
            jax.block_until_ready((session.state, metrics))

        def close() -> None:
            for session in held:
                session.close()
            held.clear()

        return self._prepared(timed, run, close, unit=unit, concurrent=session.parallel.concurrent)

    def _model(self, direction: str) -> Prepared:
        def loss(params: Params, inputs: dict[str, Array]) -> Array:
            return model_loss(self.config, self.model, params, inputs)

        function = jax.jit(loss if direction == 'forward' else jax.value_and_grad(loss))
        held = {'params': jax.device_put(self.start.params), 'inputs': random_inputs(self.config)}
        timed = timed_compile(lambda: function.lower(held['params'], held['inputs']).compile())

        def run(steps: int) -> None:
            out = None
            for _ in range(steps):
                out = timed.result(held['params'], held['inputs'])
            jax.block_until_ready(out)

        return self._prepared(timed, run, held.clear)

    def _prepared(
        self,
        timed: Timed[jax.stages.Compiled],
        run: Run,
        close: Callable[[], None],
        *,
        unit: int = 1,
        concurrent: bool = False,
    ) -> Prepared:
        """Runs the compiled program once; arguments as the fields of `Prepared`."""
        program = timed.result.as_text()
        assert program is not None
        run(unit)
        return Prepared(
            run=run,
            lower_s=timed.lower_s,
            compile_s=timed.compile_s,
            bytes_moved=bytes_moved(program) // unit,
            peak_bytes=peak_bytes(timed.result),
            notes=self.notes,
            close=close,
            unit=unit,
            concurrent=concurrent,
        )


def model_loss(
    config: Config, model: UNet, params: Params, inputs: dict[str, Array]
) -> Float[Array, '']:
    """Returns the mean training loss of `random_inputs`: forward process, network and error."""
    diffusion, x0, noise = make_diffusion(config.diffusion), inputs['x0'], inputs['noise']
    time = middle_time(diffusion, inputs['t'])
    xt = q_sample(diffusion, x0, time, noise)
    output = model.predict(
        params,
        network_input(diffusion, xt, time),
        time,
        inputs.get('labels'),
        inputs.get('dropout_keys'),
        low_res=inputs.get('low_res'),
    )
    bits = config.data.bits
    return jnp.mean(per_sample_loss(diffusion, output, x0, xt, time, noise, bits=bits))


def random_inputs(config: Config) -> dict[str, Array]:
    """Draws the inputs of a training step for one batch.

    They are x0 and noise (batch, height, width, channels), t (batch,), and if the model has them
    labels and dropout_keys (batch,) and low_res (batch, low_height, low_width, channels).
    """
    size = config.data.batch_size
    shape = (size, *config.loaded_shape)

    @jax.jit
    def draw(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, 5)
        loaded = jax.random.uniform(keys[0], shape, jnp.float32, -1, 1)
        x0 = images_of(config, loaded)
        inputs = {
            'x0': x0,
            't': jax.random.randint(keys[1], (size,), 0, config.diffusion.steps),
            'noise': jax.random.normal(keys[2], x0.shape, jnp.float32),
        }
        if config.model.num_classes:
            inputs['labels'] = jax.random.randint(keys[3], (size,), 0, config.model.num_classes)
        if config.model.dropout:
            inputs['dropout_keys'] = jax.random.split(keys[4], size)
        low_res = low_res_of(config, loaded)
        if low_res is not None:
            inputs['low_res'] = low_res
        return inputs

    return draw(jax.random.key(config.seed))


class Timed(NamedTuple, Generic[Result]):
    """A compiled function, and the time that its compilation took.

    Fields:
      lower_s: seconds of tracing and lowering.
      compile_s: seconds of compiling, as JAX reports them.
    """

    result: Result
    lower_s: float
    compile_s: float


def timed_compile(build: Callable[[], Result]) -> Timed[Result]:
    """Calls `build`, which lowers and compiles, and times it."""
    compiling: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == '/jax/core/compile/backend_compile_duration':
            compiling.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        began = time.perf_counter()
        result = build()
        total = time.perf_counter() - began
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return Timed(result, total - sum(compiling), sum(compiling))


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of device memory of one call.

    It counts arguments, results that do not reuse the memory of arguments, and temporaries.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
