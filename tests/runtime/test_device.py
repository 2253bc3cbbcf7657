"""The properties of the device on which the choice of kernels depends."""

import types

import jax
import jax.numpy as jnp
import pytest

from jaxunet.runtime import device
from pallas_kernels import hopper_grid
from xla_ffi.conv3x3 import parameter_gradients as gradients


def gpu(**fields):
    known = {'platform': 'gpu', 'compute_capability': '9.0', 'device_kind': 'some GPU'}
    return types.SimpleNamespace(**(known | fields))


@pytest.mark.parametrize(
    ('here', 'found'),
    [(gpu(core_count=114), 114), (gpu(), 132), (gpu(platform='cpu', core_count=4), 132)],
)
def test_multiprocessors_are_those_of_this_gpu(monkeypatch, here, found):
    monkeypatch.setattr(jax, 'devices', lambda: [here])
    assert device.multiprocessors(132) == hopper_grid.multiprocessors() == found
    dy = jnp.zeros((64, 8, 8, 16))
    extra = (2 * 64 + gradients.PARTIAL_SHIFTS) * 16
    assert gradients._workspace(dy, 10**6) == found * gradients.PARTIAL_SUMS + extra


def test_elsewhere_they_are_unknown(monkeypatch):
    monkeypatch.setattr(jax, 'devices', lambda: [gpu(core_count=114)])
    assert device.multiprocessors(132) == 114
    monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
    with device.use(device.Target.HOPPER, 'NVIDIA H200'):  # lowered on a machine without it
        assert device.multiprocessors(132) == 132
