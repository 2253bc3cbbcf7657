"""Samplers: pure functions of a denoiser, in float32.

A `Sampler` holds the constants of one sampling run, one row per evaluation of the network;
`jaxunet.sampling.solvers` computes them. `run` runs any range of them, so that one compiled
function can report progress. The noise of sample i depends only on its key, which is a function of
(seed, i), and on the evaluation's number, not on the batch size or the number of devices.

Sources: those of `jaxunet.sampling.solvers`; learned variance, Nichol & Dhariwal 2021, arXiv
2102.09672.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Key, Real

from jaxunet.config.samplers import FIRST_LEVEL, usual_levels
from jaxunet.diffusion.levels import spaced_levels, time_of_sigma
from jaxunet.diffusion.process import Diffusion, Images, Times, learned_log_variance, respace
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.classifier_guidance import Gradient, fixed_variances
from jaxunet.sampling.evaluation import Denoiser, Evaluation, Memory, evaluate
from jaxunet.sampling.guidance import guided_range
from jaxunet.sampling.options import SamplerConfig, resolve_options
from jaxunet.sampling.solvers import (
    FEW_STEPS,
    Alphas,
    Coefficients,
    Subset,
    ancestral,
    churn_factor,
    churned_start,
    consistency,
    ddim,
    dpm_solver_2m,
    heun,
    heun_in_t,
    noise_to_signal,
    unipc,
)
from jaxunet.sampling.subsets import check_timesteps, respaced_timesteps, timestep_subset

Keys = Key[Array, ' batch']
After = Callable[[Images, Int[Array, '']], Images]  # (samples, evaluation just made) -> samples

EVERY_LEVEL = (0.0, math.inf)  # churn_range without limits


@dataclass(frozen=True, eq=False)
class Sampler:
    """The constants of one sampling run; made by `make_sampler`.

    Fields:
      config: the options with defaults filled in; None for options that this sampler does not have.
      diffusion: the model's process.
      coefficients: one row per evaluation of the network.
      times: what the network's time embedding reads at each evaluation.
      initial: standard deviation of the noise that sampling starts from.
      memory: result that an evaluation passes to the next one; '' = none, velocity = ε − x_0.
      guided: evaluations within `guidance_range`; None = all.
      spaced: the process on the visited timesteps, for its learned variance; None if not used.
    """

    config: SamplerConfig
    diffusion: Diffusion
    coefficients: Coefficients
    times: Real[np.ndarray, ' evaluations']
    initial: float
    memory: Memory
    spaced: Diffusion | None
    guided: Bool[np.ndarray, ' evaluations'] | None = None

    @property
    def timesteps(self) -> Int32[np.ndarray, ' evaluations']:
        """Timestep of each evaluation of the network, the noisiest first.

        For an objective without timesteps, the number of its noise level among those visited.
        """
        return self.coefficients.timesteps

    @property
    def evaluations(self) -> int:
        """Number of evaluations of the network per sample; guidance doubles their batch."""
        return len(self.times)


class State(NamedTuple):
    """The samples between two evaluations."""

    x: Images
    # M and M' of `jaxunet.sampling.solvers`; None if the sampler has none.
    memory: Images | None = None
    older: Images | None = None


def make_sampler(
    config: SamplerConfig,
    diffusion: Diffusion,
    *,
    num_classes: int = 0,
    weaker: bool = False,
    side: int = 0,
) -> Sampler:
    """Checks the options against the model and computes the constants.

    Args:
      config: the options.
      diffusion: the model's process.
      num_classes: number of classes of the model; 0 = unconditional.
      weaker: a weaker model guides the samples.
      side: pixels of the image's shorter side.

    Raises:
      UserError: an invalid value, or an option that this sampler or model does not support.
    """
    config = resolve_options(config, diffusion, num_classes, weaker=weaker)
    if config.name == 'consistency' and config.levels is None:
        assert config.steps is not None
        config = dataclasses.replace(config, levels=usual_levels(config.steps, side))
    make = _continuous_sampler if diffusion.continuous else _timestep_sampler
    sampler, sigmas = make(config, diffusion)
    if config.guidance_range is None:
        return sampler
    return dataclasses.replace(sampler, guided=guided_range(config.guidance_range, sigmas))


def _timestep_sampler(config: SamplerConfig, diffusion: Diffusion) -> tuple[Sampler, Alphas]:
    """Returns the sampler of an objective with timesteps, and σ of its evaluations."""
    alphas = diffusion.alphas_cumprod
    if config.timesteps is not None:
        timesteps = check_timesteps(alphas, config.timesteps)
    elif config.respacing is not None:
        timesteps = respaced_timesteps(alphas, config.respacing)
    else:
        assert config.steps is not None
        assert config.skip_schedule is not None
        timesteps = timestep_subset(alphas, config.steps, config.skip_schedule)
    coefficients, memory = _solve(config, alphas, timesteps)
    spaced = (
        respace(diffusion, timesteps)
        if config.name == 'ddpm' and config.variance == 'learned'
        else None
    )
    visited, noise = coefficients.timesteps, config.churn_noise or 1.0
    initial = churned_start(alphas[timesteps[-1]], alphas[visited[0]], noise)
    sampler = Sampler(config, diffusion, coefficients, visited, initial, memory, spaced)
    return sampler, noise_to_signal(alphas[visited])


def _continuous_sampler(config: SamplerConfig, diffusion: Diffusion) -> tuple[Sampler, Alphas]:
    """Returns the sampler of an objective without timesteps, and σ of its evaluations.

    It visits levels of its own.
    """
    assert config.steps is not None
    if config.name == 'consistency':
        assert config.levels is not None
        sigmas = np.array([*reversed(config.levels), FIRST_LEVEL])
    else:
        assert config.skip_schedule is not None
        sigmas = spaced_levels(diffusion.config, config.steps, config.skip_schedule)
    table = sigmas
    if config.churn:
        # The levels to which churn raises the noise, for `heun` to find.
        table = np.union1d(sigmas, sigmas * (1 + churn_factor(config.churn, config.steps)))
    alphas = 1 / (1 + table**2)
    visited = np.searchsorted(table, sigmas).astype(np.int32)
    memory: Memory = 'velocity'
    if config.name == 'heun' and diffusion.prediction == 'flow' and not config.churn:
        coefficients = heun_in_t(alphas, visited)
    else:
        coefficients, memory = _solve(config, alphas, visited)
    times = time_of_sigma(diffusion.config, table)[coefficients.timesteps]
    first = alphas[coefficients.timesteps[0]]
    initial = churned_start(alphas[visited[-1]], first, config.churn_noise or 1.0)
    start = initial * float(np.sqrt(1 - first))
    sampler = Sampler(config, diffusion, coefficients, times, start, memory, None)
    return sampler, table[coefficients.timesteps]


def _solve(config: SamplerConfig, alphas: Alphas, timesteps: Subset) -> tuple[Coefficients, Memory]:
    """Returns the coefficients of the chosen solver, and the result its evaluations pass on."""
    memory: Memory = ''
    if config.name == 'consistency':
        coefficients = consistency(alphas, timesteps)
    elif config.name == 'ddpm':
        coefficients = ancestral(alphas, timesteps, large=config.variance == 'fixed_large')
    elif config.name == 'ddim':
        assert config.eta is not None
        coefficients = ddim(alphas, timesteps, eta=config.eta)
    elif config.name == 'dpmpp_2m':
        few = FEW_STEPS if config.lower_order_below is None else config.lower_order_below
        eta = config.eta or 0.0
        coefficients = dpm_solver_2m(alphas, timesteps, eta=eta, lower_order_below=few)
        memory = 'x0'
    elif config.name == 'unipc':
        coefficients, memory = unipc(alphas, timesteps), 'x0'
    else:
        assert config.churn is not None
        coefficients = heun(
            alphas,
            timesteps,
            churn=config.churn,
            churn_range=config.churn_range or EVERY_LEVEL,
            churn_noise=config.churn_noise or 1.0,
        )
        memory = 'noise'
    return coefficients, memory


def sample_keys(seed: int, indices: Sequence[int] | Int[np.ndarray, ' batch']) -> Keys:
    """Returns one key per sample, from the seed and the sample's index.

    Raises:
      UserError: the seed does not fit in 32 bits; truncated, two seeds would give the same images.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f'seed: expected 0 to {2**32 - 1}, found {seed}')
    # Explicitly threefry: other generators may draw other numbers for another batch size.
    root = jax.random.key(np.uint32(seed), impl='threefry2x32')
    return jax.vmap(lambda index: jax.random.fold_in(root, index))(jnp.asarray(indices, jnp.uint32))


def initial_noise(keys: Keys, image_shape: tuple[int, int, int]) -> Images:
    """Returns x_T ~ N(0, 1) of shape (batch, height, width, channels)."""
    return _noise(keys, 0, image_shape)


def _noise(keys: Keys, draw: int | Int[Array, ''], image_shape: tuple[int, ...]) -> Images:
    return jax.vmap(
        lambda key: jax.random.normal(jax.random.fold_in(key, draw), image_shape, jnp.float32)
    )(keys)


def initial_state(keys: Keys, image_shape: tuple[int, int, int], sampler: Sampler) -> State:
    """Returns the state before the first evaluation: scaled `initial_noise`, zeros as memory."""
    x = initial_noise(keys, image_shape)
    x = x if sampler.initial == 1 else sampler.initial * x
    return State(
        x,
        jnp.zeros_like(x) if sampler.memory else None,
        jnp.zeros_like(x) if sampler.coefficients.older.any() else None,
    )


def _step(
    denoise: Denoiser,
    state: State,
    keys: Keys,
    sampler: Sampler,
    k: Int[Array, ''],
    class_gradient: Gradient | None = None,
    unguided: Denoiser | None = None,
) -> State:
    """Evaluates the network for the k-th time and applies the linear rule of the solver."""
    if sampler.guided is not None:
        assert unguided is not None
        denoise = functools.partial(jax.lax.cond, jnp.asarray(sampler.guided)[k], denoise, unguided)
    diffusion, table, x = sampler.diffusion, sampler.coefficients, state.x
    kind = x.dtype if diffusion.continuous else jnp.int32
    t = jnp.full(x.shape[:1], jnp.asarray(sampler.times, kind)[k], kind)
    evaluation = evaluate(denoise, x, t, diffusion, sampler.config, class_gradient)

    def product(factors: np.ndarray, images: Images | None) -> list[Images]:
        """Returns [factor · images], or [] if all factors are 0, which is known at trace time."""
        return (
            [jnp.asarray(factors.astype(x.dtype))[k] * images]
            if images is not None and factors.any()
            else []
        )

    terms = [
        *product(table.x0, evaluation.x0),
        *product(table.state, x),
        *product(table.noise, evaluation.noise),
        *product(table.memory, state.memory),
        *product(table.older, state.older),
    ]
    if sampler.spaced is not None:
        terms += _learned_variance_terms(sampler.spaced, table, evaluation, keys, k, t)
    else:
        if table.draw.any():
            terms += product(table.draw, _noise(keys, k + 1, x.shape[1:]))
        if sampler.config.name == 'ddpm' and evaluation.class_gradient is not None:
            assert sampler.config.variance is not None
            variances = fixed_variances(diffusion, table, sampler.config.variance)
            terms += product(variances, evaluation.class_gradient)
    older = None if state.older is None else state.memory
    return State(
        functools.reduce(operator.add, terms), evaluation.remembered(sampler.memory), older
    )


def _learned_variance_terms(
    spaced: Diffusion,
    table: Coefficients,
    evaluation: Evaluation,
    keys: Keys,
    k: Int[Array, ''],
    t: Times,
) -> list[Images]:
    """Returns the noise of a step of `ddpm` with the learned variance, and its guidance.

    Args:
      spaced: the process on the visited timesteps.
    """
    assert evaluation.variance_values is not None
    # The place of the timestep among those visited; evaluations may repeat.
    places = np.searchsorted(np.unique(table.timesteps), table.timesteps)
    index = jnp.asarray(places, jnp.int32)[k]
    log_variance = learned_log_variance(spaced, evaluation.variance_values, jnp.full_like(t, index))
    noise = _noise(keys, k + 1, evaluation.x0.shape[1:])
    terms = [jnp.where(index == 0, 0, jnp.exp(0.5 * log_variance)) * noise]
    if evaluation.class_gradient is not None:
        terms.append(jnp.exp(log_variance) * evaluation.class_gradient)
    return terms


def run(
    denoise: Denoiser,
    state: State,
    keys: Keys,
    sampler: Sampler,
    *,
    start: int | Int[Array, ''] = 0,
    stop: int | Int[Array, ''] | None = None,
    after: After | None = None,
    class_gradient: Gradient | None = None,
    unguided: Denoiser | None = None,
) -> State:
    """Runs evaluations start..stop−1 as one loop, whose bounds may be traced.

    Running 0..m−1 and then m..E−1 equals running 0..E−1.

    Args:
      denoise: the network, possibly guided.
      state: the state before evaluation `start`; for 0, `initial_state(keys, image_shape,
        sampler)`.
      keys: one typed key per sample, the same in every call.
      sampler: the constants.
      start: first evaluation.
      stop: end of the range; None = all evaluations.
      after: changes the samples after each evaluation; None = nothing does.
      class_gradient: of a classifier that guides the samples; None = none does.
      unguided: the network, for evaluations outside `Sampler.guided`; may be None if that is.

    Raises:
      ValueError: bounds outside 0..E.
    """
    stop = sampler.evaluations if stop is None else stop
    if (
        isinstance(start, int)
        and isinstance(stop, int)
        and not 0 <= start <= stop <= sampler.evaluations
    ):
        raise ValueError(f'evaluations {start}..{stop} are not within 0..{sampler.evaluations}')
    bounds = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)

    def body(k: Int[Array, ''], state: State) -> State:
        state = _step(denoise, state, keys, sampler, k, class_gradient, unguided)
        return state if after is None else state._replace(x=after(state.x, k))

    return jax.lax.fori_loop(*bounds, body, state)
