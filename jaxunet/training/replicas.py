"""Compares the training state between devices, whose replicas must be equal bit for bit."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt32

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.runtime.errors import UserError
from jaxunet.training.parallel import AXIS, Parallel


class Replicas:
    """Compares checksums of weights, averages and optimizer state over the devices of a run.

    Without `train.check_replicas_every` it does nothing.
    """

    def __init__(self, config: Config, parallel: Parallel) -> None:
        self._parallel = parallel
        asked = config.train.check_replicas_every > 0
        self._active = asked and len(parallel.devices) > 1
        if asked and not self._active:
            logging.warning('train.check_replicas_every: nothing to compare on a single device')

    @functools.cached_property
    def _checksums(self) -> Any:
        """Returns the checksums of all arrays (columns) on all devices (rows), on every device."""

        def table(arrays: list[Array]) -> UInt32[Array, 'devices arrays']:
            mine = jnp.stack([_checksum(x) for x in arrays])
            return jax.lax.all_gather(mine, AXIS)

        whole, split = PartitionSpec(), PartitionSpec(AXIS)
        return jax.jit(
            jax.shard_map(
                table,
                mesh=self._parallel.mesh,
                in_specs=(split if self._parallel.pmap else whole,),
                out_specs=whole,
                check_vma=False,
            )
        )

    def check(self, state: TrainState, step: int, saved: int | None) -> None:
        """Compares the replicas; every process of the run must call it.

        Args:
          saved: the step of the last checkpoint, for the message.

        Raises:
          UserError: they differ.
        """
        if not self._active:
            return
        devices = self._parallel.devices
        leaves = jax.tree.leaves_with_path(
            {name: getattr(state, name) for name in ('params', 'ema', 'opt_state', 'teacher')}
        )
        result = self._checksums([leaf for _, leaf in leaves])
        checksums = np.asarray(result.addressable_shards[0].data)
        rows = [row.tobytes() for row in checksums]
        common, count = collections.Counter(rows).most_common(1)[0]
        if count == len(rows):
            return
        others = [n for n, row in enumerate(rows) if row != common]
        differ = np.any(checksums[others] != checksums[rows.index(common)], axis=0)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        first = names[int(np.argmax(differ))]
        if 2 * count > len(rows):
            who = f'{", ".join(str(devices[n]) for n in others)} differs from the other {count}'
        else:
            who = f'{" and ".join(map(str, devices))} differ from each other'
        raise UserError(
            f'training stopped at step {step}: the training state is not the same on all devices: '
            f'{who} in {differ.sum()} of {len(names)} arrays (first: {first}). A device computes '
            f'or stores wrong numbers; test it, or leave it out. Step {step} is not saved; the '
            f'same command resumes from the last checkpoint, step {saved}.'
        )


def _checksum(x: Array) -> UInt32[Array, '']:
    """Returns the sum of the bits of an array, taken as unsigned integers, modulo 2³²."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
