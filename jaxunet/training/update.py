"""Applies the gradients of a step: norm, clipping, AdamW and the averages of the weights.

There are two implementations of AdamW on the same optimizer state: optax, compiled by XLA, and the
fused kernels of a backend that has the op `adamw`. Muon's matrix products run on XLA with every
backend; the kernels then compute the norm and update the weights that Muon leaves to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxunet.checkpoint.muon import ADAM, MUON, join, matrix_steps, part
from jaxunet.checkpoint.optimizer import learning_rate_schedule
from jaxunet.checkpoint.recent_norms import RecentNorms
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.model.unet import Params
from jaxunet.ops.adamw import operands
from jaxunet.ops.adamw.operands import Copies
from jaxunet.ops.adamw.packed import Packed
from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.training.ema import ema_decay, power_share, update_average
from jaxunet.training.sharded import whole_norm

Scalar = Float[Array, '']


class Weights(NamedTuple):
    """Some or all weights, with the state of their optimizer, their averages by name, and copies.

    Attributes:
      copies: 16-bit copies of the weights, which the update keeps equal to them; () = none.
    """

    params: Params
    opt_state: optax.OptState
    ema: dict[str, Params]
    copies: Copies = ()


class Updated(NamedTuple):
    """The result of an update.

    If `taken` is false, `params`, `opt_state`, `ema` and `copies` are the old ones.

    Attributes:
      grad_norm: global norm of the gradients, before clipping.
      finite: the gradients and both losses are finite.
      taken: `finite`, and `grad_norm` is not a spike (`train.spike_sigmas`).
    """

    params: Params
    opt_state: optax.OptState
    ema: dict[str, Params]
    copies: Copies
    grad_norm: Scalar
    finite: Bool[Array, '']
    taken: Bool[Array, '']


class Step(NamedTuple):
    """The gradients' factor, the share of the new weights in each average, and if it is taken."""

    factor: Scalar
    shares: list[Scalar]
    taken: Bool[Array, '']


# Takes the state, its gradients times the loss scale, the logged loss, the minimised loss, and
# copies of the weights in 16 bits. Only kernels that update all weights take packed gradients, and
# copies if they have `updates_copies`; else copies are ().
Update = Callable[[TrainState, Params | Packed, Scalar, Scalar, Copies], Updated]
WeightUpdate = Callable[[Weights, Params | Packed, Step], Weights]


def make_update(
    config: Config,
    optimizer: optax.GradientTransformation,
    kernels: FusedUpdate | None,
    axis_name: str | None = None,
) -> Update:
    """Returns the update by these kernels; None = by optax.

    Args:
      axis_name: axis of the devices, if they may have parts of the state (`Sharded`).
    """
    if kernels is None:
        return _optax_update(config, optimizer, axis_name)
    adamw = _fused_adamw(config, kernels)
    move = _with_muon(config, adamw) if config.optimizer.name == 'muon' else adamw
    return _fused_update(config, kernels, axis_name, move)


def _optax_update(
    config: Config, optimizer: optax.GradientTransformation, axis_name: str | None
) -> Update:
    def update(
        state: TrainState, grads: Params, loss: Scalar, minimised: Scalar, _: Copies
    ) -> Updated:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale.scale, grads)
        grad_norm = whole_norm(optax.tree.norm(grads), grads, axis_name)
        finite, taken = _judged(config, state, grad_norm, loss, minimised)
        if config.optimizer.clip_norm:
            factor = _clip_factor(config, grad_norm)
            grads = jax.tree.map(lambda g: g * factor, grads)
        steps, opt_state = optimizer.update(grads, state.opt_state, state.params)
        weights = Weights(state.params, state.opt_state, state.ema)
        new = _stepped(weights, steps, opt_state, _shares(config, state), taken)
        return Updated(*new, grad_norm, finite, taken)

    return update


def _fused_update(
    config: Config, kernels: FusedUpdate, axis_name: str | None, move: WeightUpdate
) -> Update:
    def update(
        state: TrainState,
        grads: Params | Packed,
        loss: Scalar,
        minimised: Scalar,
        copies: Copies,
    ) -> Updated:
        norm = jnp.sqrt(kernels.sum_of_squares(grads)) / state.loss_scale.scale
        grad_norm = whole_norm(norm, grads, axis_name)
        finite, taken = _judged(config, state, grad_norm, loss, minimised)
        clip = config.optimizer.clip_norm
        factor = _clip_factor(config, grad_norm) if clip else jnp.ones((), jnp.float32)
        step = Step(factor / state.loss_scale.scale, _shares(config, state), taken)
        new = move(Weights(state.params, state.opt_state, state.ema, copies), grads, step)
        return Updated(*new, grad_norm, finite, taken)

    return update


def _with_muon(config: Config, adamw: WeightUpdate) -> WeightUpdate:
    """Returns Muon for matrices, and the kernels' AdamW for the other weights."""
    muon = _matrix_update(config)

    def update(weights: Weights, grads: Params, step: Step) -> Weights:
        states, new = weights.opt_state.inner_states, {}
        for label, update_part in ((MUON, muon), (ADAM, adamw)):
            averages = {name: part(label, average) for name, average in weights.ema.items()}
            some = Weights(part(label, weights.params), states[label].inner_state, averages)
            new[label] = update_part(some, part(label, grads), step)
        inner = {label: states[label]._replace(inner_state=new[label].opt_state) for label in new}
        return Weights(
            join(new[MUON].params, new[ADAM].params),
            weights.opt_state._replace(inner_states=inner),
            {name: join(new[MUON].ema[name], new[ADAM].ema[name]) for name in weights.ema},
            weights.copies,
        )

    return update


def _fused_adamw(config: Config, kernels: FusedUpdate) -> WeightUpdate:
    """Returns AdamW as the kernels compute it."""
    options = config.optimizer
    b1, b2 = options.betas
    constants = operands.Constants(b1, b2, options.eps, options.weight_decay)
    schedule = learning_rate_schedule(config)

    def update(weights: Weights, grads: Params | Packed, step: Step) -> Weights:
        adam, empty, scheduled = weights.opt_state
        count = optax.safe_increment(adam.count)
        options_of_copies = {'copies': weights.copies} if weights.copies else {}
        moved = kernels.adamw(
            constants,
            grads,
            weights.params,
            adam.mu,
            adam.nu,
            tuple(weights.ema.values()),
            take=step.taken,
            factor=step.factor,
            learning_rate=jnp.asarray(schedule(scheduled.count), jnp.float32),
            corrections=(
                1 - jnp.power(b1, count.astype(jnp.float32)),
                1 - jnp.power(b2, count.astype(jnp.float32)),
            ),
            follow=step.shares,
            **options_of_copies,
        )
        adam = adam._replace(
            count=jnp.where(step.taken, count, adam.count), mu=moved.mu, nu=moved.nu
        )
        scheduled = scheduled._replace(
            count=jnp.where(step.taken, optax.safe_increment(scheduled.count), scheduled.count)
        )
        ema = dict(zip(weights.ema, moved.averages, strict=True))
        return Weights(moved.params, (adam, empty, scheduled), ema, moved.copies)

    return update


def _matrix_update(config: Config) -> WeightUpdate:
    """Returns Muon as XLA computes it."""
    steps_of = matrix_steps(config, learning_rate_schedule(config)).update

    def update(weights: Weights, grads: Params, step: Step) -> Weights:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * step.factor, grads)
        steps, opt_state = steps_of(grads, weights.opt_state, weights.params)
        return _stepped(weights, steps, opt_state, step.shares, step.taken)

    return update


def _stepped(
    weights: Weights,
    steps: Params,
    opt_state: optax.OptState,
    shares: list[Scalar],
    taken: Bool[Array, ''],
) -> Weights:
    """Returns the weights moved by `steps`, with their averages; as they were if not `taken`."""
    params = optax.apply_updates(weights.params, steps)
    with jax.named_scope('ema'):
        ema = {
            name: update_average(average, params, share)
            for (name, average), share in zip(weights.ema.items(), shares, strict=True)
        }
    return jax.tree.map(
        lambda new, old: jnp.where(taken, new, old), Weights(params, opt_state, ema), weights
    )


def _judged(
    config: Config, state: TrainState, grad_norm: Scalar, loss: Scalar, minimised: Scalar
) -> tuple[Bool[Array, ''], Bool[Array, '']]:
    """Returns `Updated.finite` and `Updated.taken`."""
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss) & jnp.isfinite(minimised)
    if isinstance(state.recent_norms, RecentNorms):
        spike = state.recent_norms.is_spike(grad_norm, config.train.spike_sigmas)
        return finite, finite & ~spike
    return finite, finite


def _clip_factor(config: Config, grad_norm: Scalar) -> Scalar:
    return jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))


def _shares(config: Config, state: TrainState) -> list[Scalar]:
    """Returns the share of the new weights in each average, in the order of `state.ema`."""
    updates, widths = state.step - state.skipped, config.ema.width_names
    return [
        power_share(widths[name], updates)
        if name in widths
        else 1 - ema_decay(float(name), updates, config.ema.warmup)
        for name in state.ema
    ]
