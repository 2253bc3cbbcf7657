"""A version of JAX without Pallas's Triton lowering, for tests of Hopper's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import pytest

from pallas_kernels import jax_modules


@contextlib.contextmanager
def lacking_triton() -> Iterator[None]:
    """Makes JAX seem to lack Triton in the block; a call that needs it is then an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax_modules, 'missing', lambda part: 'none here' if part is jax_modules.TRITON else None
        )
        jax.clear_caches()  # of functions that were traced with Triton
        yield
    jax.clear_caches()


@contextlib.contextmanager
def only_hopper() -> Iterator[None]:
    """Runs Hopper's kernels without Triton in the block; skips the test if they cannot run here."""
    if jax_modules.missing(jax_modules.MOSAIC) or not jax_modules.runs_hopper():
        pytest.skip("needs Hopper's kernels")
    with lacking_triton():
        yield
