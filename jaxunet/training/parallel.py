"""Data parallelism: where the arrays of a run live, and how its step is compiled.

There are two modes: `jit` of a `shard_map` over a device mesh, and `pmap`. Both split the batch,
and replicate the state or split most of it (`jaxunet.training.sharded`). This is done by hand
rather than by XLA's partitioner, which cannot look into hand-written kernels. Both compile
`step(state, data)`, where `data` is either a streamed batch for each step or the whole dataset,
resident on every device, from which a step gathers its rows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.order import batch_indices
from jaxunet.ops.adamw.operands import Copies
from jaxunet.ops.backends import Kernels
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import Batch
from jaxunet.training.compiler_options import CONCURRENT, Options, compiler_options
from jaxunet.training.sharded import Sharded, any_sharded, as_parts, is_sharded, marked, part_size
from jaxunet.training.step import Metrics, TrainStep
from jaxunet.training.step_fields import relevant

# The arrays that a compiled step is called with, by name: images and labels of the whole dataset
# (`RESIDENT`), or image and label of streamed batches (`STREAMED`), which have an axis of steps in
# front if there are several in a call; and STOP in runs of several processes.
Data = dict[str, Any]
RESIDENT = ('images', 'labels')
STREAMED = ('image', 'label')
STOP = 'stop'
AXIS = 'data'  # of the device mesh
CompiledStep = Callable[[TrainState, Data], tuple[TrainState, Metrics]]
Tree = TypeVar('Tree')  # a pytree of arrays


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Turns garbage collection off for tracing and lowering.

    They create millions of objects that stay, and scanning these repeatedly takes a fifth of the
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_fewer_devices(config: Config) -> Config:
    """Returns the config with the largest number of available devices that divides the batch.

    Warns if they are fewer than asked for. A run of several processes keeps its devices, as each
    process must have the same number.
    """
    if jax.process_count() > 1:
        return config
    available = len(jax.devices())
    asked = config.parallel.devices or available
    micro = config.data.batch_size // config.optimizer.accumulate_steps
    count = max(n for n in range(1, min(asked, available) + 1) if micro % n == 0)
    if count == asked:
        return config
    logging.warning(
        'parallel.devices: %s asked for, %d found; training on %d: data.batch_size=%d in '
        'optimizer.accumulate_steps=%d parts gives %d images, which divide among them '
        '(--fewer_devices)',
        config.parallel.devices or 'all',
        available,
        count,
        config.data.batch_size,
        config.optimizer.accumulate_steps,
        micro,
    )
    return config.replace(parallel={'devices': count})


def stop_asked(metrics: Metrics) -> bool:
    """Returns True if a process was asked to stop before the call with these metrics (`STOP`).

    The metric is read as a numpy array, because a method of the JAX array, which `np.any` would
    call, runs on the device, after the steps that are queued there.
    """
    return bool(np.asarray(metrics.get(STOP, 0)).any())


class Parallel:
    """The devices of a run: places arrays on them and compiles steps for them.

    Args:
      config: its section `parallel` and `data.batch_size` are read. Devices are counted over all
        processes, and the batch must divide evenly among them.
      kernels: of the steps.

    Attributes:
      devices: of all processes.
      local_devices: of this process.
      pmap: the mode is pmap, else jit. Arrays then have an axis of devices in front.
      shards_state: each device has a part of weights, averages and optimizer state.
      fetch_is_collective: all processes must call `fetch` and `local` for the state of a step.

    Raises:
      UserError: there are fewer devices than asked for, or the batch does not divide.
    """

    def __init__(self, config: Config, kernels: Kernels) -> None:
        self.config, self.kernels = config, kernels
        available = jax.devices()
        count = config.parallel.devices or len(available)
        if count > len(available):
            raise UserError(
                f'parallel.devices: {count} asked for, but this machine has {len(available)} '
                f'({available[0].platform})'
            )
        if jax.process_count() > 1 and count != len(available):
            raise UserError(
                f'parallel.devices: several processes use all their {len(available)} devices; '
                f'leave it at 0, found {count}'
            )
        if len(available) != jax.process_count() * jax.local_device_count():
            raise UserError(
                'each process must have as many devices as the others: found '
                f'{jax.local_device_count()} of {len(available)} on process {jax.process_index()} '
                f'of {jax.process_count()}; limit them with CUDA_VISIBLE_DEVICES'
            )
        micro = config.data.batch_size // config.optimizer.accumulate_steps
        if micro % count:
            raise UserError(
                f'data.batch_size: {config.data.batch_size} in optimizer.accumulate_steps='
                f'{config.optimizer.accumulate_steps} parts gives {micro} images, which do not '
                f'divide among {count} devices'
            )
        self.devices = available[:count]
        self.local_devices = [d for d in self.devices if d.process_index == jax.process_index()]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.pmap = config.parallel.mode == 'pmap'
        self.shards_state = config.parallel.shard_optimizer and count > 1
        self.fetch_is_collective = self.shards_state and jax.process_count() > 1
        self._whole, self._split, self._split_batches = (
            NamedSharding(self.mesh, spec)
            for spec in (PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS))
        )

    @property
    def local_rows(self) -> slice:
        """Rows of each global batch that this process loads."""
        share = self.config.data.batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def replicate(self, tree: Tree) -> Tree:
        """Copies host or device arrays to every device; splits a `TrainState` if `shards_state`."""

        count = len(self.devices)

        def placed(value: np.ndarray, sharding: NamedSharding) -> Array:
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

        def put(x: np.ndarray | Array | Sharded) -> Array | Sharded:
            if isinstance(x, Sharded):
                parts = as_parts(np.asarray(x.part), count)
                return Sharded(
                    placed(parts if self.pmap else parts.reshape(-1), self._split), x.shape
                )
            value = np.asarray(x)
            if self.pmap:
                return placed(np.broadcast_to(value, (count, *value.shape)), self._split)
            return placed(value, self._whole)

        return jax.tree.map(put, self._marked(tree), is_leaf=is_sharded)

    def _marked(self, tree: Any) -> Any:
        return marked(tree) if self.shards_state and isinstance(tree, TrainState) else tree

    def replicated_shapes(self, tree: Tree) -> Tree:
        """Returns the shapes, types and shardings of the arrays that `replicate` makes of a tree.

        Args:
          tree: arrays, or their shapes and types.
        """
        front = (len(self.devices),) if self.pmap else ()
        sharding = self._split if self.pmap else self._whole

        def shape(x: np.ndarray | Array | jax.ShapeDtypeStruct | Sharded) -> Any:
            if isinstance(x, Sharded):
                count = len(self.devices)
                size = part_size(x.shape, count)
                dimensions = (count, size) if self.pmap else (count * size,)
                struct = jax.ShapeDtypeStruct(dimensions, x.part.dtype, sharding=self._split)
                return Sharded(struct, x.shape)
            return jax.ShapeDtypeStruct((*front, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(shape, self._marked(tree), is_leaf=is_sharded)

    def fetch(self, tree: Tree) -> Tree:
        """Returns replicated and sharded arrays as numpy arrays.

        Takes no further memory on the devices; if `fetch_is_collective`, one whole array at a time.
        """

        def readable(x: Array | Sharded) -> Any:
            if not isinstance(x, Sharded):
                return x.addressable_shards[0].data
            if self.fetch_is_collective:
                return Sharded(multihost_utils.process_allgather(x.part, tiled=True), x.shape)
            return x

        def whole(x: np.ndarray | Sharded) -> np.ndarray:
            return x.whole() if isinstance(x, Sharded) else np.asarray(x[0] if self.pmap else x)

        values = jax.device_get(jax.tree.map(readable, tree, is_leaf=is_sharded))
        return jax.tree.map(whole, values, is_leaf=is_sharded)

    def local(self, tree: Tree) -> Tree:
        """Returns replicated and sharded arrays as arrays of this process's first device.

        Replicated ones are not copied. In mode pmap this compiles small programs, so no steps may
        be in flight (`beside_steps`).
        """
        if any_sharded(tree):
            return jax.device_put(self.fetch(tree), self.local_devices[0])
        return jax.tree.map(lambda x: x[0] if self.pmap else x, self.shards(tree))

    def shards(self, tree: Tree) -> Tree:
        """Returns the parts of arrays on this process's first device; runs no program.

        In mode pmap they keep an axis of length 1 in front.
        """
        return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)

    def put_batches(self, batches: Sequence[dict[str, np.ndarray]]) -> Data:
        """Splits this process's rows of the streamed batches of a call over its devices.

        If there are several, the arrays get an axis of steps in front of the rows.
        """
        single = len(batches) == 1
        sharding = self._split if single or self.pmap else self._split_batches

        def put(name: str) -> Array:
            parts = [batch[name] for batch in batches]
            if self.pmap:
                n = len(self.local_devices)
                parts = [part.reshape(n, len(part) // n, *part.shape[1:]) for part in parts]
            rows = parts[0] if single else np.stack(parts, axis=int(self.pmap))
            return jax.make_array_from_process_local_data(sharding, rows)

        return {name: put(name) for name in batches[0]}

    def with_stop(self, data: Data, stop: bool) -> Data:
        """Adds to a step's data a flag: this process was asked to stop, or not.

        `metrics[STOP]` of the step is then nonzero on every process if any of them was asked.
        """
        return {**data, STOP: self._stop[stop]}

    @functools.cached_property
    def _stop(self) -> dict[bool, Array]:
        count = len(self.local_devices)
        return {
            stop: self.put_batches([{STOP: np.full(count, stop, np.int32)}])[STOP]
            for stop in (False, True)
        }

    def compile(
        self,
        make_step: Callable[[str | None], TrainStep],
        state: TrainState,
        data: Data,
        *,
        steps: int = 1,
        cache: bool = False,
    ) -> jax.stages.Compiled:
        """Compiles the step for these arguments ahead of time; the state is donated.

        Args:
          state: from `replicate` or `replicated_shapes`.
          make_step: returns the step for an axis name; see `make_train_step`.
          steps: steps per call. If there are several, streamed data and the metrics, except
            `STOP`, have an axis of steps in front.
          cache: look the step up in `compiled_cache.folder()`, and keep it there. Only for a step
            that is made from nothing but the config. Ignored unless `compiled_cache.keeps`.
        """

        def build() -> jax.stages.Compiled:
            with _garbage_collection_off():
                lowered = self.lower(make_step, state, data, steps)
            return lowered.compile(compiler_options=self.compiler_options)

        if not cache or not compiled_cache.keeps(self.devices, self.kernels.names.values()):
            return build()
        return compiled_cache.compiled(
            build,
            relevant(self.config) | {'ops': dict(self.kernels.names)},
            (state, data),
            self.devices,
            {**self.compiler_options, 'steps': steps},
        )

    @property
    def compiler_options(self) -> Options:
        """Options of XLA for the step."""
        return compiler_options(self.config, self.kernels, self.devices)

    @property
    def concurrent(self) -> bool:
        """True if `compiler_options` let independent kernels run at once."""
        return CONCURRENT.items() <= self.compiler_options.items()

    def lower(
        self,
        make_step: Callable[[str | None], TrainStep],
        state: TrainState,
        data: Data,
        steps: int = 1,
    ) -> jax.stages.Lowered:
        """Lowers the step, or a loop of `steps` steps, for these arguments; see `compile`."""
        step = make_step(AXIS)

        def with_stop(metrics: Metrics, data: Data) -> Metrics:
            return metrics | {STOP: jax.lax.pmax(data[STOP][0], AXIS)} if STOP in data else metrics

        def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
            if steps == 1:
                state, metrics = step(state, self._local_batch(state, data))
                return state, with_stop(metrics, data)

            def one(
                carry: tuple[TrainState, Copies], batch: Data
            ) -> tuple[tuple[TrainState, Copies], Metrics]:
                state, copies = carry
                rows = self._local_batch(state, data | batch)
                state, copies, metrics = step.advance(state, copies, teacher, rows)
                return (state, copies), metrics

            batches = {name: data[name] for name in STREAMED if name in data}
            carry, teacher = (state, step.copies(state)), step.teacher(state)
            (state, _), metrics = jax.lax.scan(one, carry, batches, length=steps)
            return state, with_stop(metrics, data)  # one sum for all steps

        if self.pmap:
            mapped = jax.pmap(whole, axis_name=AXIS, devices=self.devices, donate_argnums=0)
            # Lowering takes this process's part of the arrays; the compiled step takes all of them.
            # With several processes it takes no shapes, so zeros stand for the arrays.
            count = len(self.local_devices)
            part = jax.tree.map(
                lambda x: np.broadcast_to(np.zeros((), x.dtype), (count, *x.shape[1:])),
                (state, data),
            )
            return mapped.lower(*part)
        whole_array, part = PartitionSpec(), PartitionSpec(AXIS)
        states = jax.tree.map(
            lambda x: part if is_sharded(x) else whole_array, state, is_leaf=is_sharded
        )
        specs = dict.fromkeys(data, PartitionSpec(AXIS)) | dict.fromkeys(RESIDENT, whole_array)
        if steps > 1:
            specs |= dict.fromkeys(STREAMED, PartitionSpec(None, AXIS))
        # The step reduces over the axis itself, as it must under pmap, so shard_map has nothing to
        # check or insert.
        mapped = jax.shard_map(
            whole,
            mesh=self.mesh,
            in_specs=(states, {name: specs[name] for name in data}),
            out_specs=(states, whole_array),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0).lower(state, data)

    def _local_batch(self, state: TrainState, data: Data) -> Batch:
        """Returns this device's share of the batch, with each sample's row in the global batch."""
        share = self.config.data.batch_size // len(self.devices)
        first = jax.lax.axis_index(AXIS).astype(jnp.int32) * share
        row = first + jnp.arange(share, dtype=jnp.int32)
        return batch_of(self.config, state.step, data, row)


def batch_of(config: Config, step: Int[Array, ''], data: Data, row: Int[Array, ' rows']) -> Batch:
    """Returns these rows of the batch of a step, which are all that a streamed batch has."""
    if 'image' in data:
        return {'image': data['image'], 'label': data['label'], 'row': row}
    with jax.named_scope('data'):
        size, images = config.data.batch_size, data['images']
        index = batch_indices(step, size, images.shape[0], config.seed)[row]
        return {'image': images[index], 'label': data['labels'][index], 'row': row}
