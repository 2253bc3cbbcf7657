"""The gradients of a training step: of the mean of w(t_i) c_i loss_i over a batch.

The weight w comes from `loss.weighting`; the timesteps t and their factors c come from
`timesteps.sampler`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import Diffusion
from jaxunet.diffusion.timesteps import TimestepSampler
from jaxunet.diffusion.weighting import Weighting
from jaxunet.model.encoder import with_copies
from jaxunet.model.unet import Params, UNet
from jaxunet.ops.adamw.operands import Copies
from jaxunet.ops.adamw.packed import Join
from jaxunet.training.all_reduce import cast
from jaxunet.training.batch import Batch, Keys, noise_batch
from jaxunet.training.sharded import any_sharded, gathered, parts_of
from jaxunet.training.update import Scalar, Update

Narrow = Callable[[list[Array]], Sequence[Array]]
LossFn = Callable[..., tuple[Array, tuple[Array, object]]]  # arguments and results of `loss_fn`
GradientFn = Callable[..., Any]


@dataclass(frozen=True)
class StepParts:
    """The parts of a training step that its functions share and that are fixed while tracing.

    Attributes:
      weighting: the loss weighting, w(t).
      sampler: the timestep sampler.
      schedule: learning rate by number of updates.
      update: applies the gradients (`jaxunet.training.update`).
      transform: what the backend does to the gradient function, which it takes with the number of
        devices whose gradients are then added.
      narrow: casts weights to 16 bits, in one kernel if the backend has it, before they are
        gathered; None leaves the casts to the layers.
      keeps_copies: in a loop of steps, `update` keeps the cast weights up to date.
      join: with several devices, packs gradients for the all-reduce, and `update` takes them
        packed; None = they are summed one by one.
      axis_name: axis of the devices under `jax.pmap` or `jax.shard_map`; None without them.
      loss: takes the arguments of `loss_fn` and replaces it; None = `loss_fn`.
    """

    config: Config
    model: UNet
    diffusion: Diffusion
    weighting: Weighting
    sampler: TimestepSampler
    schedule: optax.Schedule
    update: Update
    transform: Callable[[GradientFn, int], GradientFn]
    narrow: Narrow | None
    keeps_copies: bool
    join: Join | None
    axis_name: str | None
    loss: LossFn | None = None

    @property
    def uniform(self) -> bool:
        """True if timesteps are drawn and weighted uniformly, so nothing learns from the losses."""
        methods = self.config.loss.weighting, self.config.timesteps.sampler
        return methods == ('uniform', 'uniform')


class SampleLosses(NamedTuple):
    """Losses by sample, from which timestep samplers and loss weightings learn."""

    t: Int[Array, ' batch']
    loss: Float[Array, ' batch']
    importance: Float[Array, ' batch']  # 1/(T p_t)


class Gradients(NamedTuple):
    """Gradients of one batch.

    Attributes:
      grads: the gradients, times the loss scale.
      loss: the mean loss that is minimised.
      samples: the losses by sample; None if nothing learns from them.
      simultaneous: True if most gradients become known at the same time, because calls are merged,
        or after a loop of micro-batches.
    """

    grads: Params
    loss: Scalar
    samples: SampleLosses | None
    simultaneous: bool


def loss_fn(
    parts: StepParts, params: Params, state: TrainState, keys: Keys, batch: Batch, scale: Scalar
) -> tuple[Scalar, tuple[Scalar, SampleLosses | None]]:
    """Returns (loss · scale, (loss, samples)) for `jax.grad`, which differentiates the first.

    Args:
      batch: this device's rows of one micro-batch, with their `keys`.
      scale: the loss scale, divided by the number of devices.
    """
    with jax.named_scope('data'):
        noisy = noise_batch(
            parts.config, parts.diffusion, parts.sampler, state.timesteps, keys, batch
        )
        draw = noisy.draw
    with jax.named_scope('forward'):
        output = parts.model.predict(params, noisy.model_input, noisy.time, *noisy.conditions)
        targets = noisy.x0, noisy.xt, noisy.time, noisy.noise
        bits = parts.config.data.bits
        losses = per_sample_loss(parts.diffusion, output, *targets, bits=bits)
        if parts.uniform:
            loss = jnp.mean(losses)
            return loss * scale, (loss, None)
        loss = jnp.mean(losses * parts.weighting.table(state.weighting)[draw.t] * draw.weight)
        return loss * scale, (loss, SampleLosses(draw.t, losses, draw.importance))


def copies_of(parts: StepParts, params: Params) -> Copies:
    """Returns the weights in 16 bits that the network is called with; () = it takes `params`.

    If the weights are sharded, these are copies of the parts, to be gathered.
    """
    if parts.narrow is None:
        return ()
    with jax.named_scope('forward'):
        return parts.model.copies(parts_of(params), parts.narrow)


def network_weights(parts: StepParts, params: Params, copies: Copies) -> Params:
    """Returns the whole weights that the network is called with.

    Args:
      params: the weights of the state.
      copies: from `copies_of`.
    """
    if any_sharded(params):
        assert parts.axis_name is not None
        return gathered(params, copies, parts.axis_name)
    return with_copies(params, copies)


def gradients(
    parts: StepParts, state: TrainState, params: Params, keys: Keys, batch: Batch
) -> Gradients:
    """Returns this device's share of the gradients, and the losses of its rows.

    The sum of the shares over the devices is the gradient of the whole batch. Gradients have the
    types of the weights; those of several micro-batches are float32.

    Args:
      params: from `network_weights`.
    """
    scale = state.loss_scale.scale
    devices = 1 if parts.axis_name is None else jax.lax.axis_size(parts.axis_name)
    if devices > 1:
        # Makes the sum over devices a mean: dividing each gradient would take a separate kernel.
        scale = scale / devices
    differentiate: GradientFn = functools.partial(
        jax.grad(parts.loss or loss_fn, argnums=1, has_aux=True), parts
    )
    # The gradients of several micro-batches are summed over the devices after the last one.
    accumulates = parts.config.optimizer.accumulate_steps > 1
    alone = differentiate
    differentiate = parts.transform(alone, 1 if accumulates else devices)
    # Calls of float32 layers, and those inside `jax.checkpoint`, are not merged.
    narrow = jnp.dtype(parts.config.precision).itemsize == 2 and not parts.config.model.remat
    simultaneous = narrow and differentiate is not alone

    def one(keys: Keys, batch: Batch) -> Gradients:
        grads, (loss, samples) = differentiate(params, state, keys, batch, scale)
        return Gradients(grads, loss, samples, simultaneous)

    if accumulates:
        return accumulate(parts.config.optimizer.accumulate_steps, one, params, keys, batch)
    return one(keys, batch)


def accumulate(
    count: int,
    gradients_of: Callable[[Keys, Batch], Gradients],
    params: Params,
    keys: Keys,
    batch: Batch,
) -> Gradients:
    """Returns the mean float32 gradients of `count` micro-batches, computed one after another.

    Micro-batch i consists of rows i, i + count, i + 2 count, ... of the batch.
    """

    def split(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)

    def add(
        total: tuple[Params, Scalar], micro: tuple[Keys, Batch]
    ) -> tuple[tuple[Params, Scalar], SampleLosses | None]:
        one = gradients_of(*micro)
        with jax.named_scope('backward'):
            grads = cast(one.grads, jnp.float32)
            return jax.tree.map(jnp.add, total, (grads, one.loss)), one.samples

    start = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    zeros = (start, jnp.zeros((), jnp.float32))
    total, samples = jax.lax.scan(add, zeros, jax.tree.map(split, (keys, batch)))
    with jax.named_scope('backward'):
        grads, loss = jax.tree.map(lambda x: x / count, total)
    samples = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1), samples)
    return Gradients(grads, loss, samples, simultaneous=True)
