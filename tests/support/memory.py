"""Keeps a test worker's memory small."""

import ctypes
import gc
import sys

import jax

STEPS: dict[str, jax.stages.Compiled] = {}  # those of `shared_steps`


def drop_compiled_programs() -> None:
    """Frees compiled programs that no test holds; the cache on disk keeps them."""
    STEPS.clear()
    jax.clear_caches()
    gc.unfreeze()  # objects that were frozen alive, compiled programs among them
    gc.collect()
    gc.freeze()
    if sys.platform == 'linux':
        getattr(ctypes.CDLL(None), 'malloc_trim', lambda _: 0)(0)  # glibc keeps what is freed
