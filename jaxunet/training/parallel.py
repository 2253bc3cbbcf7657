"""Data parallelism, two ways: `jit` of a `shard_map` over a device mesh, or `pmap`; both keep the state replicated and split the batch.

The batch is split by hand rather than by XLA's partitioner, which cannot look into hand-written kernels. Both compile `step(state, data)`,
where `data` is either a streamed batch or the whole dataset, resident on every device, from which the step gathers its own rows.

The gradients' all-reduce overlaps the backward pass: `psum` makes one operation of each gradient, which waits for nothing but that, and
on GPUs `OVERLAP` lets XLA run them beside the backward pass, several combined into one transfer, but not all into one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.order import batch_indices
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import Batch
from jaxunet.training.step import Metrics, TrainStep
from jaxunet.training.step_fields import relevant

AXIS = 'data'
STOP = 'stop'
# XLA's options, of which one that XLA_FLAGS sets is left to it. For several GPUs:
OVERLAP: dict[str, str | bool] = {
    # Orders operations so that transfers have something to run beside.
    'xla_gpu_enable_latency_hiding_scheduler': True,
    # Gradients are combined up to so many bytes. Large transfers use the links better, but the last can only start when all is computed.
    'xla_gpu_all_reduce_combine_threshold_bytes': str(16 * 2**20),
}
# For one GPU: kernels of a CUDA graph that do not wait for each other, such as both gradients of a layer, run at once. XLA then has what
# they write share less memory.
CONCURRENT: dict[str, str | bool] = {'xla_gpu_command_buffer_scheduling_mode': 'CONCURRENT'}
Data = dict[
    str, Any
]  # images + labels (resident), or image + label (one streamed batch); stop, in runs of several processes
RESIDENT = ('images', 'labels')
CompiledStep = Callable[[TrainState, Data], tuple[TrainState, Metrics]]


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Tracing and lowering make millions of objects that stay; going through them again and again takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Parallel:
    """Where a run's arrays live and how its step is compiled.

    Args:
      config: `parallel.mode` and `parallel.devices`, of all processes; `data.batch_size` must divide among the devices.

    Raises:
      UserError: more devices than there are, a batch that does not divide, or `parallel.concurrent_kernels` without a GPU or on several.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        available = jax.devices()
        count = config.parallel.devices or len(available)
        if count > len(available):
            raise UserError(
                f'parallel.devices: {count} asked for, but this machine has {len(available)} ({available[0].platform})'
            )
        if jax.process_count() > 1 and count != len(available):
            raise UserError(
                f'parallel.devices: several processes use all their {len(available)} devices; leave it at 0, found {count}'
            )
        if len(available) != jax.process_count() * jax.local_device_count():
            raise UserError(
                f'each process must have as many devices as the others: found {jax.local_device_count()} of {len(available)} on process '
                f'{jax.process_index()} of {jax.process_count()}; limit them with CUDA_VISIBLE_DEVICES'
            )
        micro = config.data.batch_size // config.optimizer.accumulate_steps
        if micro % count:
            raise UserError(
                f'data.batch_size: {config.data.batch_size} in optimizer.accumulate_steps={config.optimizer.accumulate_steps} parts '
                f'gives {micro} images, which do not divide among {count} devices'
            )
        self.devices = available[:count]
        if config.parallel.concurrent_kernels and (count > 1 or available[0].platform != 'gpu'):
            raise UserError(
                f'parallel.concurrent_kernels: needs one GPU, found {count} x {available[0].platform}; set it to False'
            )
        self.local_devices = [d for d in self.devices if d.process_index == jax.process_index()]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.pmap = config.parallel.mode == 'pmap'
        self._whole, self._split = (
            NamedSharding(self.mesh, spec) for spec in (PartitionSpec(), PartitionSpec(AXIS))
        )

    @property
    def local_rows(self) -> slice:
        """The rows of each global batch that this process loads."""
        share = self.config.data.batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def replicate(self, tree: Any) -> Any:
        """Host or device arrays, copied to every device."""

        def put(x: Any) -> jax.Array:
            value = np.asarray(x)
            if self.pmap:  # with an axis of devices in front
                return jax.make_array_from_callback(
                    (len(self.devices), *value.shape), self._split, lambda _: value[None]
                )
            return jax.make_array_from_callback(
                value.shape, self._whole, lambda index: value[index]
            )

        return jax.tree.map(put, tree)

    def fetch(self, tree: Any) -> Any:
        """Replicated arrays, as numpy on this host."""
        return jax.tree.map(np.asarray, jax.device_get(self.local(tree)))

    def local(self, tree: Any) -> Any:
        """Replicated arrays, as arrays of this process's first device."""
        return jax.tree.map(
            lambda x: (
                x.addressable_shards[0].data[0] if self.pmap else x.addressable_shards[0].data
            ),
            tree,
        )

    def put_batch(self, batch: dict[str, np.ndarray]) -> Data:
        """This process's rows of a streamed batch, split over its devices."""
        if self.pmap:
            n = len(self.local_devices)
            batch = {k: v.reshape(n, len(v) // n, *v.shape[1:]) for k, v in batch.items()}
        return {k: jax.make_array_from_process_local_data(self._split, v) for k, v in batch.items()}

    def with_stop(self, data: Data, stop: bool) -> Data:
        """The data of one step, and whether this process was asked to stop: `metrics[STOP]` of the step tells each process if any was."""
        return {**data, STOP: self._stop[stop]}

    @functools.cached_property
    def _stop(self) -> dict[bool, Any]:
        return {
            stop: self.put_batch({STOP: np.full(len(self.local_devices), stop, np.int32)})[STOP]
            for stop in (False, True)
        }

    def compile(
        self,
        make_step: Callable[[str | None], TrainStep],
        state: TrainState,
        data: Data,
        *,
        steps: int = 1,
        keep: bool = False,
    ) -> CompiledStep:
        """Compiles the step for these arguments ahead of time; the state is donated.

        Args:
          steps: that a call runs, on resident data; where there are several, the metrics have an axis of them in front.
          keep: take it from `compiled_cache.folder()`, or put it there, if the step is made from nothing but the config. That is done on
            GPUs, where hand-written kernels take long to lower, by a process alone.

        Raises:
          ValueError: several steps of a call, and data of one batch.
        """

        def build() -> jax.stages.Compiled:
            with _collecting_no_garbage():
                lowered = self.lower(make_step, state, data, steps)
            return lowered.compile(compiler_options=self.compiler_options)

        if not keep or jax.process_count() > 1 or self.devices[0].platform != 'gpu':
            return build()
        return compiled_cache.compiled(
            build,
            relevant(self.config),
            (state, data),
            self.devices,
            {**self.compiler_options, 'steps': steps},
        )

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """`OVERLAP` on several GPUs, `CONCURRENT` on one if asked for."""
        if self.devices[0].platform != 'gpu':
            return {}
        options = (
            OVERLAP
            if len(self.devices) > 1
            else CONCURRENT
            if self.config.parallel.concurrent_kernels
            else {}
        )
        return {
            name: value
            for name, value in options.items()
            if name not in os.environ.get('XLA_FLAGS', '')
        }

    @property
    def concurrent(self) -> bool:
        """Whether `compiler_options` have kernels run at once."""
        return CONCURRENT.items() <= self.compiler_options.items()

    def lower(
        self,
        make_step: Callable[[str | None], TrainStep],
        state: TrainState,
        data: Data,
        steps: int = 1,
    ) -> jax.stages.Lowered:
        """The step for these arguments, or several of them, not compiled yet."""
        if steps > 1 and 'image' in data:
            raise ValueError(f'{steps} steps in one call need the whole dataset; this is one batch')
        step = make_step(AXIS)

        def one(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
            new_state, metrics = step(state, self._rows(state, data))
            if STOP in data:
                metrics = {**metrics, STOP: jax.lax.pmax(data[STOP][0], AXIS)}
            return new_state, metrics

        def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
            if steps == 1:
                return one(state, data)
            return jax.lax.scan(lambda state, _: one(state, data), state, length=steps)

        if self.pmap:
            mapped = jax.pmap(whole, axis_name=AXIS, devices=self.devices, donate_argnums=0)
            # What is called and lowered takes the part of this process, what is compiled takes the arrays of all.
            part = multihost_utils.global_array_to_host_local_array(
                (state, data), self.mesh, PartitionSpec(AXIS)
            )
            return mapped.lower(*part)
        whole_array, split = PartitionSpec(), PartitionSpec(AXIS)
        # The step reduces over the axis itself (pmean), as it must under pmap; nothing is left for shard_map to check or insert.
        mapped = jax.shard_map(
            whole,
            mesh=self.mesh,
            in_specs=(
                whole_array,
                {name: whole_array if name in RESIDENT else split for name in data},
            ),
            out_specs=(whole_array, whole_array),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0).lower(state, data)

    def _rows(self, state: TrainState, data: Data) -> Batch:
        """This device's share of this step's batch, with every row's place in the global batch."""
        size = self.config.data.batch_size
        share = size // len(self.devices)
        row = jax.lax.axis_index(AXIS).astype(jnp.int32) * share + jnp.arange(
            share, dtype=jnp.int32
        )
        if 'image' in data:
            return {'image': data['image'], 'label': data['label'], 'row': row}
        with jax.named_scope('data'):
            index = batch_indices(state.step, size, data['images'].shape[0], self.config.seed)[row]
            return {'image': data['images'][index], 'label': data['labels'][index], 'row': row}
