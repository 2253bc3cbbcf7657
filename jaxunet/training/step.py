"""The training step: a pure function from state and batch to new state and metrics.

`train_step` in order: the weights that the network computes with; the random keys of the samples;
the gradients of what the step minimises (`jaxunet.training.gradients`); their sum over the devices
(`all_reduce`, or `sharded`); the update of weights and averages (`jaxunet.training.update`). At
last, the loss weighting and the timestep sampler learn from the losses of the whole batch, which
are gathered from all devices, so their states are the same on every device.

`jaxunet.profile` recognises the phases of a step by its named scopes: data, forward (its
derivative counts as backward), backward, all_reduce, optimizer and ema.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from jaxunet.checkpoint.optimizer import learning_rate_schedule
from jaxunet.checkpoint.recent_norms import RecentNorms
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.diffusion.process import Diffusion
from jaxunet.diffusion.timestep_policy import Event
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.model.low_res import low_res_of
from jaxunet.model.unet import Params, UNet
from jaxunet.ops.adamw import reference
from jaxunet.ops.adamw.operands import Copies
from jaxunet.ops.adamw.packed import Packed
from jaxunet.ops.backends import Kernels
from jaxunet.training import consistency
from jaxunet.training.all_reduce import summed
from jaxunet.training.batch import Batch, Keys, clean_images, split_keys
from jaxunet.training.gradients import (
    LossFn,
    SampleLosses,
    StepParts,
    copies_of,
    gradients,
    network_weights,
)
from jaxunet.training.noise_assignment import assigned_noise
from jaxunet.training.sharded import any_sharded, scattered
from jaxunet.training.update import Scalar, make_update

Metrics = dict[str, Array]  # float32 and int32 scalars by name


@dataclass(frozen=True)
class TrainStep:
    """One training step; called, it maps (state, batch) to (state, metrics).

    In a loop, a step can hand the 16-bit copies of the weights to the next one: updating them in
    the optimizer costs less than converting the weights again. Those of a teacher never change.
    """

    parts: StepParts

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs one step; see `make_train_step`."""
        new_state, _, metrics = train_step(self.parts, state, (), self.teacher(state), batch)
        return new_state, metrics

    def copies(self, state: TrainState) -> Copies:
        """Returns the copies for the first step of a loop; () = its steps hand on none."""
        return copies_of(self.parts, state.params) if self.parts.keeps_copies else ()

    def teacher(self, state: TrainState) -> Copies:
        """Returns the copies of the teacher for all steps of a loop; () = none are needed."""
        guided = self.parts.diffusion.config.folds_guidance
        return copies_of(self.parts, state.teacher) if guided else ()

    def advance(
        self, state: TrainState, copies: Copies, teacher: Copies, batch: Batch
    ) -> tuple[TrainState, Copies, Metrics]:
        """Runs one step of a loop; returns the new state, its copies and the metrics."""
        return train_step(self.parts, state, copies, teacher, batch)


def make_train_step(
    config: Config,
    model: UNet,
    diffusion: Diffusion,
    optimizer: optax.GradientTransformation,
    kernels: Kernels,
    *,
    axis_name: str | None = None,
    loss: LossFn | None = None,
) -> TrainStep:
    """Builds the training step.

    With `axis_name` the batch is this device's share of the global batch, under `jax.pmap` or
    `jax.shard_map`; without it, the whole batch. Losses and gradients are means over the global
    batch either way. With `optimizer.accumulate_steps` > 1 the batch is split into that many
    micro-batches. A step whose gradients are not finite changes only the counters and the loss
    scale, and with `train.spike_sigmas` so does one whose gradient norm is a spike. With `loss`,
    the state holds the weights of the network that it calls, instead of those of `model`.

    Metrics: loss (mean since the last logged step), step_loss, grad_norm (before clipping),
    learning_rate, loss_scale, bad_steps, skipped, and spikes with `train.spike_sigmas`.
    """
    fused = kernels.update
    # Without kernels, the layers cast; but sharded weights are cast before they are gathered.
    narrow_sharded = reference.narrow if config.parallel.shard_optimizer else None
    narrow = fused.narrow if fused else narrow_sharded
    # With Muon, the kernels update only the weights that are no matrices.
    updates_all = None if config.optimizer.name == 'muon' else fused
    parts = StepParts(
        config=config,
        model=model,
        diffusion=diffusion,
        weighting=make_weighting(config.loss, diffusion),
        sampler=make_sampler(config, diffusion),
        schedule=learning_rate_schedule(config),
        update=make_update(config, optimizer, fused, axis_name),
        transform=kernels.transform,
        narrow=(lambda arrays: narrow(arrays, config.precision)) if narrow and not loss else None,
        keeps_copies=loss is None and updates_all is not None and updates_all.updates_copies,
        join=updates_all.pack if updates_all else None,
        axis_name=axis_name,
        loss=loss or (consistency.loss_fn if diffusion.objective == 'consistency' else None),
    )
    return TrainStep(parts)


def train_step(
    parts: StepParts, state: TrainState, copies: Copies, teacher: Copies, batch: Batch
) -> tuple[TrainState, Copies, Metrics]:
    """Runs one training step; see `make_train_step`.

    Args:
      copies: of the weights, or of this device's parts, in 16 bits, which the optimizer updates;
        () = the step makes its own and updates none.
      teacher: copies of the teacher's weights, or of this device's parts; () = without.

    Returns: the new state, its copies, and the metrics.
    """
    params = network_weights(parts, state.params, copies or copies_of(parts, state.params))
    with jax.named_scope('data'):
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        keys = split_keys(step_key, batch['row'], parts.sampler.keys_in_pairs)
        if parts.config.data.noise_assignment == 'batch':
            noise = assigned_noise(parts.config, step_key, keys, batch, parts.axis_name)
            keys = keys._replace(noise=noise)
    seen = state
    if parts.diffusion.config.folds_guidance:
        seen = dataclasses.replace(state, teacher=network_weights(parts, state.teacher, teacher))
    grads, minimised, samples, simultaneous = gradients(parts, seen, params, keys, batch)
    if parts.axis_name is not None:
        axis_name, dtype = parts.axis_name, parts.config.parallel.reduce_dtype
        if any_sharded(state.params):
            grads = scattered(grads, state.params, axis_name, dtype)
        else:
            grads = summed(grads, axis_name, parts.join, dtype, simultaneous=simultaneous)
        with jax.named_scope('all_reduce'):
            minimised = jax.lax.pmean(minimised, parts.axis_name)
            samples = jax.tree.map(
                lambda x: jax.lax.all_gather(x, parts.axis_name, tiled=True), samples
            )
    with jax.named_scope('optimizer'):
        loss = minimised if samples is None else comparable_loss(samples)
        new_state, copies, metrics = apply_gradients(parts, state, copies, grads, loss, minimised)
    if samples is not None:
        key = jax.random.fold_in(step_key, parts.config.data.batch_size)
        weights = state.params, new_state.params
        if parts.sampler.measure is not None and any_sharded(state.params):
            after = copies or copies_of(parts, new_state.params)
            weights = params, network_weights(parts, new_state.params, after)
        new_state = learn_from_losses(parts, state, new_state, weights, samples, keys, batch, key)
    return new_state, copies, metrics


def comparable_loss(samples: SampleLosses) -> Scalar:
    """Estimates the mean loss under uniform t, which is comparable between methods.

    The estimate is Σ r_i loss_i / Σ r_i with the importance weights r_i = 1/(T p_t). Dividing by
    Σ r_i rather than by the batch size biases it by O(1/batch), but keeps it within the range of
    the losses where p_t is small.
    """
    return jnp.sum(samples.loss * samples.importance) / jnp.sum(samples.importance)


def apply_gradients(
    parts: StepParts,
    state: TrainState,
    copies: Copies,
    grads: Params | Packed,
    loss: Scalar,
    minimised: Scalar,
) -> tuple[TrainState, Copies, Metrics]:
    """Updates weights, averages, copies and counters, and computes the metrics.

    Args:
      copies: of the weights, to update; () = none.
      grads: summed over the devices, times the loss scale; packed if there are several and
        `parts.join` is not None; sharded as the weights are.
      loss: the loss to log.
      minimised: the loss that the gradients belong to.
    """
    config = parts.config
    updated = parts.update(state, grads, loss, minimised, copies)
    taken = updated.taken
    earlier_updates = state.step - state.skipped
    skipped = state.skipped + jnp.where(taken, 0, 1)
    bad_steps = jnp.where(taken, 0, state.bad_steps + 1)
    loss_sum = state.loss_sum + jnp.where(taken, loss, 0.0)
    loss_count = state.loss_count + jnp.where(taken, 1, 0)
    metrics = {
        'loss': loss_sum / jnp.maximum(loss_count, 1).astype(jnp.float32),
        'step_loss': loss,
        'grad_norm': updated.grad_norm,
        'learning_rate': jnp.asarray(parts.schedule(earlier_updates), jnp.float32),
        'loss_scale': state.loss_scale.scale,
        'bad_steps': bad_steps,
        'skipped': skipped,
    }
    recent_norms = state.recent_norms
    if isinstance(recent_norms, RecentNorms):
        recent_norms = recent_norms.after(
            updated.grad_norm, taken=taken, spike=updated.finite & ~taken
        )
        metrics['spikes'] = recent_norms.spikes
    logged = (state.step + 1) % config.train.log_every == 0
    new_state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=updated.params,
        ema=updated.ema,
        opt_state=updated.opt_state,
        loss_scale=state.loss_scale.update(updated.finite, config.precision == 'float16'),
        bad_steps=bad_steps,
        skipped=skipped,
        loss_sum=jnp.where(logged, 0.0, loss_sum),
        loss_count=jnp.where(logged, 0, loss_count),
        recent_norms=recent_norms,
    )
    return new_state, updated.copies, metrics


def learn_from_losses(
    parts: StepParts,
    state: TrainState,
    new_state: TrainState,
    weights: tuple[Params, Params],
    samples: SampleLosses,
    keys: Keys,
    batch: Batch,
    key: Key[Array, ''],
) -> TrainState:
    """Updates the states of the loss weighting and the timestep sampler in `new_state`.

    A skipped step leaves both as they were in `state`.

    Args:
      weights: whole, before and after the step.
      samples: the losses of the global batch.
      keys: of this device's share `batch`.
      key: for further draws of the sampler; the same on all devices.
    """
    config, weighting, sampler = parts.config, parts.weighting, parts.sampler
    weight = weighting.table(state.weighting)[samples.t]
    timesteps = sampler.update(state.timesteps, samples.t, samples.loss, weight)
    if sampler.measure is not None:
        local_rows = batch['row'].shape[0]
        event = Event(
            step=state.step,
            key=key,
            keys=keys.t,
            row=batch['row'],
            x0=clean_images(config, keys, batch),
            labels=batch['label'] if config.model.num_classes else None,
            before=weights[0],
            after=weights[1],
            predict=lambda params, x0, xt, t, labels: parts.model.predict(
                params, xt, t, labels, low_res=low_res_of(config, x0)
            ),
            axis_name=parts.axis_name,
            devices=config.data.batch_size // local_rows,
            chunk=local_rows // config.optimizer.accumulate_steps,
        )
        timesteps = sampler.measure(timesteps, event)
    updated = (
        weighting.update(state.weighting, samples.t, samples.loss, samples.importance),
        timesteps,
    )
    taken = new_state.skipped == state.skipped
    updated = jax.tree.map(
        lambda new, old: jnp.where(taken, new, old), updated, (state.weighting, state.timesteps)
    )
    return dataclasses.replace(new_state, weighting=updated[0], timesteps=updated[1])
