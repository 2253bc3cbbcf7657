"""The loss on held-out images beside the loss on training images, by noise level.

While a network learns what its images have in common, both fall. Once it memorizes single training
images, the loss on the others rises. The noise levels of training are divided into `BANDS` bands of
equal probability, from the least noise to the most. Each image is measured once in each band, with
the averaged weights and the same noise every time, so only the weights change between measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, UInt8

from jaxunet.checkpoint.store import state_template
from jaxunet.config import Config
from jaxunet.data.pipeline import load_all
from jaxunet.data.source import Source, Subset
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, middle_time, network_input, q_sample
from jaxunet.model.low_res import low_res_of
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.training.batch import normalise

BANDS = 4
MAX_IMAGES = 1024  # of each kind; of a larger set, as many at equal intervals
SEED = 0x10E5  # of the noise; no seed of a run
RISES = 3  # logs in a row with a higher held-out loss that are reported,
RISE = 0.01  # if they raise it by this share in all


class Losses(NamedTuple):
    """Mean losses by band of noise levels, from the least noise to the most.

    Fields:
      held_out: of images that are not trained on.
      seen: of as many training images.
    """

    held_out: Float[np.ndarray, ' bands']
    seen: Float[np.ndarray, ' bands']

    @classmethod
    def of_row(cls, row: Mapping[str, str]) -> Losses | None:
        """Returns the losses of a row of metrics.csv; None if it has none."""
        found = [
            [row.get(f'{name}_loss{suffix}') for suffix in SUFFIXES[1:]] for name in cls._fields
        ]
        if not all(value for bands in found for value in bands):
            return None
        return cls(*(np.array(bands, np.float64) for bands in found))

    def columns(self) -> dict[str, float]:
        """Returns the means over all bands and the bands, by their columns of metrics.csv."""
        return {
            f'{name}_loss{suffix}': float(value)
            for name, bands in self._asdict().items()
            for suffix, value in zip(SUFFIXES, [bands.mean(), *bands], strict=True)
        }


SUFFIXES = ('', *(f'_{band + 1}' for band in range(BANDS)))
COLUMNS = tuple(f'{name}_loss{suffix}' for name in Losses._fields for suffix in SUFFIXES)


def fixed_noise(
    numbers: Int[Array, ' batch'], shape: tuple[int, ...]
) -> Float[Array, 'batch height width channels']:
    """Returns noise of one image's shape for every number, the same for equal numbers."""

    def noise_of(number: Array) -> Array:
        key: Key[Array, ''] = jax.random.fold_in(jax.random.key(SEED), number)
        return jax.random.normal(key, shape, jnp.float32)

    return jax.vmap(noise_of)(numbers)


class HeldOutLoss:
    """Measures the loss on held-out and on training images, in a separate program.

    Args:
      source: the training images, with `held_out` images.
      devices: of this process; they share the images.

    Raises:
      ValueError: the source holds no images out.
    """

    def __init__(self, config: Config, source: Source, devices: Sequence[jax.Device]) -> None:
        if source.held_out is None:
            raise ValueError(f'{source.name} holds no images out')
        self._config, self._sources = config, (source.held_out, source)
        self._diffusion = make_diffusion(config.diffusion)
        self._model = build_unet(config, load_ops(config.backend, config.precision))
        mesh = Mesh(np.array(devices), ('data',))
        whole, split = PartitionSpec(), PartitionSpec('data')
        self._replicated, self._split = NamedSharding(mesh, whole), NamedSharding(mesh, split)
        # shard_map instead of automatic partitioning: XLA cannot partition hand-written kernels.
        mapped = jax.shard_map(
            self._losses,
            mesh=mesh,
            in_specs=(whole, split, split, split, split),
            out_specs=split,
            check_vma=False,
        )
        self._program = jax.jit(mapped)
        self._compiled: jax.stages.Compiled | None = None
        # As many images per device as in a training step.
        share = config.data.batch_size // config.optimizer.accumulate_steps
        self._rows = max(share // (config.parallel.devices or jax.device_count()), 1) * len(devices)
        self._images: list[tuple[np.ndarray, np.ndarray]] = []

    def compile(self) -> HeldOutLoss:
        """Compiles the program and loads the images; returns this object.

        Raises:
          UserError: an image is corrupt.
        """
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated),
            state_template(self._config).params,
        )
        batch = self._batch(
            np.zeros((1, *self._config.image_shape), np.uint8), *np.zeros((3, 1), np.int32)
        )
        self._compiled = self._program.lower(params, *batch).compile()
        count = min(MAX_IMAGES, *(len(source) for source in self._sources))
        for source in self._sources:
            rows = np.arange(count) * len(source) // count
            self._images.append(load_all(Subset(source, rows), progress=False))
        return self

    def measure(self, params: Params) -> Losses:
        """Returns the losses of these weights, on any devices or numpy."""
        if self._compiled is None:
            self.compile()
        assert self._compiled is not None
        placed = jax.device_put(params, self._replicated)
        count, steps = len(self._images[0][0]), self._diffusion.steps
        number, band = (x.reshape(-1) for x in np.indices((count, BANDS)))
        # Images spread evenly over the timesteps of a band.
        t = ((band + (number + 0.5) / count) * steps / BANDS).astype(np.int32)
        found = []
        for images, labels in self._images:
            losses = []
            for first in range(0, len(t), self._rows):
                rows = slice(first, first + self._rows)
                chosen = number[rows]
                batch = self._batch(
                    images[chosen], labels[chosen], t[rows], np.arange(len(t))[rows]
                )
                losses.append((self._compiled(placed, *batch), len(chosen)))
            values = np.concatenate([np.asarray(part)[:size] for part, size in losses])
            found.append(values.astype(np.float64).reshape(count, BANDS).mean(axis=0))
        return Losses(*found)

    def _batch(
        self,
        images: UInt8[np.ndarray, 'n height width channels'],
        labels: Int[np.ndarray, ' n'],
        t: Int[np.ndarray, ' n'],
        number: Int[np.ndarray, ' n'],
    ) -> tuple[Array, ...]:
        """Puts the inputs of one call on the devices, padded to its size.

        Args:
          number: identifies the noise of each image.
        """
        pad = self._rows - len(images)
        arrays = (images, labels.astype(np.int32), t.astype(np.int32), number.astype(np.int32))
        padded = [np.concatenate([a, np.repeat(a[-1:], pad, axis=0)]) for a in arrays]
        return tuple(jax.device_put(a, self._split) for a in padded)

    def _losses(
        self,
        params: Params,
        images: UInt8[Array, 'batch height width channels'],
        labels: Int[Array, ' batch'],
        t: Int[Array, ' batch'],
        number: Int[Array, ' batch'],
    ) -> Float[Array, ' batch']:
        x0, noise = normalise(images), fixed_noise(number, images.shape[1:])
        time = middle_time(self._diffusion, t)
        xt = q_sample(self._diffusion, x0, time, noise)
        output = self._model.predict(
            params,
            network_input(self._diffusion, xt, time),
            time,
            labels if self._config.model.num_classes else None,
            low_res=low_res_of(self._config, x0),
        )
        return per_sample_loss(self._diffusion, output, x0, xt, time, noise)


class Turn:
    """Notices when the held-out loss rises while the loss on training images falls.

    The mean of the bands' logarithms is compared, so that every noise level counts alike.
    """

    def __init__(self) -> None:
        self._held_out = self._seen = self._lowest = math.nan
        self._rises = 0

    def add(self, losses: Losses) -> str:
        """Adds a measurement.

        Returns a sentence at every `RISES`th rise in a row, if they amount to `RISE`; else ''.
        """
        held_out, seen = (float(np.log(bands).mean()) for bands in losses)
        if held_out > self._held_out and seen < self._seen:
            self._rises += 1
        else:
            self._rises, self._lowest = 0, held_out
        self._held_out, self._seen = held_out, seen
        if self._rises == 0 or self._rises % RISES or held_out - self._lowest < RISE:
            return ''
        return (
            f'held-out loss has risen for {self._rises} logs: the model begins to repeat its '
            'training images'
        )
