"""Applies the gradients of a step: norm, clipping, AdamW and the averages of the weights.

There are two implementations of AdamW on the same optimizer state: optax, compiled by XLA, and the
fused kernels of a backend that has the op `adamw`. Muon is optax's on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxunet.checkpoint.recent_norms import RecentNorms
from jaxunet.checkpoint.state import TrainState, learning_rate_schedule
from jaxunet.config import Config
from jaxunet.model.unet import Params
from jaxunet.ops.adamw.operands import Rule
from jaxunet.ops.adamw.packed import Packed
from jaxunet.ops.backends import fused_update
from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.training.ema import ema_decay, power_share, update_ema, update_power_average

Tree = TypeVar('Tree')
Scalar = Float[Array, '']


class Updated(NamedTuple):
    """The result of an update.

    If `taken` is false, `params`, `opt_state` and `ema` are those of the old state.

    Attributes:
      grad_norm: global norm of the gradients, before clipping.
      finite: the gradients and both losses are finite.
      taken: `finite`, and `grad_norm` is not a spike (`train.spike_sigmas`).
    """

    params: Params
    opt_state: optax.OptState
    ema: dict[str, Params]
    grad_norm: Scalar
    finite: Bool[Array, '']
    taken: Bool[Array, '']


# Takes the state, its gradients times the loss scale, the logged loss and the minimised loss.
# Gradients may be packed if there are `kernels_of` the config.
Update = Callable[[TrainState, Params | Packed, Scalar, Scalar], Updated]


def make_update(config: Config, optimizer: optax.GradientTransformation) -> Update:
    """Returns the update of `config.backend`: a fused one if the backend has it, else optax's."""
    kernels = kernels_of(config)
    return _fused_update(config, kernels) if kernels else _optax_update(config, optimizer)


def kernels_of(config: Config) -> FusedUpdate | None:
    """Returns the kernels that update the weights; None if optax does, as always for Muon.

    The kernels take packed gradients.
    """
    muon = config.optimizer.name == 'muon'
    return None if muon else fused_update(config.backend, config.precision)


def _optax_update(config: Config, optimizer: optax.GradientTransformation) -> Update:
    def update(state: TrainState, grads: Params, loss: Scalar, minimised: Scalar) -> Updated:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale.scale, grads)
        grad_norm = optax.tree.norm(grads)
        finite = _all_finite(grad_norm, loss, minimised)
        taken = _taken(config, state, grad_norm, finite)
        if config.optimizer.clip_norm:
            factor = _clip_factor(config, grad_norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        with jax.named_scope('ema'):
            decays, shares = _decays(config, state), _power_shares(config, state)
            ema = {rate: update_ema(state.ema[rate], params, d) for rate, d in decays.items()}
            ema |= {
                name: update_power_average(state.ema[name], params, share)
                for name, share in shares.items()
            }

        def if_taken(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)

        return Updated(
            if_taken(params, state.params),
            if_taken(opt_state, state.opt_state),
            if_taken(ema, state.ema),
            grad_norm,
            finite,
            taken,
        )

    return update


def _fused_update(config: Config, kernels: FusedUpdate) -> Update:
    options = config.optimizer
    rule = Rule(options.betas[0], options.betas[1], options.eps, options.weight_decay)
    schedule = learning_rate_schedule(config)

    def update(
        state: TrainState, grads: Params | Packed, loss: Scalar, minimised: Scalar
    ) -> Updated:
        adam, empty, scheduled = state.opt_state
        names = tuple(state.ema)
        grad_norm = jnp.sqrt(kernels.sum_of_squares(grads)) / state.loss_scale.scale
        finite = _all_finite(grad_norm, loss, minimised)
        taken = _taken(config, state, grad_norm, finite)
        count = optax.safe_increment(adam.count)
        factor = _clip_factor(config, grad_norm) if options.clip_norm else jnp.ones((), jnp.float32)
        moved = kernels.adamw(
            rule,
            grads,
            state.params,
            adam.mu,
            adam.nu,
            tuple(state.ema[name] for name in names),
            take=taken,
            factor=factor / state.loss_scale.scale,
            learning_rate=jnp.asarray(schedule(scheduled.count), jnp.float32),
            corrections=(
                1 - jnp.power(options.betas[0], count.astype(jnp.float32)),
                1 - jnp.power(options.betas[1], count.astype(jnp.float32)),
            ),
            follow=_shares(config, state),
        )
        adam = adam._replace(count=jnp.where(taken, count, adam.count), mu=moved.mu, nu=moved.nu)
        scheduled = scheduled._replace(
            count=jnp.where(taken, optax.safe_increment(scheduled.count), scheduled.count)
        )
        ema = dict(zip(names, moved.averages, strict=True))
        return Updated(moved.params, (adam, empty, scheduled), ema, grad_norm, finite, taken)

    return update


def _all_finite(grad_norm: Scalar, loss: Scalar, minimised: Scalar) -> Bool[Array, '']:
    return jnp.isfinite(grad_norm) & jnp.isfinite(loss) & jnp.isfinite(minimised)


def _taken(
    config: Config, state: TrainState, grad_norm: Scalar, finite: Bool[Array, '']
) -> Bool[Array, '']:
    if isinstance(state.recent_norms, RecentNorms):
        return finite & ~state.recent_norms.is_spike(grad_norm, config.train.spike_sigmas)
    return finite


def _clip_factor(config: Config, grad_norm: Scalar) -> Scalar:
    return jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))


def _decays(config: Config, state: TrainState) -> dict[str, Scalar]:
    """Returns the decay of each exponential average at this update."""
    updates, powers = state.step - state.skipped, config.ema.width_names
    return {
        rate: ema_decay(float(rate), updates, config.ema.warmup)
        for rate in state.ema
        if rate not in powers
    }


def _power_shares(config: Config, state: TrainState) -> dict[str, Scalar]:
    """Returns the share of the new weights in each power-function average at this update."""
    updates, powers = state.step - state.skipped, config.ema.width_names
    return {name: power_share(powers[name], updates) for name in state.ema if name in powers}


def _shares(config: Config, state: TrainState) -> list[Scalar]:
    """Returns the share of the new weights in each average, in the order of `state.ema`."""
    shares = {rate: 1 - decay for rate, decay in _decays(config, state).items()}
    shares |= _power_shares(config, state)
    return [shares[name] for name in state.ema]
