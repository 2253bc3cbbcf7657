"""The timestep sampler `policy`: a network proposes timesteps and is rewarded by training progress.

Kim et al., Adaptive Non-Uniform Timestep Sampling for Diffusion Model Training, CVPR 2025, arXiv
2411.09998 (ku-dmlab/Adaptive-Timestep-Sampler). For an image x the network gives a, b > 0, and
    u ~ Beta(a, b),    t = round(u (T − 1)).
Every `policy_every` steps, the drop in the terms of the variational bound that the optimizer step
caused,
    Δ_t(x) = L_t(x; θ_before) − L_t(x; θ_after),
is measured at all t for one image, and at a few probe timesteps S for the whole batch. S are the
`policy_probes` timesteps whose Δ_t correlate best with Σ_t Δ_t over the last `policy_memory`
measurements (the univariate F-test is monotone in the squared correlation). REINFORCE then ascends
mean(log π(u | x) R(x)) with R(x) = Σ_{t∈S} Δ_t(x) + η H(π(· | x)). The loss has no importance
weight.

Cost: the policy network at every step, and 2 (T + |S| batch) forward passes of the UNet every
`policy_every` steps. With the published settings (T = 1000, batch 128, 40 steps, 3 probes), these
passes are 0.54 per image and step, about a sixth of a training step. The policy network and its
draws come on top: docs/results.md has the measured time of a whole step.

Differences from the authors' code: S is chosen from the third measurement on instead of the second;
both measurements of a drop use the same noise (fresh noise only adds variance) and no dropout; Δ
uses the fixed variance β, or the learned variance where the network has one; the entropy bonus is
differentiated, where their code multiplies it into the score-function estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import betaln, digamma
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxunet.config import Config
from jaxunet.diffusion.objectives import gaussian_kl
from jaxunet.diffusion.process import (
    Diffusion,
    Images,
    PerSample,
    Steps,
    learned_log_variance,
    posterior,
    predict_x0_and_noise,
    q_sample,
    split_output,
)

Params: TypeAlias = PyTree  # of parameters, of the UNet or of the policy network
# The UNet: (parameters, x_0, x_t, t, labels) -> output. Only super-resolution needs x_0.
Predict = Callable[[Params, Images, Images, Steps, Array | None], Array]
CLIP_NORM = 1.0  # maximum global norm of the policy's gradient
PROPOSALS = 8  # candidates per gamma variate


class Policy(NamedTuple):
    """State of the sampler."""

    params: Params  # of the policy network
    optimizer: optax.OptState
    deltas: Float[Array, 'memory steps']  # last measurements of Δ, a ring buffer
    measured: Int[Array, '']  # number of measurements so far
    probes: Int[Array, ' probes']  # S


class Event(NamedTuple):
    """One optimizer step, the input of `measure_policy`. Arrays are this device's shard."""

    step: Int[Array, '']  # number of steps before this one
    key: Key[Array, '']  # the same on all devices
    keys: Key[Array, ' batch']  # keys that drew the timesteps
    row: Int[Array, ' batch']  # positions in the global batch
    x0: Images  # clean images
    labels: Array | None
    before: Params  # the UNet's parameters before the step
    after: Params  # and after it
    predict: Predict
    axis_name: str | None  # mapped axis over the devices; None on one device
    devices: int
    chunk: int  # images per forward pass


Measure = Callable[[PyTree, Event], PyTree]


class Actor(nn.Module):
    """The policy network, from images to (a, b) of Beta(a, b), each of shape (batch,).

    Three blocks of 3×3 convolution, ReLU and 2×2 max pooling (32, 64, 128 channels), then two
    hidden layers of 256. The output layer starts at zero with bias 0.5, so that every image starts
    with Beta(0.974, 0.974), which is nearly uniform.
    """

    @nn.compact
    def __call__(self, x: Images) -> tuple[PerSample, PerSample]:
        """Returns a and b of each image."""
        for channels in (32, 64, 128):
            x = nn.relu(nn.Conv(channels, (3, 3))(x))
            window = (min(2, x.shape[1]), min(2, x.shape[2]))
            x = nn.max_pool(x, window, window)
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        out = nn.Dense(
            2, kernel_init=nn.initializers.zeros, bias_init=nn.initializers.constant(0.5)
        )(x)
        out = jax.nn.softplus(out) + 1e-5
        return out[:, 0], out[:, 1]


ACTOR = Actor()


def propose(params: Params, x0: Images) -> tuple[PerSample, PerSample]:
    """Returns a and b of each image."""
    return cast(tuple[Array, Array], ACTOR.apply({'params': params}, x0))


def _optimizer(config: Config) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adam(config.timesteps.policy_learning_rate)
    )


def init_policy(config: Config) -> Policy:
    """Returns a new policy, drawn from `config.seed`; S starts as the first timesteps."""
    c, steps = config.timesteps, config.diffusion.steps
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    params = ACTOR.init(key, jnp.zeros((1, *config.image_shape), jnp.float32))['params']
    return Policy(
        params=params,
        optimizer=_optimizer(config).init(params),
        deltas=jnp.zeros((c.policy_memory, steps), jnp.float32),
        measured=jnp.zeros((), jnp.int32),
        probes=jnp.arange(c.policy_probes, dtype=jnp.int32),
    )


def draw_from_policy(
    params: Params, keys: Key[Array, ' batch'], x0: Images, *, steps: int
) -> tuple[PerSample, Steps, PerSample]:
    """Returns u, t and 1/(T P(t)) of each image, where P(t) is the mass of all u that round to t.

    Args:
      params: parameters of the policy network.
      keys: one key per image.
      x0: clean images.
      steps: T.
    """
    a, b = propose(params, x0)
    u = jnp.clip(jax.vmap(_draw_beta)(keys, a, b), 1e-6, 1 - 1e-6)
    t = jnp.round(u * (steps - 1)).astype(jnp.int32)
    return u, t, 1 / (steps * jnp.maximum(beta_mass(t, a, b, steps), 1e-6))


def _draw_beta(key: Key[Array, ''], a: Array, b: Array) -> Array:
    """Draws from Beta(a, b) by two gamma variates; see `_log_gamma` for why not jax.random.beta."""
    first, second = jax.random.split(key)
    return jax.nn.sigmoid(_log_gamma(first, a) - _log_gamma(second, b))


def _log_gamma(key: Key[Array, ''], a: Array) -> Array:
    """Returns ln of a draw from Gamma(a, 1): Marsaglia & Tsang (2000) for a + 1, times U^(1/a).

    jax.random.beta loops until it accepts a proposal, and each iteration costs a GPU several kernel
    launches and a synchronization with the host. All proposals are made at once here. Each is
    accepted with probability 0.95 or more; if none is (probability at most 4e-11), the first is
    used.
    """
    normal, uniform, boost = jax.random.split(key, 3)
    d = a + 1 - 1 / 3
    x = jax.random.normal(normal, (PROPOSALS,))
    root = 1 + x / jnp.sqrt(9 * d)
    log_v = 3 * jnp.log(jnp.maximum(root, 1e-6))
    accepted = (root > 0) & (
        jnp.log(jax.random.uniform(uniform, (PROPOSALS,)))
        < jnp.square(x) / 2 + d - d * root**3 + d * log_v
    )
    return (
        jnp.log(d)
        + log_v[jnp.argmax(accepted)]
        + jnp.log(jax.random.uniform(boost, minval=1e-30)) / a
    )


def beta_mass(t: Steps, a: PerSample, b: PerSample, steps: int) -> PerSample:
    """Returns the mass under Beta(a, b) of all u that round to t.

    The density's factor that is steep at the nearer end is integrated; the other factor is
    evaluated at the middle of the interval. The relative error is below 1% for a, b up to 50 and
    1000 steps. The exact incomplete beta function would need a loop.
    """
    far = 2 * t > steps - 1
    place = jnp.where(far, steps - 1 - t, t).astype(jnp.float32)  # distance from the nearer end
    near_power, far_power = jnp.where(far, b, a), jnp.where(far, a, b)
    lower, upper = jnp.maximum(place - 0.5, 0) / (steps - 1), (place + 0.5) / (steps - 1)
    log_rest = (far_power - 1) * jnp.log1p(-(lower + upper) / 2) - betaln(a, b)
    # The fraction of the integral from the end to `upper` that lies above `lower`.
    share = -jnp.expm1(near_power * jnp.log1p(-(upper - lower) / upper))
    return jnp.exp(log_rest + near_power * jnp.log(upper)) * share / near_power


def log_density(u: PerSample, a: PerSample, b: PerSample) -> PerSample:
    """Returns ln of the density of Beta(a, b) at u."""
    return (a - 1) * jnp.log(u) + (b - 1) * jnp.log1p(-u) - betaln(a, b)


def entropy(a: PerSample, b: PerSample) -> PerSample:
    """Returns the differential entropy of Beta(a, b) in nats."""
    return betaln(a, b) - (a - 1) * digamma(a) - (b - 1) * digamma(b) + (a + b - 2) * digamma(a + b)


def bound_terms(diffusion: Diffusion, output: Array, x0: Images, xt: Images, t: Steps) -> PerSample:
    """Returns KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) in bits per dimension (DDPM eq. 5).

    p has the learned variance if the network has one, else β_t.
    """
    prediction, values = split_output(diffusion, output, x0.shape[-1])
    true_mean, true_log_variance = posterior(diffusion, x0, xt, t)
    mean, _ = posterior(diffusion, predict_x0_and_noise(diffusion, prediction, xt, t)[0], xt, t)
    if values is None:
        log_variance = jnp.asarray(diffusion.log_betas)[t][:, None, None, None]
    else:
        log_variance = learned_log_variance(diffusion, values, t)
    return jnp.mean(
        gaussian_kl(true_mean, true_log_variance, mean, log_variance), axis=(1, 2, 3)
    ) / math.log(2)


def select_probes(
    deltas: Float[Array, 'memory steps'], count: Int[Array, ''], probes: int
) -> Int[Array, ' probes']:
    """Returns the timesteps whose Δ_t correlate best, in magnitude, with Σ_t Δ_t.

    Args:
      deltas: ring buffer of measurements.
      count: number of measurements made; rows beyond it are ignored.
      probes: number of timesteps to return.
    """
    valid = (jnp.arange(deltas.shape[0]) < count).astype(jnp.float32)[:, None]
    number = jnp.sum(valid)

    def centred(x: Array) -> Array:
        return (x - jnp.sum(x * valid, axis=0, keepdims=True) / number) * valid

    x, y = centred(deltas), centred(jnp.sum(deltas, axis=1, keepdims=True))
    covariance = jnp.sum(x * y, axis=0)
    correlation = jnp.square(covariance) / jnp.maximum(
        jnp.sum(jnp.square(x), axis=0) * jnp.sum(jnp.square(y)), 1e-30
    )
    return jax.lax.top_k(correlation, probes)[1].astype(jnp.int32)


def reinforce(
    config: Config,
    policy: Policy,
    keys: Key[Array, ' batch'],
    x0: Images,
    reward: PerSample,
    axis_name: str | None,
) -> Policy:
    """Takes one Adam step that increases mean(log π(u | x) reward + η H(π(· | x))).

    Args:
      keys: keys that drew the timesteps; they give the same u again.
      x0: this device's clean images.
      reward: Σ_{t∈S} Δ_t of each image.
      axis_name: mapped axis over which gradients are averaged; None on one device.
    """
    u = draw_from_policy(policy.params, keys, x0, steps=config.diffusion.steps)[0]

    def objective(params: Params) -> Array:
        a, b = propose(params, x0)
        return -jnp.mean(
            log_density(u, a, b) * reward + config.timesteps.policy_entropy * entropy(a, b)
        )

    gradient = jax.grad(objective)(policy.params)
    if axis_name is not None:
        gradient = jax.lax.pmean(gradient, axis_name)
    # Optax relies on implicit promotion.
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        updates, moments = _optimizer(config).update(gradient, policy.optimizer)
    return policy._replace(params=optax.apply_updates(policy.params, updates), optimizer=moments)


def measure_policy(config: Config, diffusion: Diffusion, policy: Policy, event: Event) -> Policy:
    """Measures every `policy_every`-th optimizer step and updates the policy by its reward."""
    due = event.step % config.timesteps.policy_every == 0
    return jax.lax.cond(due, lambda p: _measure(config, diffusion, p, event), lambda p: p, policy)


def _measure(config: Config, diffusion: Diffusion, policy: Policy, event: Event) -> Policy:
    noise_key, row_key = jax.random.split(event.key)
    delta = _image_drops(config, diffusion, event, noise_key, row_key)
    reward = _probe_drops(diffusion, policy.probes, event)
    policy = reinforce(config, policy, event.keys, event.x0, reward, event.axis_name)
    deltas = policy.deltas.at[policy.measured % policy.deltas.shape[0]].set(delta)
    count = policy.measured + 1
    # Two points always lie on a line: with two measurements, every timestep would correlate
    # perfectly and rounding would decide.
    probes = jnp.where(
        count > 2, select_probes(deltas, count, policy.probes.shape[0]), policy.probes
    )
    return policy._replace(deltas=deltas, measured=count, probes=probes)


def _drop(
    diffusion: Diffusion, event: Event, x0: Images, labels: Array | None, t: Steps, keys: Array
) -> PerSample:
    """Returns Δ_t of each image, with the same noise before and after the optimizer step."""
    noise = jax.vmap(lambda k: jax.random.normal(k, x0.shape[1:], jnp.float32))(keys)
    xt = q_sample(diffusion, x0, t, noise)
    before, after = (
        bound_terms(diffusion, event.predict(params, x0, xt, t, labels), x0, xt, t)
        for params in (event.before, event.after)
    )
    return before - after


def _image_drops(
    config: Config, diffusion: Diffusion, event: Event, noise_key: Array, row_key: Array
) -> Float[Array, ' steps']:
    """Returns Δ_t of one image of the global batch at all t; each device computes a share of t."""
    steps, chunk, axis = diffusion.steps, event.chunk, event.axis_name

    def total(x: Array) -> Array:
        return x if axis is None else jax.lax.psum(x, axis)

    mine = event.row == jax.random.randint(row_key, (), 0, config.data.batch_size)
    image = total(jnp.sum(jnp.where(mine[:, None, None, None], event.x0, 0.0), axis=0))
    label = None if event.labels is None else total(jnp.sum(jnp.where(mine, event.labels, 0)))
    share = math.ceil(steps / event.devices / chunk) * chunk
    place = 0 if axis is None else jax.lax.axis_index(axis).astype(jnp.int32) * share
    t = jnp.minimum(place + jnp.arange(share, dtype=jnp.int32), steps - 1)

    def part(t: Steps) -> PerSample:
        images = jnp.broadcast_to(image[None], (chunk, *image.shape))
        labels = None if label is None else jnp.full(chunk, label)
        keys = jax.vmap(lambda i: jax.random.fold_in(noise_key, i))(t)
        return _drop(diffusion, event, images, labels, t, keys)

    delta = jax.lax.map(part, t.reshape(-1, chunk)).reshape(share)
    if axis is not None:
        delta = jax.lax.all_gather(delta, axis, tiled=True)
    return delta[:steps]


def _probe_drops(diffusion: Diffusion, probes: Int[Array, ' probes'], event: Event) -> PerSample:
    """Returns Σ_{t∈S} Δ_t of each of this device's images."""

    def probe(t: Array) -> PerSample:
        def some(index: Array) -> PerSample:
            labels = None if event.labels is None else event.labels[index]
            keys = jax.vmap(lambda k: jax.random.fold_in(k, t))(event.keys[index])
            return _drop(diffusion, event, event.x0[index], labels, jnp.full(event.chunk, t), keys)

        rows = jnp.arange(event.row.shape[0]).reshape(-1, event.chunk)
        return jax.lax.map(some, rows).reshape(-1)

    return jnp.sum(jax.lax.map(probe, probes), axis=0)
