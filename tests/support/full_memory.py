"""Makes devices really run out of memory: JAX asks for more than any device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BYTES = 2**47


def exhaust(*_: object, **__: object) -> None:
    """Raises JAX's error for a device without memory, by asking for an array of 128 TiB."""
    jax.block_until_ready(jnp.zeros(BYTES, jnp.uint8))


def exhausting(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training step that consumes its state like `step`, and then runs out of memory."""

    def failing(state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        del data
        metrics = {name: jnp.zeros(BYTES, jnp.uint8) for name in ('bad_steps', 'loss')}
        return state, metrics

    del step
    return jax.jit(failing, donate_argnums=0)
