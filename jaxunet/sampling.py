"""Samplers: pure functions of a denoiser, in float32.

A `Sampler` holds the constants of one sampling run. Step k = 0..S−1 takes the sample from its k-th noisiest time step to the next one;
`sample` runs all of them in one scan, `run` any stretch of them, so that one compiled function serves a progress bar.
The noise of sample i depends only on its key, that is on (seed, i), and on the step: batch size and device count do not matter.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; DDIM, Song et al. 2021, arXiv 2010.02502; respacing and learned variance, Nichol & Dhariwal
2021, arXiv 2102.09672; classifier-free guidance, Ho & Salimans 2022, arXiv 2207.12598.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32, Key

from jaxunet.diffusion import (
    Diffusion,
    Images,
    Output,
    Steps,
    Table,
    learned_log_variance,
    noise_from_x0,
    predict_x0_and_noise,
    respace,
    split_output,
)
from jaxunet.errors import UserError, near_misses

Denoiser = Callable[[Images, Steps], Output]  # (x_t, t) -> the network's output
LabelledDenoiser = Callable[[Images, Steps, Int[Array, ' batch']], Output]  # (x_t, t, labels) -> output; label −1 = dropped
Keys = Key[Array, ' batch']

SAMPLERS = ('ddpm', 'ddim')
SKIP_SCHEDULES = ('linear', 'quadratic')
VARIANCES = ('fixed_small', 'fixed_large', 'learned')


@dataclass(frozen=True)
class SamplerConfig:
    """How to sample. None means the default of the chosen sampler; an option that the sampler does not have is an error."""

    name: str = 'ddpm'  # ddpm: ancestral sampling | ddim
    steps: int | None = None  # None: every step the model was trained with
    eta: float | None = None  # ddim only, in [0, 1]: 0 is deterministic (default), 1 adds as much noise as ddpm with fixed_small
    skip_schedule: str = 'linear'  # which steps are kept when some are skipped: linear (uniform stride) | quadratic (more at low noise)
    variance: str | None = None  # ddpm only: fixed_small | fixed_large | learned; default learned if the model has it, else fixed_small
    guidance_scale: float = 1.0  # classifier-free guidance: 0 unconditional, 1 conditional, more exaggerates the class
    clip: bool = True  # clip the predicted x_0 to [−1, 1]


@dataclass(frozen=True, eq=False)
class Sampler:
    """The constants of one sampling run: a step is x ← x0_factor · x_0 + direction_factor · d + noise_factor · z, z ~ N(0, 1).

    d is x_t for ddpm and ε for ddim. Tables have shape (S,), least noisy step first. Made by `make_sampler`.
    """

    config: SamplerConfig  # without None
    diffusion: Diffusion  # respaced to the S steps
    timesteps: Int32[np.ndarray, ' steps']  # ascending, as the network knows them
    x0_factor: Table
    direction_factor: Table
    noise_factor: Table  # not used by a learned variance

    @property
    def steps(self) -> int:
        """S."""
        return len(self.timesteps)


def timestep_subset(total: int, steps: int, skip_schedule: str) -> Int32[np.ndarray, ' steps']:
    """`steps` different time steps of 0..total−1, ascending, the last one total − 1 (and the first one 0 if there are two or more).

    `linear` has a uniform stride (IDDPM section 4), `quadratic` a uniform stride of √t, as far as different integers allow.

    Raises:
      UserError: `steps` outside 1..total, or an unknown schedule.
    """
    if skip_schedule not in SKIP_SCHEDULES:
        allowed, hint = ', '.join(SKIP_SCHEDULES), near_misses(skip_schedule, SKIP_SCHEDULES)
        raise UserError(f'skip_schedule: expected one of {allowed}, found {skip_schedule!r}{hint}')
    if not 1 <= steps <= total:
        raise UserError(f'steps: expected 1 to {total}, the number of steps that the model was trained with, found {steps}')
    if steps == 1:
        return np.array([total - 1], np.int32)
    index = np.arange(steps, dtype=np.int64)
    power = 1 if skip_schedule == 'linear' else 2
    # Halves round to even, as in guided-diffusion, whose subsets the linear ones are.
    wanted = np.rint(index**power * (total - 1) / (steps - 1) ** power).astype(np.int64)
    # The nearest strictly increasing sequence from above, then pushed down as far as the end requires.
    increasing = np.maximum.accumulate(wanted - index) + index
    return np.minimum(increasing, total - steps + index).astype(np.int32)


def make_sampler(config: SamplerConfig, diffusion: Diffusion, *, num_classes: int = 0) -> Sampler:
    """Checks the options against the model and computes the constants.

    Args:
      num_classes: of the model; 0 if it is unconditional.

    Raises:
      UserError: a value that does not exist, or an option that this sampler or model cannot follow.
    """
    config = _resolve(config, diffusion, num_classes)
    assert config.steps is not None
    assert config.eta is not None
    timesteps = timestep_subset(diffusion.steps, config.steps, config.skip_schedule)
    timesteps.flags.writeable = False
    spaced = respace(diffusion, timesteps)
    alphas, betas = spaced.alphas_cumprod, spaced.betas
    previous = np.append(1.0, alphas[:-1])
    # β̃, at index 0 exactly 0: with both samplers the last step adds no noise, whatever the variance.
    small = betas * (1 - previous) / (1 - alphas)
    if config.name == 'ddpm':
        x0_factor, direction_factor = spaced.posterior_x0, spaced.posterior_xt  # DDPM eq. 7
        variance = np.where(small > 0, betas, 0) if config.variance == 'fixed_large' else small  # DDPM section 3.2
    else:
        variance = config.eta**2 * small  # DDIM eq. 16
        x0_factor = _table(np.sqrt(previous))  # DDIM eq. 12
        direction_factor = _table(np.sqrt(np.maximum(1 - previous - variance, 0)))
    return Sampler(config, spaced, timesteps, x0_factor, direction_factor, _table(np.sqrt(variance)))


def _table(values: np.ndarray) -> Table:
    values = values.astype(np.float32)
    values.flags.writeable = False
    return values


def _resolve(config: SamplerConfig, diffusion: Diffusion, num_classes: int) -> SamplerConfig:
    name, eta, variance, scale = config.name, config.eta, config.variance, config.guidance_scale
    if name not in SAMPLERS:
        raise UserError(f'sampler: expected one of {", ".join(SAMPLERS)}, found {name!r}{near_misses(name, SAMPLERS)}')
    if name == 'ddpm' and eta is not None:
        raise UserError(f'eta: only sampler=ddim has it, found eta={eta} with sampler=ddpm; leave eta out, or use sampler=ddim')
    if name == 'ddim' and variance is not None:
        raise UserError(
            f'variance: only sampler=ddpm has it, found variance={variance!r} with sampler=ddim, whose noise eta sets; '
            'leave variance out, or use sampler=ddpm'
        )
    if eta is not None and not 0 <= eta <= 1:
        raise UserError(f'eta: expected 0 (deterministic) to 1 (as much noise as ddpm), found {eta}')
    if variance is not None and variance not in VARIANCES:
        raise UserError(f'variance: expected one of {", ".join(VARIANCES)}, found {variance!r}{near_misses(variance, VARIANCES)}')
    if variance == 'learned' and not diffusion.learn_sigma:
        raise UserError('variance: learned needs a model with diffusion.learn_sigma=True, this one has not; use fixed_small or fixed_large')
    if not (math.isfinite(scale) and scale >= 0):
        raise UserError(f'guidance_scale: expected 0 or more, found {scale}')
    if scale != 1 and num_classes == 0:
        raise UserError(f'guidance_scale: {scale} needs a class-conditional model, this one has model.num_classes=0; leave it at 1')
    return SamplerConfig(
        name=name,
        steps=diffusion.steps if config.steps is None else config.steps,
        eta=0.0 if eta is None else eta,
        skip_schedule=config.skip_schedule,
        variance=variance or ('learned' if diffusion.learn_sigma else 'fixed_small'),
        guidance_scale=scale,
        clip=config.clip,
    )


def guided(denoise: LabelledDenoiser, labels: Int[Array, ' batch'], scale: float) -> Denoiser:
    """Classifier-free guidance: uncond + scale · (cond − uncond) on the prediction (Ho & Salimans eq. 6, with scale = w + 1).

    Conditional and unconditional halves go through the network as one doubled batch; scales 1 and 0 need only one of them.
    x_0 and v are affine in ε at given x_t, so guiding any of the three predictions guides ε. The channels of a learned variance
    are those of the conditional half.

    Args:
      labels: int32 of shape (batch,), −1 where the sample is unconditional.
    """
    if scale == 1:
        return lambda x, t: denoise(x, t, labels)
    dropped = jnp.full_like(labels, -1)
    if scale == 0:
        return lambda x, t: denoise(x, t, dropped)

    def denoise_both(x: Images, t: Steps) -> Output:
        # Both halves of a sample are neighbours in the doubled batch, so that a batch spread over devices stays where it is.
        output = denoise(jnp.repeat(x, 2, axis=0), jnp.repeat(t, 2), jnp.stack([labels, dropped], axis=1).reshape(-1))
        output = output.astype(jnp.float32).reshape(len(x), 2, *output.shape[1:])
        conditional, unconditional = output[:, 0], output[:, 1]
        channels = x.shape[-1]
        mixed = unconditional[..., :channels] + scale * (conditional[..., :channels] - unconditional[..., :channels])
        return jnp.concatenate([mixed, conditional[..., channels:]], axis=-1)

    return denoise_both


def sample_keys(seed: int, indices: Sequence[int] | Int[np.ndarray, ' batch']) -> Keys:
    """One key for each sample, from the seed and the sample's number.

    Raises:
      UserError: the seed does not fit in 32 bits, where two seeds could give the same images.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f'seed: expected 0 to {2**32 - 1}, found {seed}')
    # threefry by name: other generators may draw differently for another batch size.
    root = jax.random.key(np.uint32(seed), impl='threefry2x32')
    return jax.vmap(lambda index: jax.random.fold_in(root, index))(jnp.asarray(indices, jnp.uint32))


def initial_noise(keys: Keys, image_shape: tuple[int, int, int]) -> Images:
    """x_T ~ N(0, 1) of shape (batch, height, width, channels)."""
    return _noise(keys, 0, image_shape)


def _noise(keys: Keys, draw: int | Int[Array, ''], image_shape: tuple[int, ...]) -> Images:
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, draw), image_shape, jnp.float32))(keys)


def _step(denoise: Denoiser, x: Images, keys: Keys, sampler: Sampler, k: Int[Array, '']) -> Images:
    """Step k of the sampler: from x_t to x_{t−1} of the respaced process."""
    config, diffusion = sampler.config, sampler.diffusion
    index = sampler.steps - 1 - k
    i = jnp.full(x.shape[:1], index, jnp.int32)
    output = denoise(x, jnp.asarray(sampler.timesteps)[i])
    prediction, values = split_output(diffusion, output, x.shape[-1])
    x0, noise = predict_x0_and_noise(diffusion, prediction, x, i)
    if config.clip:
        x0 = jnp.clip(x0, -1, 1)
        noise = noise_from_x0(diffusion, x0, x, i)

    def at(table: np.ndarray) -> Float32[Array, '']:
        return jnp.asarray(table)[index]

    mean = at(sampler.x0_factor) * x0 + at(sampler.direction_factor) * (x if config.name == 'ddpm' else noise)
    if config.name == 'ddim' and config.eta == 0:
        return mean
    draw = _noise(keys, k + 1, x.shape[1:])
    if config.name == 'ddpm' and config.variance == 'learned':
        assert values is not None
        std = jnp.where(index == 0, 0, jnp.exp(0.5 * learned_log_variance(diffusion, values, i)))
        return mean + std * draw
    return mean + at(sampler.noise_factor) * draw


def run(
    denoise: Denoiser,
    x: Images,
    keys: Keys,
    sampler: Sampler,
    *,
    start: int | Int[Array, ''] = 0,
    stop: int | Int[Array, ''] | None = None,
) -> Images:
    """Steps start..stop−1 (default: all) from the state before them, as one loop whose bounds may be traced.

    Steps 0..m−1 and then m..S−1 give what 0..S−1 give; all of them from `initial_noise(keys, shape)` give what `sample` gives.

    Args:
      x: float32 state of shape (batch, height, width, channels), at the start `initial_noise(keys, image_shape)`.
      keys: one typed key for each sample, the same for every stretch.
    """
    stop = sampler.steps if stop is None else stop
    if isinstance(start, int) and isinstance(stop, int) and not 0 <= start <= stop <= sampler.steps:
        raise ValueError(f'steps {start}..{stop} are not within 0..{sampler.steps}')
    bounds = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)
    return jax.lax.fori_loop(*bounds, lambda k, x: _step(denoise, x, keys, sampler, k), x)


def sample(denoise: Denoiser, keys: Keys, image_shape: tuple[int, int, int], sampler: Sampler) -> Images:
    """Images of shape (batch, *image_shape) in about [−1, 1], from noise, as one scan over all steps."""

    def body(x: Images, k: Int[Array, '']) -> tuple[Images, None]:
        return _step(denoise, x, keys, sampler, k), None

    return jax.lax.scan(body, initial_noise(keys, image_shape), jnp.arange(sampler.steps, dtype=jnp.int32))[0]
