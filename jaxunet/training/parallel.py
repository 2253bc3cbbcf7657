"""Data parallelism, two ways: `jit` of a `shard_map` over a device mesh, or `pmap`; both keep the state replicated and split the batch.

The batch is split by hand rather than by XLA's partitioner, which cannot look into hand-written kernels. Both compile `step(state, data)`, where `data` is either a streamed batch or the whole dataset, resident on every device, from which
the step gathers its own rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxunet.config import Config
from jaxunet.data.order import batch_indices
from jaxunet.errors import UserError
from jaxunet.training.state import TrainState
from jaxunet.training.step import Batch, Metrics, TrainStep

AXIS = 'data'
Data = dict[str, Any]  # images + labels (resident), or image + label (one streamed batch)
CompiledStep = Callable[[TrainState, Data], tuple[TrainState, Metrics]]


class Parallel:
    """Where a run's arrays live and how its step is compiled.

    Args:
      config: `parallel.mode` and `parallel.devices`, of all processes; `data.batch_size` must divide among the devices.

    Raises:
      UserError: more devices than there are, or a batch that does not divide.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        available = jax.devices()
        count = config.parallel.devices or len(available)
        if count > len(available):
            raise UserError(f'parallel.devices: {count} asked for, but this machine has {len(available)} ({available[0].platform})')
        if jax.process_count() > 1 and count != len(available):
            raise UserError(f'parallel.devices: several processes use all their {len(available)} devices; leave it at 0, found {count}')
        micro = config.data.batch_size // config.optimizer.accumulate_steps
        if micro % count:
            raise UserError(
                f'data.batch_size: {config.data.batch_size} in optimizer.accumulate_steps={config.optimizer.accumulate_steps} parts '
                f'gives {micro} images, which do not divide among {count} devices'
            )
        self.devices = available[:count]
        self.local_devices = [d for d in self.devices if d.process_index == jax.process_index()]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.pmap = config.parallel.mode == 'pmap'
        # Made once: pmap compiles anew for every new function, and this one runs every step of a stream.
        self._place = jax.pmap(lambda x: x, devices=self._pmap_devices)

    @property
    def local_rows(self) -> slice:
        """The rows of each global batch that this process loads."""
        share = self.config.data.batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def replicate(self, tree: Any) -> Any:
        """Host or device arrays, copied to every device."""
        if self.pmap:
            copy = jax.pmap(lambda _, x: x, in_axes=(0, None), devices=self._pmap_devices)
            return copy(np.arange(len(self.local_devices)), tree)
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), sharding, functools.partial(_part, np.asarray(x))), tree)

    def fetch(self, tree: Any) -> Any:
        """Replicated arrays, as numpy on this host."""
        return jax.tree.map(np.asarray, jax.device_get(self.local(tree)))

    def local(self, tree: Any) -> Any:
        """Replicated arrays, as arrays of this process's first device."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0] if self.pmap else x.addressable_shards[0].data, tree)

    def put_batch(self, batch: dict[str, np.ndarray]) -> Data:
        """This process's rows of a streamed batch, split over its devices."""
        if self.pmap:
            n = len(self.local_devices)
            split = {k: v.reshape(n, len(v) // n, *v.shape[1:]) for k, v in batch.items()}
            return self._place(split)
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}

    def compile(self, make_step: Callable[[str | None], TrainStep], state: TrainState, data: Data) -> CompiledStep:
        """Compiles the step for these arguments ahead of time; the state is donated."""
        step = make_step(AXIS)

        def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
            return step(state, self._rows(state, data))

        if self.pmap:
            mapped = jax.pmap(whole, axis_name=AXIS, devices=self._pmap_devices, donate_argnums=0)
            return mapped.lower(state, data).compile()
        whole_array, split = PartitionSpec(), PartitionSpec(AXIS)
        # The step reduces over the axis itself (pmean), as it must under pmap; nothing is left for shard_map to check or insert.
        mapped = jax.shard_map(
            whole,
            mesh=self.mesh,
            in_specs=(whole_array, split if 'image' in data else whole_array),
            out_specs=(whole_array, whole_array),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0).lower(state, data).compile()

    @property
    def _pmap_devices(self) -> list[jax.Device] | None:
        # pmap's own choice spans all processes; naming devices works on one process only.
        return self.devices if jax.process_count() == 1 else None

    def _rows(self, state: TrainState, data: Data) -> Batch:
        """This device's share of this step's batch, with every row's place in the global batch."""
        size = self.config.data.batch_size
        share = size // len(self.devices)
        row = jax.lax.axis_index(AXIS).astype(jnp.int32) * share + jnp.arange(share, dtype=jnp.int32)
        if 'image' in data:
            return {**data, 'row': row}
        with jax.named_scope('data'):
            index = batch_indices(state.step, size, data['images'].shape[0], self.config.seed)[row]
            return {'image': data['images'][index], 'label': data['labels'][index], 'row': row}


def _part(value: np.ndarray, index: Any) -> np.ndarray:
    return value[index]
