"""The variational bound on the likelihood of images, term by term, in bits per dimension.

−log p(x_0) ≤ L_T + Σ_t L_t (DDPM eq. 5): the prior's term, one term for each visited timestep, and
at t = 0 the decoder's. Each term is estimated with one draw of noise, as in guided-diffusion
(`calc_bpd_loop`, `image_nll`).

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; IDDPM, Nichol & Dhariwal 2021, arXiv 2102.09672.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float64, Int, Key

from jaxunet.config import Config
from jaxunet.data.images import from_pixels
from jaxunet.data.source import Source
from jaxunet.diffusion.objectives import prior_bound, variational_bound
from jaxunet.diffusion.process import (
    Images,
    make_diffusion,
    noise_from_x0,
    predict_x0_and_noise,
    q_sample,
    respace,
    split_output,
)
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError

PerTerm = Float64[np.ndarray, 'images timesteps']


@dataclass(frozen=True)
class Terms:
    """The bound of some images.

    Fields:
      prior: L_T of each image, in bits per dimension.
      bound: L_t of each image and visited timestep, in bits per dimension; the first timestep's is
        the decoder's term.
      x0_error: mean squared error of the predicted x_0, for each term of `bound`.
      noise_error: mean squared error of the noise that follows from this x_0.
    """

    prior: Float64[np.ndarray, ' images']
    bound: PerTerm
    x0_error: PerTerm
    noise_error: PerTerm

    @property
    def total(self) -> Float64[np.ndarray, ' images']:
        """The bound of each image, in bits per dimension."""
        return self.prior + self.bound.sum(axis=1)


class Likelihood:
    """Computes the bound for the model that `config` describes.

    The noise of image i at a timestep depends only on (seed, i, timestep).

    Args:
      config: the model, its diffusion process, backend and precision.
      timesteps: the timesteps to visit, ascending.
      variance: the model's variance: learned, fixed_small or fixed_large.
      clip: clip the predicted x_0 to [−1, 1].
      batch_size: images at a time, over all devices; rounded up to a multiple of the number of
        devices.
      devices: local devices that share each batch.

    Attributes:
      timesteps: the timesteps to visit, ascending.

    Raises:
      UserError: the bound is not defined for the model.
    """

    def __init__(
        self,
        config: Config,
        timesteps: Int[np.ndarray, ' timesteps'],
        *,
        variance: str,
        clip: bool,
        batch_size: int,
        devices: Sequence[jax.Device],
    ) -> None:
        check_has_bound(config)
        self._config = config
        self.timesteps = timesteps
        self._variance, self._clip = variance, clip
        self._diffusion = respace(make_diffusion(config.diffusion), timesteps)
        self._batch_size = -(-batch_size // len(devices)) * len(devices)
        mesh = Mesh(np.array(devices), ('data',))
        whole, split = PartitionSpec(), PartitionSpec('data')
        self._replicated = NamedSharding(mesh, whole)
        self._split = NamedSharding(mesh, split)
        # shard_map instead of automatic partitioning: XLA cannot partition hand-written kernels.
        self._step = jax.jit(
            jax.shard_map(
                self._make_step(),
                mesh=mesh,
                in_specs=(whole, split, split, split, whole),
                out_specs=split,
                check_vma=False,
            )
        )
        self._prior = jax.jit(lambda x0: prior_bound(self._diffusion, x0))

    def _make_step(self) -> Callable[..., tuple[Array, Array, Array]]:
        """Returns the function that computes one term for a batch, and both errors."""
        config, diffusion = self._config, self._diffusion
        model = build_unet(config, choose(config.backend, config.precision).ops)

        def step(
            params: Params,
            x0: Images,
            keys: Key[Array, ' batch'],
            labels: Int[Array, ' batch'],
            place: Int[Array, ''],
        ) -> tuple[Array, Array, Array]:
            t = jnp.full(x0.shape[:1], place)
            time = jnp.asarray(self.timesteps, jnp.int32)[t]
            noise = jax.vmap(
                lambda key, t: jax.random.normal(jax.random.fold_in(key, t), x0.shape[1:])
            )(keys, time)
            xt = q_sample(diffusion, x0, t, noise)
            output = model.predict(params, xt, time, labels if config.model.num_classes else None)
            bound = variational_bound(
                diffusion, output, x0, xt, t, variance=self._variance, clip=self._clip
            )
            prediction, _ = split_output(diffusion, output, x0.shape[-1])
            predicted, _ = predict_x0_and_noise(diffusion, prediction, xt, t)
            predicted = jnp.clip(predicted, -1, 1) if self._clip else predicted
            errors = (predicted - x0, noise_from_x0(diffusion, predicted, xt, t) - noise)
            x0_error, noise_error = (jnp.mean(jnp.square(e), axis=(1, 2, 3)) for e in errors)
            return bound, x0_error, noise_error

        return step

    def put(self, params: Params) -> Params:
        """Returns the parameters, replicated on the devices."""
        return jax.device_put(params, self._replicated)

    def __call__(
        self,
        params: Params,
        source: Source,
        rows: Int[np.ndarray, ' images'],
        *,
        seed: int,
        progress: Callable[[int], object] = lambda _: None,
    ) -> Terms:
        """Returns the terms of some images of a source.

        Args:
          params: from `put`.
          rows: indices of the images in the source.
          seed: seed of the noise.
          progress: called after each batch with its number of images.
        """
        parts = []
        for first in range(0, len(rows), self._batch_size):
            batch = rows[first : first + self._batch_size]
            padded = np.pad(batch, (0, self._batch_size - len(batch)), mode='edge')
            terms = self._batch(params, source, padded, seed)
            parts.append([array[: len(batch)] for array in terms])
            progress(len(batch))
        return Terms(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _batch(
        self, params: Params, source: Source, rows: Int[np.ndarray, ' images'], seed: int
    ) -> list[np.ndarray]:
        """Returns the fields of `Terms` for one batch."""
        pixels = from_pixels(source.load(rows))
        root = jax.random.key(np.uint32(seed), impl='threefry2x32')
        keys = jax.vmap(lambda row: jax.random.fold_in(root, row))(jnp.asarray(rows, jnp.uint32))
        x0, keys, labels = jax.device_put((pixels, keys, source.labels[rows]), self._split)
        terms = [
            self._step(params, x0, keys, labels, jax.device_put(np.int32(i), self._replicated))
            for i in range(len(self.timesteps))
        ]
        columns = [
            np.stack([np.asarray(x, np.float64) for x in column], axis=1)
            for column in zip(*terms, strict=True)
        ]
        return [np.asarray(self._prior(x0), np.float64), *columns]


def check_has_bound(config: Config) -> None:
    """Checks that the variational bound is defined for a model.

    Raises:
      UserError: the model is for super-resolution, has continuous noise levels, or draws 16 bits.
    """
    objective = config.diffusion.objective
    if config.data.bits != 8:
        raise UserError(
            f'nll: counts the bits of pixels of 8 bits, found data.bits={config.data.bits}'
        )
    if config.model.low_res_size:
        raise UserError(
            'nll: a super-resolution network (model.low_res_size) models images given '
            'low-resolution pictures, not images alone; give a model that draws from noise alone'
        )
    if config.diffusion.continuous:
        raise UserError(
            f'nll: diffusion.objective={objective} has continuous noise levels, not the steps '
            'x_t -> x_(t-1) whose Gaussians the bound compares; it needs a model with the '
            'objective epsilon, x0 or v'
        )
