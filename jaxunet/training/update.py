"""What a step does with its gradients: norm, clipping, AdamW and the averages of the weights; by optax, or in two fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxunet.checkpoint.state import TrainState, learning_rate_schedule
from jaxunet.config import Config
from jaxunet.model.unet import Params
from jaxunet.ops.adamw.operands import Rule
from jaxunet.ops.backends import fused_update
from jaxunet.ops.vocabulary import FusedUpdate


class Updated(NamedTuple):
    """What the gradients changed; where they are not finite, nothing."""

    params: Params
    opt_state: optax.OptState
    ema: dict[str, Params]
    grad_norm: Float[Array, '']  # before clipping
    finite: Bool[Array, '']  # the gradients and losses


Update = Callable[
    [TrainState, Params, Array, Array], Updated
]  # of the state, its gradients times the loss scale, and two losses


def make_update(config: Config, optimizer: optax.GradientTransformation) -> Update:
    """The update of `config.backend`: optax's, or one fused over all parameters on the same state."""
    kernels = fused_update(config.backend, config.precision)
    return _fused(config, kernels) if kernels else _by_optax(config, optimizer)


def _by_optax(config: Config, optimizer: optax.GradientTransformation) -> Update:
    def update(state: TrainState, grads: Params, loss: Array, minimised: Array) -> Updated:
        grads = jax.tree.map(lambda g: g / state.loss_scale.scale, grads)
        grad_norm = optax.tree.norm(grads)
        finite = _all_finite(grad_norm, loss, minimised)
        if config.optimizer.clip_norm:
            factor = _clip_factor(config, grad_norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        with jax.named_scope('ema'):
            ema = {
                rate: update_ema(tree, params, decay)
                for (rate, tree), decay in zip(
                    state.ema.items(), _decays(config, state), strict=True
                )
            }

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        return Updated(
            keep(params, state.params),
            keep(opt_state, state.opt_state),
            keep(ema, state.ema),
            grad_norm,
            finite,
        )

    return update


def _fused(config: Config, kernels: FusedUpdate) -> Update:
    o = config.optimizer
    rule = Rule(o.betas[0], o.betas[1], o.eps, o.weight_decay)
    schedule = learning_rate_schedule(config)

    def update(state: TrainState, grads: Params, loss: Array, minimised: Array) -> Updated:
        adam, empty, scheduled = state.opt_state
        grad_norm = jnp.sqrt(kernels.sum_of_squares(grads)) / state.loss_scale.scale
        finite = _all_finite(grad_norm, loss, minimised)
        count = optax.safe_increment(adam.count)
        factor = _clip_factor(config, grad_norm) if o.clip_norm else jnp.ones((), jnp.float32)
        moved = kernels.adamw(
            rule,
            grads,
            state.params,
            adam.mu,
            adam.nu,
            tuple(state.ema.values()),
            take=finite,
            factor=factor / state.loss_scale.scale,
            learning_rate=jnp.asarray(schedule(scheduled.count), jnp.float32),
            corrections=(
                1 - jnp.power(o.betas[0], count.astype(jnp.float32)),
                1 - jnp.power(o.betas[1], count.astype(jnp.float32)),
            ),
            follow=[1 - decay for decay in _decays(config, state)],
        )
        adam = adam._replace(count=jnp.where(finite, count, adam.count), mu=moved.mu, nu=moved.nu)
        scheduled = scheduled._replace(
            count=jnp.where(finite, optax.safe_increment(scheduled.count), scheduled.count)
        )
        ema = dict(zip(state.ema, moved.averages, strict=True))
        return Updated(moved.params, (adam, empty, scheduled), ema, grad_norm, finite)

    return update


def _all_finite(grad_norm: Array, loss: Array, minimised: Array) -> Bool[Array, '']:
    return jnp.isfinite(grad_norm) & jnp.isfinite(loss) & jnp.isfinite(minimised)


def _clip_factor(config: Config, grad_norm: Array) -> Float[Array, '']:
    return jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))


def _decays(config: Config, state: TrainState) -> list[Float[Array, '']]:
    """Of every average, after the updates so far."""
    taken = state.step - state.skipped
    return [ema_decay(float(rate), taken, config.ema.warmup) for rate in state.ema]


def ema_decay(rate: float, taken: Int[Array, ''], warmup: bool) -> Float[Array, '']:
    """`rate`, or with warm-up min(rate, (1 + n) / (10 + n)) after n updates (as ddpm-torch)."""
    n = taken.astype(jnp.float32)
    return jnp.minimum(rate, (1 + n) / (10 + n)) if warmup else jnp.asarray(rate, jnp.float32)


def update_ema(ema: Params, params: Params, decay: Float[Array, '']) -> Params:
    """decay · ema + (1 - decay) · params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
