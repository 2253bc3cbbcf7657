"""The training step: one pure function from state and data to state and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, UInt8

from jaxunet.config import Config
from jaxunet.diffusion import Diffusion, per_sample_loss, q_sample
from jaxunet.training.state import Params, TrainState, learning_rate_schedule
from jaxunet.unet import UNet

Batch = dict[str, Array]  # image uint8 (b, H, W, C); label int32 (b,), -1 = none; row int32 (b,), place in the global batch
Metrics = dict[str, Array]  # float32 and int32 scalars
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def normalise(image: UInt8[Array, 'batch height width channels']) -> Float[Array, 'batch height width channels']:
    """uint8 pixels to [-1, 1]."""
    return image.astype(jnp.float32) / 127.5 - 1


def noise_batch(
    config: Config, diffusion: Diffusion, keys: Key[Array, ' batch'], batch: Batch
) -> tuple[Array, Array, Array, Array, Array | None, Array | None]:
    """x0, xt, t, noise, labels and dropout keys of a batch. Sample i draws from keys[i] alone, however the batch is split."""
    flip_keys, t_keys, noise_keys, label_keys, dropout_keys = jax.vmap(lambda k: jax.random.split(k, 5), out_axes=1)(keys)
    x0 = normalise(batch['image'])
    if config.data.augment == 'flip':
        flip = jax.vmap(jax.random.bernoulli)(flip_keys)
        x0 = jnp.where(flip[:, None, None, None], x0[:, :, ::-1, :], x0)
    t = jax.vmap(lambda k: jax.random.randint(k, (), 0, config.diffusion.steps))(t_keys)
    noise = jax.vmap(lambda k: jax.random.normal(k, x0.shape[1:], jnp.float32))(noise_keys)
    labels = None
    if config.model.num_classes:
        dropped = jax.vmap(lambda k: jax.random.bernoulli(k, config.model.label_dropout))(label_keys)
        labels = jnp.where(dropped, -1, batch['label'])
    return x0, q_sample(diffusion, x0, t, noise), t, noise, labels, dropout_keys if config.model.dropout else None


def make_train_step(
    config: Config, model: UNet, diffusion: Diffusion, optimizer: optax.GradientTransformation, *, axis_name: str | None = None
) -> TrainStep:
    """Builds `train_step(state, batch) -> (state, metrics)`.

    The batch is this device's share of the global batch under `jax.pmap` or `jax.shard_map` with `axis_name`, or without it the whole
    batch; losses and gradients are means over the global batch either way. With `optimizer.accumulate_steps` > 1 it is worked through in
    that many micro-batches. A step whose gradients are not finite changes nothing but the counters and the loss scale.

    Its parts have named scopes, from which `jaxunet.profiling` tells the phases: data, forward (and by it backward), all_reduce, optimizer.

    Metrics: loss (mean since the last logged step), step_loss, grad_norm (before clipping), learning_rate, loss_scale, bad_steps,
    skipped.
    """
    schedule = learning_rate_schedule(config)
    micro_batches = config.optimizer.accumulate_steps

    def loss_fn(params: Params, keys: Array, batch: Batch, scale: Array) -> tuple[Array, Array]:
        with jax.named_scope('data'):
            x0, xt, t, noise, labels, dropout_keys = noise_batch(config, diffusion, keys, batch)
        with jax.named_scope('forward'):
            output = model.predict(params, xt, t, labels, dropout_keys)
            loss = jnp.mean(per_sample_loss(diffusion, output, x0, xt, t, noise))
            return loss * scale, loss

    def gradients(state: TrainState, batch: Batch) -> tuple[Params, Array]:
        with jax.named_scope('data'):
            step_key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
            keys = jax.vmap(lambda row: jax.random.fold_in(step_key, row))(batch['row'])
        value_and_grad = jax.grad(loss_fn, has_aux=True)
        scale = state.loss_scale.scale
        if micro_batches == 1:
            return value_and_grad(state.params, keys, batch, scale)

        def split(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1)

        def add(total: tuple[Params, Array], micro: tuple[Array, Batch]) -> tuple[tuple[Params, Array], None]:
            part = value_and_grad(state.params, *micro, scale)
            with jax.named_scope('backward'):
                return jax.tree.map(jnp.add, total, part), None

        start = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros((), jnp.float32))
        total, _ = jax.lax.scan(add, start, jax.tree.map(split, (keys, batch)))
        with jax.named_scope('backward'):
            return jax.tree.map(lambda x: x / micro_batches, total)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, loss = gradients(state, batch)
        if axis_name is not None:
            with jax.named_scope('all_reduce'):
                grads, loss = jax.lax.pmean((grads, loss), axis_name)
        with jax.named_scope('optimizer'):
            return apply_gradients(state, grads, loss)

    def apply_gradients(state: TrainState, grads: Params, loss: Array) -> tuple[TrainState, Metrics]:
        grads = jax.tree.map(lambda g: g / state.loss_scale.scale, grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        if config.optimizer.clip_norm:
            factor = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        taken = state.step - state.skipped  # updates before this one
        with jax.named_scope('ema'):
            ema = {rate: update_ema(tree, params, ema_decay(float(rate), taken, config.ema.warmup)) for rate, tree in state.ema.items()}

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        skipped = state.skipped + jnp.where(finite, 0, 1)
        bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
        loss_sum = state.loss_sum + jnp.where(finite, loss, 0.0)
        loss_count = state.loss_count + jnp.where(finite, 1, 0)
        metrics = {
            'loss': loss_sum / jnp.maximum(loss_count, 1).astype(jnp.float32),
            'step_loss': loss,
            'grad_norm': grad_norm,
            'learning_rate': jnp.asarray(schedule(taken), jnp.float32),
            'loss_scale': state.loss_scale.scale,
            'bad_steps': bad_steps,
            'skipped': skipped,
        }
        logged = (state.step + 1) % config.train.log_every == 0
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=keep(params, state.params),
            ema=keep(ema, state.ema),
            opt_state=keep(opt_state, state.opt_state),
            loss_scale=state.loss_scale.update(finite, config.precision == 'float16'),
            bad_steps=bad_steps,
            skipped=skipped,
            loss_sum=jnp.where(logged, 0.0, loss_sum),
            loss_count=jnp.where(logged, 0, loss_count),
        )
        return new_state, metrics

    return train_step


def ema_decay(rate: float, taken: Int[Array, ''], warmup: bool) -> Float[Array, '']:
    """`rate`, or with warm-up min(rate, (1 + n) / (10 + n)) after n updates (as ddpm-torch)."""
    n = taken.astype(jnp.float32)
    return jnp.minimum(rate, (1 + n) / (10 + n)) if warmup else jnp.asarray(rate, jnp.float32)


def update_ema(ema: Params, params: Params, decay: Float[Array, '']) -> Params:
    """decay · ema + (1 - decay) · params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
