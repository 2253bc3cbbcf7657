"""Fixes the types and the random generator of JAX, whatever the process has chosen.

Environment variables such as JAX_ENABLE_X64 and JAX_DEFAULT_PRNG_IMPL change what `jnp.arange` and
`jax.random.key` return. A run must not depend on them: its state has fixed types, and a resumed run
continues it bit for bit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

OURS: dict[str, Any] = {
    'jax_enable_x64': False,
    'jax_default_prng_impl': 'threefry2x32',
    'jax_threefry_partitionable': True,
    'jax_random_seed_offset': 0,
}

# Context managers of the caller's thread, which are stronger than the settings for all threads.
OF_A_THREAD: dict[str, Callable[[Any], contextlib.AbstractContextManager[object]]] = {
    'jax_enable_x64': jax.enable_x64,
    'jax_default_prng_impl': jax.default_prng_impl,
    'jax_threefry_partitionable': jax.threefry_partitionable,
}
_lock = threading.Lock()
_blocks = 0  # of all threads
_before: dict[str, Any] = {}  # settings of the process, while there are blocks


@contextlib.contextmanager
def fixed_jax_settings() -> Iterator[None]:
    """Sets `OURS` for all threads during the block; also a decorator.

    Threads may have blocks at once; the last to end restores what was set before the first.
    """
    with contextlib.ExitStack() as stack:
        _enter()
        stack.callback(_leave)
        for name, context in OF_A_THREAD.items():
            if getattr(jax.config, name) != OURS[name]:
                stack.enter_context(context(OURS[name]))
        yield


def _enter() -> None:
    global _blocks  # noqa: PLW0603
    with _lock:
        if not _blocks:
            _in_a_new_thread(_keep)
        _in_a_new_thread(lambda: _set(OURS))
        _blocks += 1  # not where no thread could start: such a block has no end


def _leave() -> None:
    global _blocks  # noqa: PLW0603
    with _lock:
        _blocks -= 1
        if not _blocks:
            _in_a_new_thread(lambda: _set(_before))


def _in_a_new_thread(function: Callable[[], None]) -> None:
    """Calls a function where the settings are those of the process, not of the caller's thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _keep() -> None:
    _before.update({name: jax.config.values[name] for name in OURS})


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
