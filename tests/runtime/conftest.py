"""Fixtures of the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Restores JAX's settings of its compilation cache."""
    names = ('jax_enable_compilation_cache', 'jax_compilation_cache_dir')
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
