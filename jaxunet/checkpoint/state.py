"""The training state that a checkpoint holds, and the one before step 0."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jaxunet.checkpoint.optimizer import make_optimizer, set_moments
from jaxunet.checkpoint.recent_norms import RecentNorms
from jaxunet.config import Config
from jaxunet.config.schema import DataConfig, OptimizerConfig, TrainConfig
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.model.initializers import Traced
from jaxunet.model.unet import Params, build_unet, init_params
from jaxunet.runtime.jax_settings import fixed_jax_settings

LOSS_SCALE_START = 2.0**15
LOSS_SCALE_MAX = 2.0**24
LOSS_SCALE_GROWTH_STEPS = 2000  # finite steps after which the loss scale doubles


class LossScale(NamedTuple):
    """Dynamic loss scaling for float16; the scale stays at 1 for other compute types.

    The scale is halved on overflow and doubled after `LOSS_SCALE_GROWTH_STEPS` finite steps.
    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.

    Attributes:
      scale: factor on the loss.
      finite_steps: finite steps since the scale last changed.
    """

    scale: Float[Array, '']
    finite_steps: Int[Array, '']

    def update(self, finite: Array, dynamic: bool) -> LossScale:
        """Returns the loss scale after a step.

        Args:
          finite: True if the step's gradients were finite.
          dynamic: True if the compute type is float16.
        """
        if not dynamic:
            return self
        grown = self.finite_steps + 1 >= LOSS_SCALE_GROWTH_STEPS
        larger = jnp.where(grown, jnp.minimum(self.scale * 2, LOSS_SCALE_MAX), self.scale)
        scale = jnp.where(finite, larger, jnp.maximum(self.scale / 2, 1.0))
        return LossScale(scale, jnp.where(finite & ~grown, self.finite_steps + 1, 0))


@flax.struct.dataclass
class TrainState:
    """Everything that is needed to continue a run bit for bit.

    The position in the data is `step`: batches are a function of (seed, step).

    Attributes:
      step: number of batches consumed, including those of skipped steps.
      params: weights, float32.
      ema: averages of the weights, by rate and by `EmaConfig.width_names`.
      opt_state: state of `make_optimizer`.
      loss_scale: factor on the loss for float16.
      rng: key data from which each step derives its randomness.
      bad_steps: number of steps skipped in a row just before this state.
      skipped: total number of skipped steps.
      loss_sum, loss_count: sum and number of the losses of taken steps since the last logged step.
      weighting: state of `loss.weighting`; () if it has none.
      timesteps: state of `timesteps.sampler`; () if it has none.
      recent_norms: the norms for `train.spike_sigmas`; () if it is 0.
      teacher: the weights at step 0, which guide (`diffusion.consistency_guidance`); () without.
        In float32, as a run may resume in any precision.
    """

    step: Int[Array, '']
    params: Params
    ema: dict[str, Params]
    opt_state: optax.OptState
    loss_scale: LossScale
    rng: UInt32[Array, '2']
    bad_steps: Int[Array, '']
    skipped: Int[Array, '']
    loss_sum: Float[Array, '']
    loss_count: Int[Array, '']
    weighting: PyTree = ()
    timesteps: PyTree = ()
    recent_norms: RecentNorms | tuple[()] = ()
    teacher: Params = ()


Draw = Callable[[Config], TrainState]  # the state before step 0 of a config


def start_loss_scale(config: Config) -> LossScale:
    """Returns the loss scale before step 0."""
    scale = LOSS_SCALE_START if config.precision == 'float16' else 1.0
    return LossScale(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32))


def state_before_training(config: Config, params: Params, rng: Array) -> TrainState:
    """Returns the state before step 0 with these weights and this key data; to be traced by JAX."""
    zero = jnp.zeros((), jnp.int32)
    weighting, timesteps = start_methods(config)
    return TrainState(
        step=zero,
        params=params,
        ema={
            name: jax.tree.map(jnp.copy, params)
            for name in (*map(str, config.ema.rates), *config.ema.width_names)
        },
        opt_state=make_optimizer(config).init(params),
        loss_scale=start_loss_scale(config),
        rng=rng,
        bad_steps=zero,
        skipped=zero,
        loss_sum=jnp.zeros((), jnp.float32),
        loss_count=zero,
        weighting=weighting,
        timesteps=timesteps,
        recent_norms=start_norms(config),
        teacher=jax.tree.map(jnp.copy, params) if config.diffusion.folds_guidance else (),
    )


def start_norms(config: Config) -> RecentNorms | tuple[()]:
    """Returns the recent gradient norms before step 0; () without `train.spike_sigmas`."""
    return RecentNorms.start() if config.train.spike_sigmas else ()


def start_methods(config: Config) -> tuple[PyTree, PyTree]:
    """Returns the states of the loss weighting and of the timestep sampler before step 0."""
    diffusion = make_diffusion(config.diffusion)
    return make_weighting(config.loss, diffusion).init(), make_sampler(config, diffusion).init()


@fixed_jax_settings()
def fresh_state(config: Config, draw: Draw | None = None) -> TrainState:
    """Returns the state before step 0 as numpy arrays, drawn from `config.seed`.

    It is drawn on the CPU if JAX has that platform, so that it is the same on every machine.

    Args:
      draw: function that draws the state and that JAX traces; None = `draw_state`.
    """
    with jax.default_device(_drawing_device()):
        return traced(draw or draw_state, state_config(config)).arrays()


@functools.lru_cache(maxsize=32)  # also of runs of a sweep, which share their `state_config`
def traced(draw: Draw, config: Config) -> Traced:
    """Returns the trace of the draw of a state, which needs no device.

    Args:
      config: from `state_config`.
    """
    with jax.default_device(_drawing_device()):
        return Traced(lambda: draw(config))


def _drawing_device() -> str | None:
    """Returns 'cpu', where states are drawn; None if JAX_PLATFORMS excludes it.

    It is a name, because a function can then be traced before JAX has started its devices.
    """
    platforms = jax.config.values['jax_platforms']
    return 'cpu' if not platforms or 'cpu' in platforms.split(',') else None


def state_config(config: Config) -> Config:
    """Returns a config in which most fields that do not affect the state at step 0 are defaults.

    A draw is traced once per config, so the runs of a sweep share it.
    """
    return Config(
        seed=config.seed,
        precision=config.precision,
        model=config.model,
        diffusion=config.diffusion,
        loss=config.loss,
        timesteps=config.timesteps,
        data=DataConfig(
            image_size=config.data.image_size,
            augment='edm' if config.data.augment == 'edm' else 'none',  # edm adds a layer
        ),
        optimizer=OptimizerConfig(name=config.optimizer.name),
        ema=config.ema,
        train=TrainConfig(spike_sigmas=config.train.spike_sigmas),
    )


def draw_state(config: Config) -> TrainState:
    """Draws the state before step 0 from `config.seed`; to be traced by JAX."""
    # Parameters do not depend on the backend, and this machine may lack the config's backend.
    model = build_unet(config)
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    params = init_params(model, config, init_key)
    return state_before_training(config, params, jax.random.key_data(run_key))


@fixed_jax_settings()
def state_from_weights(
    config: Config, params: Params, moments: tuple[Params, Params] | None
) -> TrainState:
    """Returns the state before step 0 with weights, and Adam's moments, of another model.

    Args:
      params: float32 numpy arrays.
      moments: first and second moments; None starts them at 0.

    Returns numpy arrays.
    """
    rng = jax.random.key_data(jax.random.split(jax.random.key(config.seed))[1])
    state = state_before_training(config, jax.tree.map(jnp.asarray, params), rng)
    if moments is not None:
        state = dataclasses.replace(
            state, opt_state=set_moments(state.opt_state, *jax.tree.map(jnp.asarray, moments))
        )
    return jax.device_get(state)
