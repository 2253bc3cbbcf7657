"""What a training run carries from step to step, and the optimizer that changes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from jaxunet.config import Config
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.model.unet import Params, UNet, build_unet, init_params
from jaxunet.ops.backends import load_ops

LOSS_SCALE_START = 2.0**15
LOSS_SCALE_GROWTH_STEPS = 2000
# Adam's step count for moments that come without one (unet.cu's files): large enough that no bias correction is left.
CONVERGED_COUNT = 1_000_000


class LossScale(NamedTuple):
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2): halved on overflow, doubled after
    `LOSS_SCALE_GROWTH_STEPS` finite steps; stays at 1 for other types."""

    scale: Float[Array, '']
    finite_steps: Int[Array, '']

    def update(self, finite: Array, dynamic: bool) -> LossScale:
        if not dynamic:
            return self
        grown = self.finite_steps + 1 >= LOSS_SCALE_GROWTH_STEPS
        larger = jnp.where(grown, jnp.minimum(self.scale * 2, 2.0**24), self.scale)
        scale = jnp.where(finite, larger, jnp.maximum(self.scale / 2, 1.0))
        return LossScale(scale, jnp.where(finite & ~grown, self.finite_steps + 1, 0))


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint needs to continue bit for bit. The data position is `step`: batches are a function of (seed, step)."""

    step: Int[Array, '']  # batches consumed, skipped ones included
    params: Params  # float32
    ema: dict[str, Params]  # by rate
    opt_state: optax.OptState
    loss_scale: LossScale
    rng: UInt32[Array, '2']  # key data from which every step derives its randomness
    bad_steps: Int[Array, '']  # non-finite steps in a row
    skipped: Int[Array, '']  # non-finite steps in all
    loss_sum: Float[Array, '']  # over the finite steps since the last logged one
    loss_count: Int[Array, '']
    weighting: Any = ()  # of `loss.weighting`; () if it has no state
    timesteps: Any = ()  # of `timesteps.sampler`; likewise


def _lenient(function: Callable[..., Any]) -> Callable[..., Any]:
    """optax mixes integers and floats freely, which our strict promotion rules would refuse."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            return function(*args, **kwargs)

    return call


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up to `optimizer.learning_rate`, then constant, or a cosine or linear fall to 0 at `train.steps`."""
    o = config.optimizer
    rest = max(config.train.steps - o.warmup_steps, 1)
    after = {
        'constant': optax.constant_schedule(o.learning_rate),
        'cosine': optax.cosine_decay_schedule(o.learning_rate, rest),
        'linear': optax.linear_schedule(o.learning_rate, 0.0, rest),
    }[o.schedule]
    if o.warmup_steps == 0:
        return _lenient(after)
    # The first step already moves: (n + 1) / warmup_steps of the rate at step n.
    warmup = optax.linear_schedule(
        o.learning_rate / o.warmup_steps, o.learning_rate, max(o.warmup_steps - 1, 1)
    )
    return _lenient(optax.join_schedules([warmup, after], [o.warmup_steps]))


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam or AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). Clipping is in the step, which needs the norm anyway."""
    o = config.optimizer
    schedule = learning_rate_schedule(config)
    # AdamW without decay is Adam: one state for both.
    adam = optax.adamw(
        schedule, b1=o.betas[0], b2=o.betas[1], eps=o.eps, weight_decay=o.weight_decay
    )
    return optax.GradientTransformation(adam.init, _lenient(adam.update))


def init_state(config: Config, model: UNet, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before step 0, a function of `config.seed` (jit or eval_shape it)."""
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    return start_state(
        config, optimizer, init_params(model, config, init_key), jax.random.key_data(run_key)
    )


def start_loss_scale(config: Config) -> LossScale:
    scale = LOSS_SCALE_START if config.precision == 'float16' else 1.0
    return LossScale(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32))


def start_state(
    config: Config, optimizer: optax.GradientTransformation, params: Params, rng: Array
) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    weighting, timesteps = start_methods(config)
    return TrainState(
        step=zero,
        params=params,
        ema={str(rate): jax.tree.map(jnp.copy, params) for rate in config.ema.rates},
        opt_state=optimizer.init(params),
        loss_scale=start_loss_scale(config),
        rng=rng,
        bad_steps=zero,
        skipped=zero,
        loss_sum=jnp.zeros((), jnp.float32),
        loss_count=zero,
        weighting=weighting,
        timesteps=timesteps,
    )


def start_methods(config: Config) -> tuple[Any, Any]:
    """The states of the loss weighting and of the timestep sampler before step 0."""
    diffusion = make_diffusion(config.diffusion)
    return make_weighting(config.loss, diffusion).init(), make_sampler(config, diffusion).init()


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def get_moments(opt_state: optax.OptState) -> tuple[Params, Params]:
    """Adam's first and second moments, shaped as the parameters."""
    (adam,) = (node for node in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(node))
    return adam.mu, adam.nu


def set_moments(opt_state: optax.OptState, mu: Params, nu: Params) -> optax.OptState:
    """The optimizer state with moments from elsewhere; their unknown step count is taken as large (no bias correction left)."""

    def replace(node: Any) -> Any:
        return (
            node._replace(mu=mu, nu=nu, count=jnp.asarray(CONVERGED_COUNT, jnp.int32))
            if _is_adam(node)
            else node
        )

    return jax.tree.map(replace, opt_state, is_leaf=_is_adam)


def fresh_state(config: Config) -> TrainState:
    """The numpy state before step 0, from `config.seed`; drawn on the CPU where JAX has it, so the same on every machine."""
    model = build_unet(config, load_ops('xla'))

    def draw() -> TrainState:
        return init_state(config, model, make_optimizer(config))

    try:
        cpu = jax.local_devices(backend='cpu')[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return jax.device_get(jax.jit(draw)())
    # It runs once: optimising its many random draws would take ten times as long as running them.
    quick = {'xla_backend_optimization_level': 0}
    with jax.default_device(cpu):
        return jax.device_get(jax.jit(draw, compiler_options=quick)())


def initial_state(config: Config, params: Any, moments: tuple[Any, Any] | None) -> TrainState:
    """A state at step 0 with weights, and Adam moments if there are any, from elsewhere."""
    optimizer = make_optimizer(config)
    rng = jax.random.key_data(jax.random.split(jax.random.key(config.seed))[1])
    state = start_state(config, optimizer, jax.tree.map(jnp.asarray, params), rng)
    if moments is not None:
        state = dataclasses.replace(
            state, opt_state=set_moments(state.opt_state, *jax.tree.map(jnp.asarray, moments))
        )
    return jax.device_get(state)
