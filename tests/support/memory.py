"""Keeps a test worker's memory small."""

import ctypes
import gc
import sys

import jax

STEPS: dict[str, jax.stages.Compiled] = {}  # the compiled steps of `shared_steps`


def drop_compiled_programs() -> None:
    """Frees compiled programs that no test holds; the cache on disk keeps them."""
    STEPS.clear()
    jax.clear_caches()
    gc.collect()  # not what conftest.py froze: modules and tests, which take most of the time
    if sys.platform == 'linux':
        getattr(ctypes.CDLL(None), 'malloc_trim', lambda _: 0)(0)  # glibc keeps freed memory
