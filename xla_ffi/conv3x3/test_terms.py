"""Float32 convolutions from bfloat16 terms, as on Hopper, with the CPU's handlers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conv3x3 import inputs, op
from support.products import with_gradients

from jaxunet.ops.conv3x3.cases import Case
from jaxunet.runtime import device
from xla_ffi.conv3x3 import calls, vjp

CASES = (
    Case(5, 6, (8,), 16, norm=False, batch=2),
    Case(4, 7, (8, 16), 24, (24,), groups=4, batch=3, per_sample=True),
    Case(6, 4, (16, 8), 8, (8, 16), groups=4, batch=2),
)


def results(case: Case, arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    y = op(vjp, case)(**arrays)
    dy = jax.random.normal(jax.random.key(1), y.shape)
    both = jax.jit(lambda a, dy: with_gradients(op(vjp, case), a, dy, gradients=True))
    out, pulled = both(arrays, dy)
    return {'y': np.asarray(out)} | {k: np.asarray(v) for k, v in pulled.items()}


@pytest.mark.extension
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_terms_give_the_same_results_to_16_bits(case, monkeypatch):
    arrays = {
        name: jnp.asarray(value, kind)
        for name, (value, kind) in inputs(case, 'float32', case.batch).items()
    }
    exact = results(case, arrays)
    monkeypatch.setattr(device, 'family', lambda: device.Target.HOPPER)
    found = results(case, arrays)
    differ = 0
    for name, want in exact.items():
        error = np.abs(found[name] - want).max() / np.sqrt(np.mean(want**2))
        assert error < 2.0**-12, name
        differ += bool(error)
    assert differ >= 4  # y and the gradients of x, kernel and the norm


@pytest.mark.parametrize(
    ('shape', 'features', 'dtype', 'taken'),
    [
        ((2, 4, 4, 8), 8, 'float32', True),
        ((2, 4, 4, 8), 8, 'bfloat16', False),
        ((2, 3, 4, 8), 8, 'float32', False),
        ((2, 4, 4, 3), 8, 'float32', False),
        ((2, 4, 4, 8), 3, 'float32', False),
    ],
)
def test_the_shapes_that_are_computed_from_terms(shape, features, dtype, taken, monkeypatch):
    image = jnp.zeros(shape, dtype)
    assert not calls.uses_terms((image,), features)  # this machine has no Hopper GPU
    monkeypatch.setattr(device, 'family', lambda: device.Target.HOPPER)
    assert calls.uses_terms((image,), features) == taken
