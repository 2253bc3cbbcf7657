"""Channels are padded with zeros for the Hopper kernels: results and gradients equal the
reference's.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.conv3x3 import inputs, op
from support.mosaic import simulated
from support.parity import assert_parity

from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.cases import Case
from pallas_kernels.conv3x3 import dispatch, padding, vjp


@pytest.mark.parametrize(
    ('case', 'fused'),
    [
        (Case(8, 8, (3,), 64, (3,), norm=False, batch=2), False),
        (Case(9, 7, (32, 32), 3, (8, 12), groups=4, batch=2, per_sample=True), True),
        (Case(6, 6, (64,), 3, (3,), batch=2), False),
    ],
    ids=lambda v: getattr(v, 'name', v),
)
def test_padded_calls(case, fused, monkeypatch):
    """Parts, residuals with and without a shortcut, and an activation inside the convolution."""
    monkeypatch.setattr(dispatch, 'FUSED_PIXELS', 0 if fused else 1024)
    with simulated():
        assert_parity(op(vjp, case), op(reference, case), inputs(case, 'bfloat16', case.batch))


def test_zeros_follow_each_part():
    x = jnp.arange(1.0, 13.0).reshape(2, 6)
    padded = padding.append(x, 4, widths=(1, 4, 1))
    np.testing.assert_array_equal(padded[0], [1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0])
    np.testing.assert_array_equal(padding.remove(padded, 4, (1, 4, 1)), x)
    assert padding.append(x, 3, widths=(3, 3)) is x
    assert padding.remove(x, 4, (6,)) is x
