"""The optimizer of a config, its learning rate, and the moments in its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxunet.checkpoint.muon import matrix_steps, muon
from jaxunet.config import Config, diff
from jaxunet.model.unet import Params

Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')

# Adam's update count for moments that come without a count, as in unet.cu's files. It is so large
# that the bias correction is 1.
CONVERGED_COUNT = 1_000_000
RATE_FIELDS = ('optimizer.', 'train.steps')  # what a learning rate depends on
COOLDOWN = 0.25  # share of a run in which optimizer.schedule=cooldown falls
LARGEST_RATE_CHANGE = 0.1  # between two runs at one step, as a share of the larger rate


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
    constant, or falls to 0 at `train.steps` (`optimizer.schedule`): as a cosine, as a line, or as a
    line over the last quarter of the run (`cooldown`).
    """
    options, steps = config.optimizer, config.train.steps
    rest = max(steps - options.warmup_steps, 1)
    falling = min(max(round(COOLDOWN * steps), 1), rest)
    after = {
        'constant': optax.constant_schedule(options.learning_rate),
        'cosine': optax.cosine_decay_schedule(options.learning_rate, rest),
        'linear': optax.linear_schedule(options.learning_rate, 0.0, rest),
        'cooldown': optax.linear_schedule(options.learning_rate, 0.0, falling, rest - falling),
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
    rule = optax.adamw(
        schedule,
        b1=options.betas[0],
        b2=options.betas[1],
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    if options.name == 'muon':
        rule = muon(matrix_steps(config, schedule), rule)
    return optax.GradientTransformation(rule.init, _lenient(rule.update))


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
