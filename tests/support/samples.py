"""Draws with all evaluations of a sampler in one call, for tests of samplers."""

from __future__ import annotations

import jax

from jaxunet.sampling.picture import Canvas, after_evaluation, make_schedule, start_state
from jaxunet.sampling.sampler import initial_state, run


def sample(denoise, keys, shape, sampler):
    """Returns images of this shape from noise, one a key; float32, about [−1, 1]."""
    return jax.jit(lambda keys: run(denoise, initial_state(keys, shape, sampler), keys, sampler).x)(
        keys
    )


def redrawn(denoise, keys, sampler, picture):
    """Returns images that start from a picture, one a key."""
    schedule, canvas = make_schedule(sampler, picture), Canvas.of(picture)

    def program(keys):
        return run(
            denoise,
            start_state(keys, schedule, canvas),
            keys,
            schedule.sampler,
            after=lambda x, k: after_evaluation(x, keys, schedule, canvas, k),
        ).x

    return jax.jit(program)(keys)
