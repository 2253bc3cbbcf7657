"""Samplers: pure functions of a denoiser, in float32.

A `Sampler` holds the constants of one sampling run, a row for each evaluation of the network; `jaxunet.sampling.solvers` computes them.
`sample` goes through all of them in one scan, `run` through any stretch, so that one compiled function serves a progress bar.
The noise of sample i depends only on its key, that is on (seed, i), and on the evaluation: batch size and device count do not matter.

Sources: those of `jaxunet.sampling.solvers`; learned variance, Nichol & Dhariwal 2021, arXiv 2102.09672; classifier-free guidance, Ho & Salimans
2022, arXiv 2207.12598.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Key

from jaxunet.diffusion.process import (
    Diffusion,
    Images,
    Output,
    Steps,
    learned_log_variance,
    noise_from_x0,
    predict_x0_and_noise,
    respace,
    split_output,
)
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.sampling.solvers import (
    Coefficients,
    ancestral,
    ddim,
    dpm_solver_2m,
    heun,
    respaced_timesteps,
    timestep_subset,
)

Denoiser = Callable[[Images, Steps], Output]  # (x_t, t) -> the network's output
LabelledDenoiser = Callable[
    [Images, Steps, Int[Array, ' batch']], Output
]  # (x_t, t, labels) -> output; label −1 = dropped
Keys = Key[Array, ' batch']

SAMPLERS = ('ddpm', 'ddim', 'dpmpp_2m', 'heun')
VARIANCES = ('fixed_small', 'fixed_large', 'learned')
DEFAULT_SKIP_SCHEDULES = {
    'ddpm': 'linear',
    'ddim': 'linear',
    'dpmpp_2m': 'log_snr',
    'heun': 'karras',
}
OWNERS = {
    'eta': 'ddim',
    'variance': 'ddpm',
    'churn': 'heun',
    'churn_range': 'heun',
}  # options that one sampler has
EVERY_LEVEL = (0.0, math.inf)


@dataclass(frozen=True)
class SamplerConfig:
    """How to sample. None means the default of the chosen sampler; an option that the sampler does not have is an error."""

    name: str = 'ddpm'  # ddpm: ancestral sampling | ddim | dpmpp_2m: DPM-Solver++(2M) | heun: EDM's, 2 · steps − 1 evaluations
    steps: int | None = None  # None: every step the model was trained with
    eta: float | None = (
        None  # ddim only, in [0, 1]: 0 is deterministic (default), 1 adds as much noise as ddpm with fixed_small
    )
    # Which steps are kept when some are skipped, by a uniform stride of t (linear), √t, log σ or σ^(1/7); by default linear for ddpm and
    # ddim, log_snr for dpmpp_2m, karras for heun.
    skip_schedule: str | None = None  # linear | quadratic | log_snr | karras
    variance: str | None = (
        None  # ddpm only: fixed_small | fixed_large | learned; default learned if the model has it, else fixed_small
    )
    guidance_scale: float = (
        1.0  # classifier-free guidance: 0 unconditional, 1 conditional, more exaggerates the class
    )
    clip: bool = True  # clip the predicted x_0 to [−1, 1]
    churn: float | None = None  # heun only: EDM's S_churn, 0 or more; 0 is deterministic (default)
    churn_range: tuple[float, float] | None = (
        None  # heun only: EDM's S_tmin and S_tmax, the noise levels σ with churn; default all
    )
    respacing: str | None = (
        None  # guided-diffusion's timestep_respacing, such as '250', '10,20,30' or 'ddim50', for steps, skip_schedule
    )


@dataclass(frozen=True, eq=False)
class Sampler:
    """The constants of one sampling run. Made by `make_sampler`."""

    config: SamplerConfig  # what has a default is filled in; None is left to what this sampler does not have
    diffusion: Diffusion  # of the model
    coefficients: Coefficients  # one row an evaluation of the network
    memory: Literal['', 'x0', 'noise']  # what an evaluation leaves for the next one
    spaced: (
        Diffusion | None
    )  # the process that visits only the steps taken, if its learned variance is wanted

    @property
    def timesteps(self) -> Int32[np.ndarray, ' evaluations']:
        """t of each evaluation of the network, the noisiest first."""
        return self.coefficients.timesteps

    @property
    def evaluations(self) -> int:
        """How often the network runs for a sample (a guided one runs on a doubled batch)."""
        return len(self.timesteps)


class State(NamedTuple):
    """A sample under way."""

    x: Images
    memory: Images | None = None  # None if the sampler needs none


def make_sampler(config: SamplerConfig, diffusion: Diffusion, *, num_classes: int = 0) -> Sampler:
    """Checks the options against the model and computes the constants.

    Args:
      num_classes: of the model; 0 if it is unconditional.

    Raises:
      UserError: a value that does not exist, or an option that this sampler or model cannot follow.
    """
    config = _resolve(config, diffusion, num_classes)
    alphas = diffusion.alphas_cumprod
    if config.respacing is not None:
        timesteps = respaced_timesteps(alphas, config.respacing)
    else:
        assert config.steps is not None
        assert config.skip_schedule is not None
        timesteps = timestep_subset(alphas, config.steps, config.skip_schedule)
    memory: Literal['', 'x0', 'noise'] = ''
    if config.name == 'ddpm':
        coefficients = ancestral(alphas, timesteps, large=config.variance == 'fixed_large')
    elif config.name == 'ddim':
        assert config.eta is not None
        coefficients = ddim(alphas, timesteps, eta=config.eta)
    elif config.name == 'dpmpp_2m':
        coefficients, memory = dpm_solver_2m(alphas, timesteps), 'x0'
    else:
        assert config.churn is not None
        coefficients = heun(
            alphas, timesteps, churn=config.churn, churn_range=config.churn_range or EVERY_LEVEL
        )
        memory = 'noise'
    spaced = (
        respace(diffusion, timesteps)
        if config.name == 'ddpm' and config.variance == 'learned'
        else None
    )
    return Sampler(config, diffusion, coefficients, memory, spaced)


def _resolve(config: SamplerConfig, diffusion: Diffusion, num_classes: int) -> SamplerConfig:
    name, eta, variance, scale, churn = (
        config.name,
        config.eta,
        config.variance,
        config.guidance_scale,
        config.churn,
    )
    if name not in SAMPLERS:
        raise UserError(
            f'sampler: expected one of {", ".join(SAMPLERS)}, found {name!r}{near_misses(name, SAMPLERS)}'
        )
    for option, owner in OWNERS.items():
        value = getattr(config, option)
        if value is not None and name != owner:
            raise UserError(
                f'{option}: only sampler={owner} has it, found {option}={value} with sampler={name}; leave {option} out, or use '
                f'sampler={owner}'
            )
    if eta is not None and not 0 <= eta <= 1:
        raise UserError(
            f'eta: expected 0 (deterministic) to 1 (as much noise as ddpm), found {eta}'
        )
    if variance is not None and variance not in VARIANCES:
        raise UserError(
            f'variance: expected one of {", ".join(VARIANCES)}, found {variance!r}{near_misses(variance, VARIANCES)}'
        )
    if variance == 'learned' and not diffusion.learn_sigma:
        raise UserError(
            'variance: learned needs a model with diffusion.learn_sigma=True, this one has not; use fixed_small or fixed_large'
        )
    if churn is not None and not (math.isfinite(churn) and churn >= 0):
        raise UserError(f'churn: expected 0 (deterministic) or more, found {churn}')
    if config.churn_range is not None:
        low, high = config.churn_range
        if not 0 <= low < high:
            raise UserError(
                f'churn_range: expected two noise levels, 0 <= lowest < highest, found {low}, {high}'
            )
        if not churn:
            raise UserError(
                f'churn_range: {low}, {high} has no meaning without churn; set churn to more than 0, or leave churn_range out'
            )
    if not (math.isfinite(scale) and scale >= 0):
        raise UserError(f'guidance_scale: expected 0 or more, found {scale}')
    if scale != 1 and num_classes == 0:
        raise UserError(
            f'guidance_scale: {scale} needs a class-conditional model, this one has model.num_classes=0; leave it at 1'
        )
    for option in ('steps', 'skip_schedule'):
        if config.respacing is not None and getattr(config, option) is not None:
            raise UserError(
                f'respacing: {config.respacing!r} says which steps are taken, found {option}={getattr(config, option)} beside it; '
                f'leave one of them out'
            )
    by_count = config.respacing is None
    return dataclasses.replace(
        config,
        steps=(config.steps if config.steps is not None else diffusion.steps) if by_count else None,
        skip_schedule=(config.skip_schedule or DEFAULT_SKIP_SCHEDULES[name]) if by_count else None,
        eta=(eta or 0.0) if name == 'ddim' else None,
        variance=(variance or ('learned' if diffusion.learn_sigma else 'fixed_small'))
        if name == 'ddpm'
        else None,
        churn=(churn or 0.0) if name == 'heun' else None,
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
        output = denoise(
            jnp.repeat(x, 2, axis=0),
            jnp.repeat(t, 2),
            jnp.stack([labels, dropped], axis=1).reshape(-1),
        )
        output = output.astype(jnp.float32).reshape(len(x), 2, *output.shape[1:])
        conditional, unconditional = output[:, 0], output[:, 1]
        channels = x.shape[-1]
        mixed = unconditional[..., :channels] + scale * (
            conditional[..., :channels] - unconditional[..., :channels]
        )
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
    return jax.vmap(
        lambda key: jax.random.normal(jax.random.fold_in(key, draw), image_shape, jnp.float32)
    )(keys)


def initial_state(keys: Keys, image_shape: tuple[int, int, int], sampler: Sampler) -> State:
    """The state before the first evaluation: `initial_noise`, and an empty memory."""
    x = initial_noise(keys, image_shape)
    return State(x, jnp.zeros_like(x) if sampler.memory else None)


def _step(
    denoise: Denoiser, state: State, keys: Keys, sampler: Sampler, k: Int[Array, '']
) -> State:
    """Evaluation k and what the sampler makes of it (`jaxunet.sampling.solvers`)."""
    config, diffusion, table = sampler.config, sampler.diffusion, sampler.coefficients
    x = state.x
    t = jnp.full(x.shape[:1], jnp.asarray(table.timesteps)[k], jnp.int32)
    output = denoise(x, t)
    prediction, values = split_output(diffusion, output, x.shape[-1])
    x0, noise = predict_x0_and_noise(diffusion, prediction, x, t)
    if config.clip:
        x0 = jnp.clip(x0, -1, 1)
        noise = noise_from_x0(diffusion, x0, x, t)

    def times(factors: np.ndarray, images: Images | None) -> list[Images]:
        """Nothing where all factors are 0, which is known at compile time."""
        return (
            [jnp.asarray(factors.astype(np.float32))[k] * images]
            if images is not None and factors.any()
            else []
        )

    terms = [
        *times(table.x0, x0),
        *times(table.state, x),
        *times(table.noise, noise),
        *times(table.memory, state.memory),
    ]
    if sampler.spaced is not None:
        assert values is not None
        index = sampler.evaluations - 1 - k
        log_variance = learned_log_variance(sampler.spaced, values, jnp.full_like(t, index))
        terms += [
            jnp.where(index == 0, 0, jnp.exp(0.5 * log_variance)) * _noise(keys, k + 1, x.shape[1:])
        ]
    elif table.draw.any():
        terms += times(table.draw, _noise(keys, k + 1, x.shape[1:]))
    return State(
        functools.reduce(operator.add, terms), {'': None, 'x0': x0, 'noise': noise}[sampler.memory]
    )


def run(
    denoise: Denoiser,
    state: State,
    keys: Keys,
    sampler: Sampler,
    *,
    start: int | Int[Array, ''] = 0,
    stop: int | Int[Array, ''] | None = None,
) -> State:
    """Evaluations start..stop−1 (default: all) from the state before them, as one loop whose bounds may be traced.

    Evaluations 0..m−1 and then m..E−1 give what 0..E−1 give; all of them from `initial_state` give what `sample` gives.

    Args:
      state: float32 images of shape (batch, height, width, channels), at the start `initial_state(keys, image_shape, sampler)`.
      keys: one typed key for each sample, the same for every stretch.
    """
    stop = sampler.evaluations if stop is None else stop
    if (
        isinstance(start, int)
        and isinstance(stop, int)
        and not 0 <= start <= stop <= sampler.evaluations
    ):
        raise ValueError(f'evaluations {start}..{stop} are not within 0..{sampler.evaluations}')
    bounds = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)
    return jax.lax.fori_loop(
        *bounds, lambda k, state: _step(denoise, state, keys, sampler, k), state
    )


def sample(
    denoise: Denoiser, keys: Keys, image_shape: tuple[int, int, int], sampler: Sampler
) -> Images:
    """Images of shape (batch, *image_shape) in about [−1, 1], from noise, as one scan over all evaluations."""

    def body(state: State, k: Int[Array, '']) -> tuple[State, None]:
        return _step(denoise, state, keys, sampler, k), None

    initial = initial_state(keys, image_shape, sampler)
    return jax.lax.scan(body, initial, jnp.arange(sampler.evaluations, dtype=jnp.int32))[0].x
