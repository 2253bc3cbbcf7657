"""The training state that a checkpoint holds, and the optimizer that updates it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jaxunet.checkpoint.muon import matrix_steps, muon
from jaxunet.checkpoint.recent_norms import RecentNorms
from jaxunet.config import Config, diff
from jaxunet.config.schema import DataConfig, OptimizerConfig, TrainConfig
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.model.unet import Params, build_unet, init_params
from jaxunet.ops.references import XLA
from jaxunet.runtime.own_types import own_types

Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')

LOSS_SCALE_START = 2.0**15
LOSS_SCALE_MAX = 2.0**24
LOSS_SCALE_GROWTH_STEPS = 2000  # finite steps after which the loss scale doubles
# Adam's update count for moments that come without a count, as in unet.cu's files. It is so large
# that the bias correction is 1.
CONVERGED_COUNT = 1_000_000
RATE_FIELDS = ('optimizer.', 'train.steps')  # what a learning rate depends on
LARGEST_RATE_CHANGE = 0.1  # between two runs at one step, as a share of the larger rate


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


Draw = Callable[[Config], TrainState]  # the state before step 0 of a config


def _lenient(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wraps a function of optax that mixes integers and floats, which strict promotion refuses."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            return function(*args, **kwargs)

    return call


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Returns the learning rate by number of updates.

    It rises linearly to `optimizer.learning_rate` over `optimizer.warmup_steps`. After that it is
    constant, or falls to 0 at `train.steps` as a cosine or a line (`optimizer.schedule`).
    """
    options = config.optimizer
    rest = max(config.train.steps - options.warmup_steps, 1)
    after = {
        'constant': optax.constant_schedule(options.learning_rate),
        'cosine': optax.cosine_decay_schedule(options.learning_rate, rest),
        'linear': optax.linear_schedule(options.learning_rate, 0.0, rest),
    }[options.schedule]
    if options.warmup_steps == 0:
        return _lenient(after)
    # Step n has (n + 1) / warmup_steps of the rate, so that the first step already changes weights.
    warmup = optax.linear_schedule(
        options.learning_rate / options.warmup_steps,
        options.learning_rate,
        max(options.warmup_steps - 1, 1),
    )
    return _lenient(optax.join_schedules([warmup, after], [options.warmup_steps]))


def endless_warmup(config: Config) -> str:
    """Returns a warning if the run ends before its learning rate has risen, else ''."""
    steps, warmup = config.train.steps, config.optimizer.warmup_steps
    if steps >= warmup:
        return ''
    rate = config.optimizer.learning_rate
    return (
        f'optimizer.warmup_steps={warmup} is more than train.steps={steps}: the learning rate ends '
        f'at {rate * steps / warmup:.3g} and never reaches optimizer.learning_rate={rate:g}; lower '
        'warmup_steps'
    )


def rate_jump(saved: Config, now: Config, step: int) -> str:
    """Returns a warning if a resumed run's learning rate jumps, else ''.

    Args:
      saved: config of the checkpoint.
      now: config of the run that goes on from it.
      step: optimizer steps of the checkpoint.
    """
    before, after = (float(learning_rate_schedule(config)(step)) for config in (saved, now))
    if abs(after - before) <= LARGEST_RATE_CHANGE * max(before, after):
        return ''
    rate, kind = now.optimizer.learning_rate, now.optimizer.schedule
    changes = [line for line in diff(saved, now) if line.startswith(RATE_FIELDS)]
    planned = (
        ''
        if kind == 'constant'
        else f': optimizer.schedule={kind} has at step {step} the rate of a run of '
        f'{now.train.steps} steps'
    )
    advice = (
        f'the loss may rise for a while; to go on with a lower rate, set '
        f'--config.optimizer.learning_rate, of which {rate / 10:g} begins at {after / 10:.3g}, '
        'or hold a rate with --config.optimizer.schedule=constant'
        if after > before
        else f'to go on with a higher rate, raise --config.optimizer.learning_rate (now {rate:g})'
    )
    return (
        f'the learning rate jumps from {before:.3g} to {after:.3g} at step {step} '
        f'({", ".join(changes)}){planned}; {advice}'
    )


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns Adam or AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), or `muon`.

    It does not clip gradients: the training step does, because it computes their norm anyway.
    """
    options, schedule = config.optimizer, learning_rate_schedule(config)
    # AdamW without decay is Adam, so both have the same state.
    found = optax.adamw(
        schedule,
        b1=options.betas[0],
        b2=options.betas[1],
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    if options.name == 'muon':
        found = muon(matrix_steps(config, schedule), found)
    return optax.GradientTransformation(found.init, _lenient(found.update))


def start_loss_scale(config: Config) -> LossScale:
    """Returns the loss scale before step 0."""
    scale = LOSS_SCALE_START if config.precision == 'float16' else 1.0
    return LossScale(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32))


def state_before_training(
    config: Config, optimizer: optax.GradientTransformation, params: Params, rng: Array
) -> TrainState:
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
        opt_state=optimizer.init(params),
        loss_scale=start_loss_scale(config),
        rng=rng,
        bad_steps=zero,
        skipped=zero,
        loss_sum=jnp.zeros((), jnp.float32),
        loss_count=zero,
        weighting=weighting,
        timesteps=timesteps,
        recent_norms=start_norms(config),
    )


def start_norms(config: Config) -> RecentNorms | tuple[()]:
    """Returns the recent gradient norms before step 0; () without `train.spike_sigmas`."""
    return RecentNorms.start() if config.train.spike_sigmas else ()


def start_methods(config: Config) -> tuple[PyTree, PyTree]:
    """Returns the states of the loss weighting and of the timestep sampler before step 0."""
    diffusion = make_diffusion(config.diffusion)
    return make_weighting(config.loss, diffusion).init(), make_sampler(config, diffusion).init()


def _is_adam(node: object) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def get_moments(opt_state: optax.OptState) -> tuple[Params, Params] | None:
    """Returns Adam's first and second moments, shaped like the parameters.

    Returns None for the state of another optimizer.
    """
    if isinstance(opt_state, optax.transforms.PartitionState):  # Muon's
        return None
    (adam,) = (node for node in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(node))
    return adam.mu, adam.nu


def set_moments(opt_state: optax.OptState, mu: Params, nu: Params) -> optax.OptState:
    """Returns the optimizer state with moments from elsewhere.

    Their number of updates is unknown, so it is set to `CONVERGED_COUNT`.
    """

    def replace(node: object) -> object:
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        return node._replace(mu=mu, nu=nu, count=jnp.asarray(CONVERGED_COUNT, jnp.int32))

    return jax.tree.map(replace, opt_state, is_leaf=_is_adam)


@own_types()
def fresh_state(config: Config, draw: Draw | None = None) -> TrainState:
    """Returns the state before step 0 as numpy arrays, drawn from `config.seed`.

    It is drawn on the CPU if JAX has that platform, so that it is the same on every machine.

    Args:
      draw: function that draws the state and that JAX traces; None = `draw_state`.
    """
    cpu = drawing_device()
    # It runs once, and optimising its many random draws takes ten times as long as running them.
    quick = {'xla_backend_optimization_level': 0} if cpu else None
    with jax.default_device(cpu):
        drawn = jax.jit(draw or draw_state, static_argnums=0, compiler_options=quick)
        return jax.device_get(drawn(state_config(config)))


def drawing_device() -> str | None:
    """Returns 'cpu', where states are drawn; None if JAX_PLATFORMS excludes it.

    JAX traces a function once for each default device, so everything that traces a draw sets this
    device. It is a name, because a function can then be traced before JAX has started its devices.
    """
    platforms = jax.config.values['jax_platforms']
    return 'cpu' if not platforms or 'cpu' in platforms.split(',') else None


def state_config(config: Config) -> Config:
    """Returns a config in which most fields that do not affect the state at step 0 are defaults.

    JAX compiles the draw of a state once per config, so the runs of a sweep share it.
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
    """Draws the state before step 0 from `config.seed`; to be traced by JAX.

    `config` is a static argument of a module-level function, so JAX compiles it once per config.
    """
    # Parameters do not depend on the backend, and this machine may lack the config's backend.
    model = build_unet(config, XLA)
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    params = init_params(model, config, init_key)
    return state_before_training(
        config, make_optimizer(config), params, jax.random.key_data(run_key)
    )


@own_types()
def state_from_weights(
    config: Config, params: Params, moments: tuple[Params, Params] | None
) -> TrainState:
    """Returns the state before step 0 with weights, and Adam's moments, of another model.

    Args:
      params: float32 numpy arrays.
      moments: first and second moments; None starts them at 0.

    Returns numpy arrays.
    """
    optimizer = make_optimizer(config)
    rng = jax.random.key_data(jax.random.split(jax.random.key(config.seed))[1])
    state = state_before_training(config, optimizer, jax.tree.map(jnp.asarray, params), rng)
    if moments is not None:
        state = dataclasses.replace(
            state, opt_state=set_moments(state.opt_state, *jax.tree.map(jnp.asarray, moments))
        )
    return jax.device_get(state)
