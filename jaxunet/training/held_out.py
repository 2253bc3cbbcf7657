"""The loss on held-out images beside the loss on training images, in bands of noise levels.

While a network learns what its images have in common, both fall. Once it memorizes single training
images, the loss on the others rises. `jaxunet.training.bands` chooses the images and their noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxunet.checkpoint.store import state_template
from jaxunet.config import Config
from jaxunet.data.pairs import with_pictures
from jaxunet.data.source import Source
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, middle_time, network_input, q_sample
from jaxunet.model.low_res import images_of, low_res_of
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.training.bands import BANDS, BandBatch, BandImages, fixed_noise
from jaxunet.training.batch import normalise
from jaxunet.training.consistency import consistency_losses, decays, guidance_of

# `Turn` reports after every `RISES` rises of the held-out loss in a row, if the loss has grown by
# the share `RISE` or more since before the first of them.
RISES, RISE = 3, 0.01


class Losses(NamedTuple):
    """Mean losses by band of noise levels, from the least noise to the most.

    Fields:
      held_out: losses on images that are kept out of training.
      seen: losses on as many training images.
    """

    held_out: Float[np.ndarray, ' bands']
    seen: Float[np.ndarray, ' bands']

    @classmethod
    def of_row(cls, row: Mapping[str, str]) -> Losses | None:
        """Returns the losses of a row of metrics.csv; None if it has none."""
        losses = [
            [row.get(f'{name}_loss{suffix}') for suffix in SUFFIXES[1:]] for name in cls._fields
        ]
        if not all(value for bands in losses for value in bands):
            return None
        return cls(*(np.array(bands, np.float64) for bands in losses))

    def columns(self) -> dict[str, float]:
        """Returns the means over all bands and the bands, by their columns of metrics.csv."""
        return {
            f'{name}_loss{suffix}': float(value)
            for name, bands in self._asdict().items()
            for suffix, value in zip(SUFFIXES, [bands.mean(), *bands], strict=True)
        }


SUFFIXES = ('', *(f'_{band + 1}' for band in range(BANDS)))
COLUMNS = tuple(f'{name}_loss{suffix}' for name in Losses._fields for suffix in SUFFIXES)


class HeldOutLoss:
    """Measures the loss on held-out and on training images, in a separate program.

    Args:
      source: the training images, with `held_out` images.
      devices: of this process; they share the images.
      teacher: the weights that guide, numpy arrays; () without `diffusion.consistency_guidance`.

    Raises:
      ValueError: the source holds no images out.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        devices: Sequence[jax.Device],
        teacher: Params = (),
    ) -> None:
        self._teacher = teacher
        self._config, self._diffusion = config, make_diffusion(config.diffusion)
        self._model = build_unet(config, choose(config.backend, config.precision).ops)
        mesh = Mesh(np.array(devices), ('data',))
        whole, split = PartitionSpec(), PartitionSpec('data')
        self._replicated = NamedSharding(mesh, whole)
        self._images = BandImages(
            config,
            with_pictures(source),
            self._diffusion.steps,
            devices=len(devices),
            placement=NamedSharding(mesh, split),
        )
        # shard_map instead of automatic partitioning: XLA cannot partition hand-written kernels.
        mapped = jax.shard_map(
            self._losses,
            mesh=mesh,
            in_specs=(whole, whole, split),
            out_specs=split,
            check_vma=False,
        )
        self._program = jax.jit(mapped)
        self._compiled: jax.stages.Compiled | None = None

    def compile(self) -> HeldOutLoss:
        """Loads the images and compiles the program; returns this object.

        Raises:
          UserError: an image is corrupt.
        """
        self._images.load()
        state = state_template(self._config)
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated),
            (state.params, state.teacher),
        )
        self._compiled = self._program.lower(*weights, self._images.first_batch()).compile()
        return self

    def measure(self, params: Params) -> Losses:
        """Returns the losses of these weights, on any devices or numpy."""
        if self._compiled is None:
            self.compile()
        compiled = self._compiled
        assert compiled is not None
        placed = jax.device_put((params, self._teacher), self._replicated)
        return Losses(*self._images.measure(lambda batch: compiled(*placed, batch)))

    def _losses(self, params: Params, teacher: Params, batch: BandBatch) -> Float[Array, ' batch']:
        loaded = normalise(batch.images)
        x0 = images_of(self._config, loaded)
        noise = fixed_noise(batch.noise_number, x0.shape[1:])
        diffusion, time = self._diffusion, middle_time(self._diffusion, batch.t)
        labels = batch.labels if self._config.model.num_classes else None
        low_res = low_res_of(self._config, loaded)

        def network(seen: Array, time: Array) -> Array:
            return self._model.predict(params, seen, time, labels, low_res=low_res)

        def unlabelled(seen: Array, time: Array) -> Array:
            return self._model.predict(teacher, seen, time, low_res=low_res)

        if diffusion.objective == 'consistency':
            last = float(decays(self._config)[-1])
            guidance = guidance_of(self._config, unlabelled, labels)
            return consistency_losses(
                diffusion, network, network, x0, noise, time, decay=last, guidance=guidance
            )
        xt = q_sample(diffusion, x0, time, noise)
        output = network(network_input(diffusion, xt, time), time)
        bits = self._config.data.bits
        return per_sample_loss(diffusion, output, x0, xt, time, noise, bits=bits)


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
            f'held-out loss has risen {self._rises} times in a row: the model begins to repeat its '
            'training images'
        )
