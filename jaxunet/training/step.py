"""The training step: one pure function from state and data to state and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, UInt8

from jaxunet.checkpoint.state import TrainState, learning_rate_schedule
from jaxunet.config import Config
from jaxunet.diffusion.process import Diffusion, per_sample_loss, q_sample
from jaxunet.diffusion.timestep_policy import Event
from jaxunet.diffusion.timesteps import Draw, TimestepSampler, make_sampler
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.model.unet import Params, UNet
from jaxunet.ops.backends import fused_update
from jaxunet.training.update import make_update

Batch = dict[
    str, Array
]  # image uint8 (b, H, W, C); label int32 (b,), -1 = none; row int32 (b,), place in the global batch
Metrics = dict[str, Array]  # float32 and int32 scalars
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def normalise(
    image: UInt8[Array, 'batch height width channels'],
) -> Float[Array, 'batch height width channels']:
    """uint8 pixels to [-1, 1]."""
    return image.astype(jnp.float32) / 127.5 - 1


class Keys(NamedTuple):
    """What the samples of a batch draw from: sample i from its own keys alone, however the batch is split."""

    flip: Key[Array, ' batch']
    t: Key[Array, ' batch']
    noise: Key[Array, ' batch']
    label: Key[Array, ' batch']
    dropout: Key[Array, ' batch']


def split_keys(step_key: Key[Array, ''], row: Int[Array, ' batch'], paired: bool) -> Keys:
    """Keys by place in the global batch; `paired` rows 2j and 2j + 1 share the one of the timestep."""

    def split(row: Array) -> Array:
        keys = jax.vmap(lambda r: jax.random.fold_in(step_key, r))(row)
        return jax.vmap(lambda k: jax.random.split(k, 5), out_axes=1)(keys)

    keys = Keys(*split(row))
    return keys._replace(t=split(row - row % 2)[1]) if paired else keys


def clean_images(
    config: Config, keys: Keys, batch: Batch
) -> Float[Array, 'batch height width channels']:
    """x0: normalised and augmented."""
    x0 = normalise(batch['image'])
    if config.data.augment == 'flip':
        flip = jax.vmap(jax.random.bernoulli)(keys.flip)
        x0 = jnp.where(flip[:, None, None, None], x0[:, :, ::-1, :], x0)
    return x0


def noise_batch(
    config: Config,
    diffusion: Diffusion,
    sampler: TimestepSampler,
    timesteps: Any,
    keys: Keys,
    batch: Batch,
) -> tuple[Array, Array, Draw, Array, Array | None, Array | None]:
    """x0, xt, the timesteps that the sampler draws in its state `timesteps`, noise, labels and dropout keys of a batch."""
    x0 = clean_images(config, keys, batch)
    draw = sampler.draw(timesteps, keys.t, batch['row'], x0)
    noise = jax.vmap(lambda k: jax.random.normal(k, x0.shape[1:], jnp.float32))(keys.noise)
    labels = None
    if config.model.num_classes:
        dropped = jax.vmap(lambda k: jax.random.bernoulli(k, config.model.label_dropout))(
            keys.label
        )
        labels = jnp.where(dropped, -1, batch['label'])
    return (
        x0,
        q_sample(diffusion, x0, draw.t, noise),
        draw,
        noise,
        labels,
        keys.dropout if config.model.dropout else None,
    )


class Losses(NamedTuple):
    """What samplers and weightings learn from, by sample."""

    t: Int[Array, ' batch']
    loss: Float[Array, ' batch']
    importance: Float[Array, ' batch']


def make_train_step(
    config: Config,
    model: UNet,
    diffusion: Diffusion,
    optimizer: optax.GradientTransformation,
    *,
    axis_name: str | None = None,
) -> TrainStep:
    """Builds `train_step(state, batch) -> (state, metrics)`.

    The batch is this device's share of the global batch under `jax.pmap` or `jax.shard_map` with `axis_name`, or without it the whole
    batch; losses and gradients are means over the global batch either way. With `optimizer.accumulate_steps` > 1 it is worked through in
    that many micro-batches. A step whose gradients are not finite changes nothing but the counters and the loss scale.

    It minimises mean(w(t_i) c_i loss_i), w from `loss.weighting`, t and its factor c from `timesteps.sampler`. Their states follow the
    losses of the whole batch, gathered from all devices, and so are the same on each.

    The metrics' loss is comparable between methods: the mean loss under uniform t without w, estimated as Σ r_i loss_i / Σ r_i with the
    importance weights r_i = 1/(T p_t). (Dividing by Σ r_i rather than the batch size biases it by O(1/batch), but keeps it within the
    range of the losses where p_t is small.) With uniform t and weights it is the mean, and what is minimised.

    Its parts have named scopes, from which `jaxunet.profiling` tells the phases: data, forward (and by it backward), all_reduce, optimizer.

    Metrics: loss (mean since the last logged step), step_loss, grad_norm (before clipping), learning_rate, loss_scale, bad_steps,
    skipped.
    """
    schedule, update = learning_rate_schedule(config), make_update(config, optimizer)
    micro_batches, batch_size = config.optimizer.accumulate_steps, config.data.batch_size
    weighting, sampler = make_weighting(config.loss, diffusion), make_sampler(config, diffusion)
    fused = fused_update(config.backend, config.precision)
    narrow = (lambda arrays: fused.narrow(arrays, config.precision)) if fused else None
    plain = config.loss.weighting == 'uniform' and config.timesteps.sampler == 'uniform'

    def loss_fn(
        params: Params, states: tuple[Any, Any], keys: Keys, batch: Batch, scale: Array
    ) -> tuple[Array, tuple[Array, Losses | None]]:
        with jax.named_scope('data'):
            x0, xt, draw, noise, labels, dropout_keys = noise_batch(
                config, diffusion, sampler, states[1], keys, batch
            )
        with jax.named_scope('forward'):
            output = model.predict(params, xt, draw.t, labels, dropout_keys)
            losses = per_sample_loss(diffusion, output, x0, xt, draw.t, noise)
            if plain:
                loss = jnp.mean(losses)
                return loss * scale, (loss, None)
            loss = jnp.mean(losses * weighting.table(states[0])[draw.t] * draw.weight)
            return loss * scale, (loss, Losses(draw.t, losses, draw.importance))

    def wide(grads: Params) -> Params:
        with jax.named_scope('backward'):
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def gradients(
        state: TrainState, keys: Keys, batch: Batch
    ) -> tuple[Params, Array, Losses | None]:
        """This device's share of the gradients, which add up to those of the whole batch; the mean loss of its rows.

        They have the types of the weights that the network was called with: 16 bits where those were narrowed and nothing is to be summed.
        """
        value_and_grad = jax.grad(loss_fn, has_aux=True)
        scale, states = state.loss_scale.scale, (state.weighting, state.timesteps)
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        if (
            devices > 1
        ):  # so that the sum over devices is the mean: a division of each gradient is a kernel of its own
            scale = scale / devices
        with jax.named_scope('forward'):
            params = model.narrowed(state.params, narrow) if narrow else state.params
        if micro_batches == 1:
            grads, (loss, losses) = value_and_grad(params, states, keys, batch, scale)
            # One by one, so that the first can be summed over the devices while others are still computed; the update widens by itself.
            return wide(grads) if devices > 1 else grads, loss, losses

        def split(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1)

        def add(
            total: tuple[Params, Array], micro: tuple[Keys, Batch]
        ) -> tuple[tuple[Params, Array], Losses | None]:
            grads, (loss, losses) = value_and_grad(params, states, *micro, scale)
            with jax.named_scope('backward'):
                return jax.tree.map(jnp.add, total, (wide(grads), loss)), losses

        start = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros((), jnp.float32))
        total, losses = jax.lax.scan(add, start, jax.tree.map(split, (keys, batch)))
        with jax.named_scope('backward'):
            grads, loss = jax.tree.map(lambda x: x / micro_batches, total)
        return grads, loss, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1), losses)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with jax.named_scope('data'):
            step_key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
            keys = split_keys(step_key, batch['row'], sampler.paired)
        grads, loss, losses = gradients(state, keys, batch)
        if axis_name is not None:
            with jax.named_scope('all_reduce'):
                grads, loss = jax.lax.psum(grads, axis_name), jax.lax.pmean(loss, axis_name)
                losses = jax.tree.map(
                    lambda x: jax.lax.all_gather(x, axis_name, tiled=True), losses
                )
        with jax.named_scope('optimizer'):
            minimised = loss
            if losses is not None:
                loss = jnp.sum(losses.loss * losses.importance) / jnp.sum(losses.importance)
            new_state, metrics = apply_gradients(state, grads, loss, minimised)
        if losses is None:
            return new_state, metrics
        return follow(
            state, new_state, losses, keys, batch, jax.random.fold_in(step_key, batch_size)
        ), metrics

    def follow(
        state: TrainState,
        new_state: TrainState,
        losses: Losses,
        keys: Keys,
        batch: Batch,
        key: Array,
    ) -> TrainState:
        """The states of sampler and weighting after this step; a skipped step leaves them as they are."""
        weight = weighting.table(state.weighting)[losses.t]
        timesteps = sampler.update(state.timesteps, losses.t, losses.loss, weight)
        if sampler.measure is not None:
            event = Event(
                step=state.step,
                key=key,
                keys=keys.t,
                row=batch['row'],
                x0=clean_images(config, keys, batch),
                labels=batch['label'] if config.model.num_classes else None,
                before=state.params,
                after=new_state.params,
                predict=model.predict,
                axis_name=axis_name,
                devices=batch_size // batch['row'].shape[0],
                chunk=batch['row'].shape[0] // micro_batches,
            )
            timesteps = sampler.measure(timesteps, event)
        now = (
            weighting.update(state.weighting, losses.t, losses.loss, losses.importance),
            timesteps,
        )
        kept = new_state.skipped == state.skipped
        now = jax.tree.map(
            lambda new, old: jnp.where(kept, new, old), now, (state.weighting, state.timesteps)
        )
        return dataclasses.replace(new_state, weighting=now[0], timesteps=now[1])

    def apply_gradients(
        state: TrainState, grads: Params, loss: Array, minimised: Array
    ) -> tuple[TrainState, Metrics]:
        updated = update(state, grads, loss, minimised)
        finite = updated.finite
        taken = state.step - state.skipped  # updates before this one
        skipped = state.skipped + jnp.where(finite, 0, 1)
        bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
        loss_sum = state.loss_sum + jnp.where(finite, loss, 0.0)
        loss_count = state.loss_count + jnp.where(finite, 1, 0)
        metrics = {
            'loss': loss_sum / jnp.maximum(loss_count, 1).astype(jnp.float32),
            'step_loss': loss,
            'grad_norm': updated.grad_norm,
            'learning_rate': jnp.asarray(schedule(taken), jnp.float32),
            'loss_scale': state.loss_scale.scale,
            'bad_steps': bad_steps,
            'skipped': skipped,
        }
        logged = (state.step + 1) % config.train.log_every == 0
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=updated.params,
            ema=updated.ema,
            opt_state=updated.opt_state,
            loss_scale=state.loss_scale.update(finite, config.precision == 'float16'),
            bad_steps=bad_steps,
            skipped=skipped,
            loss_sum=jnp.where(logged, 0.0, loss_sum),
            loss_count=jnp.where(logged, 0, loss_count),
        )
        return new_state, metrics

    return train_step
