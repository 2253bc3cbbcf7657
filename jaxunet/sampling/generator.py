"""Images from parameters: batches of samples on any number of devices, compiled once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt8

from jaxunet.config import Config
from jaxunet.data.images import to_uint8
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.sampling.sampler import (
    SamplerConfig,
    State,
    guided,
    initial_state,
    make_sampler,
    run,
    sample_keys,
)

SEGMENTS = 20  # calls of the sampling loop a batch: progress, and a chance to stop, after each


class Generator:
    """Draws samples of the model that `config` describes.

    Sample i of a seed depends on (seed, i, its label) alone, not on the batch size or the devices (up to the rounding of other
    kernels).

    Args:
      batch_size: samples drawn at a time, over all devices; rounded up to a multiple of them.

    Raises:
      UserError: options that the sampler or the model does not have.
    """

    def __init__(
        self,
        config: Config,
        sampler: SamplerConfig,
        *,
        batch_size: int,
        devices: Sequence[jax.Device],
    ) -> None:
        self.image_shape = config.image_shape
        self.sampler = make_sampler(
            sampler, make_diffusion(config.diffusion), num_classes=config.model.num_classes
        )
        self.batch_size = -(-batch_size // len(devices)) * len(devices)
        self.conditional = config.model.num_classes > 0
        mesh = Mesh(np.array(devices), ('data',))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec('data'))
        model = build_unet(config, load_ops(config.backend, config.precision))

        def segment(
            params: Params, state: State, keys: Array, labels: Array, start: Array, stop: Array
        ) -> State:
            def denoise(x: Array, t: Array, labels: Array | None) -> Array:
                return model.predict(params, x, t, labels if self.conditional else None)

            return run(
                guided(denoise, labels, self.sampler.config.guidance_scale),
                state,
                keys,
                self.sampler,
                start=start,
                stop=stop,
            )

        # Split by hand: XLA's partitioner cannot look into hand-written kernels.
        whole, split = PartitionSpec(), PartitionSpec('data')
        in_specs = (whole, split, split, split, whole, whole)
        mapped = jax.shard_map(
            segment, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False
        )
        self._segment = jax.jit(mapped, donate_argnums=1)
        self._initial = jax.jit(
            lambda keys: initial_state(keys, self.image_shape, self.sampler),
            out_shardings=self._split,
        )
        self._compiled: Any = None

    def put(self, params: Params) -> Params:
        """The parameters on this generator's devices."""
        return jax.device_put(params, self._replicated)

    def compile(self, params: Params) -> None:
        """Compiles the sampling loop ahead of its first use; `params` come from `put` (their shapes suffice)."""
        keys, labels = self._inputs(
            0, np.arange(self.batch_size), np.full(self.batch_size, -1, np.int32)
        )
        bound = jax.device_put(np.int32(0), self._replicated)
        self._compiled = self._segment.lower(
            params, self._initial(keys), keys, labels, bound, bound
        ).compile()

    def __call__(
        self,
        params: Params,
        *,
        seed: int,
        indices: Int[np.ndarray, ' samples'],
        labels: Int[np.ndarray, ' samples'] | None = None,
        progress: Callable[[float], bool] = lambda _: True,
    ) -> UInt8[np.ndarray, 'samples height width channels'] | None:
        """The samples with these numbers, at most `batch_size` of them.

        Args:
          params: from `put`.
          labels: classes, -1 = unconditional; None = all unconditional.
          progress: called with the share of the batch that is done; returning False stops, and the result is None.
        """
        count = len(indices)
        if count > self.batch_size:
            raise ValueError(f'{count} samples do not fit in a batch of {self.batch_size}')
        if self._compiled is None:
            self.compile(params)
        pad = (0, self.batch_size - count)
        labels = np.full(count, -1, np.int32) if labels is None else labels.astype(np.int32)
        keys, padded_labels = self._inputs(seed, np.pad(indices, pad), np.pad(labels, pad))
        state = self._initial(keys)
        steps = self.sampler.evaluations
        bounds = np.linspace(0, steps, min(SEGMENTS, steps) + 1).astype(np.int32)
        for start, stop in itertools.pairwise(bounds):
            state = self._compiled(
                params, state, keys, padded_labels, *jax.device_put((start, stop), self._replicated)
            )
            state.x.block_until_ready()
            if not progress(stop / steps):
                return None
        return to_uint8(state.x)[:count]

    def _inputs(self, seed: int, indices: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        keys = sample_keys(seed, indices)
        return jax.device_put(keys, self._split), jax.device_put(jnp.asarray(labels), self._split)
