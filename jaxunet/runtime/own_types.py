"""Fixes the types and the random generator of JAX, whatever the process has chosen.

Environment variables such as JAX_ENABLE_X64 and JAX_DEFAULT_PRNG_IMPL change what `jnp.arange` and
`jax.random.key` return. A run must not depend on them: its state has fixed types, and a resumed run
continues it bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

OURS = {
    'jax_enable_x64': False,
    'jax_default_prng_impl': 'threefry2x32',
    'jax_threefry_partitionable': True,
    'jax_random_seed_offset': 0,
}


@contextlib.contextmanager
def own_types() -> Iterator[None]:
    """Sets `OURS` for all threads during the block; also a decorator."""
    before = {name: jax.config.values[name] for name in OURS}
    _set(OURS)
    with contextlib.ExitStack() as stack:
        stack.callback(_set, before)
        # A context manager of the caller's thread is stronger than the setting for all threads.
        if jax.config.jax_enable_x64:
            stack.enter_context(jax.enable_x64(False))
        if jax.config.jax_default_prng_impl != OURS['jax_default_prng_impl']:
            stack.enter_context(jax.default_prng_impl(OURS['jax_default_prng_impl']))
        if not jax.config.jax_threefry_partitionable:
            stack.enter_context(jax.threefry_partitionable(True))
        yield


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
