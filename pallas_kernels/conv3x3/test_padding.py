"""Without Triton, channels are padded with zeros for the Hopper kernels: they accept the padded
operands, and results and gradients equal the reference's.

XLA replaces the Hopper convolutions, which cannot run on a CPU; `parity_test` runs them on a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conv3x3 import inputs, op
from support.parity import assert_parity
from support.triton import lacking_triton

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.cases import Case
from jaxunet.runtime.device import Target, use
from pallas_kernels import jax_modules
from pallas_kernels.conv3x3 import dispatch, hopper, hopper_weight_gradient, padding, vjp
from pallas_kernels.group_norm import hopper as norm_hopper
from pallas_kernels.group_norm import hopper_plan


def forward(parts, kernel, shift, *, residual, shortcut, affine, flipped):
    if affine is not None:
        a, b = (v[:, None, None].astype(jnp.float32) for v in affine)
        x = jnp.concatenate(parts, -1).astype(jnp.float32)
        parts = (jax.nn.silu(a * x + b).astype(parts[0].dtype),)
    return reference.conv3x3(
        Activation(parts),
        dispatch.flip(kernel) if flipped else kernel,
        shift,
        residual=Activation(residual) if residual else None,
        shortcut=shortcut,
    ).value


def weight_gradient(parts, dy):
    x = jnp.concatenate(parts, -1)
    zero = jnp.zeros((3, 3, x.shape[-1], dy.shape[-1]), x.dtype)
    shift = jnp.zeros((1, dy.shape[-1]), jnp.float32)
    _, pull = jax.vjp(lambda k: reference.conv3x3(Activation.of(x), k, shift).value, zero)
    return pull(dy)[0].astype(jnp.float32)


def channel_sums(x):
    assert hopper_plan.supports([x]) is None
    return jnp.sum(x, axis=(1, 2), dtype=jnp.float32)


@pytest.fixture
def without_triton(monkeypatch):
    """Reports that JAX lacks Triton; convolutions run in XLA, and GroupNorm interpreted."""

    def on_hopper(name, problem, *, interpret=False):
        del interpret
        if name == 'group_norm':
            return False
        assert problem() is None
        return True

    monkeypatch.setattr(jax_modules, 'runs_hopper', lambda: True)
    monkeypatch.setattr(jax_modules, 'on_hopper', on_hopper)
    monkeypatch.setattr(hopper, 'forward', forward)
    monkeypatch.setattr(hopper_weight_gradient, 'weight_gradient', weight_gradient)
    monkeypatch.setattr(norm_hopper, 'channel_sums', channel_sums)
    with lacking_triton(), use(Target.INTERPRET):
        yield


@pytest.mark.usefixtures('without_triton')
@pytest.mark.parametrize(
    ('case', 'fused'),
    [
        (Case(8, 8, (3,), 64, (3,), norm=False, batch=2), False),
        (Case(9, 7, (32, 12), 3, (8, 12), groups=4, batch=2, per_sample=True), True),
        (Case(6, 6, (64,), 3, (3,), batch=2), False),
    ],
    ids=lambda v: getattr(v, 'name', v),
)
def test_padded_calls(case, fused, monkeypatch):
    """Parts, residuals with and without a shortcut, and an activation inside the convolution."""
    monkeypatch.setattr(dispatch, 'FUSED_PIXELS', 0 if fused else 1024)
    assert_parity(op(vjp, case), op(reference, case), inputs(case, 'bfloat16', case.batch))


def test_zeros_follow_each_part():
    x = jnp.arange(1.0, 13.0).reshape(2, 6)
    padded = padding.append(x, 4, widths=(1, 4, 1))
    np.testing.assert_array_equal(padded[0], [1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0])
    np.testing.assert_array_equal(padding.remove(padded, 4, (1, 4, 1)), x)
    assert padding.append(x, 3, widths=(3, 3)) is x
    assert padding.remove(x, 4, (6,)) is x
