"""A step with the CUDA backend computes its small weight gradients in one call on Hopper."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from support import kernel_names
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.config import Config
from jaxunet.data.sources import Source, open_source
from jaxunet.ops.backends import transform_gradients
from jaxunet.runtime import device, plugins
from jaxunet.training import step
from xla_ffi.weight_gradients.grouping import CONVOLUTION, LINEAR, TARGET, grouped

pytestmark = pytest.mark.extension


@pytest.fixture(scope='module')
def source() -> Source:
    return open_source('digits:', image_shape=(8, 8, 1))


def config(**changes: object) -> Config:
    """A config with convolutions, shortcuts and linear layers in 16 bits."""
    model = {'channel_mult': (1, 2), 'attention_resolutions': (8,)}
    fixed = {'backend': 'cuda', 'precision': 'bfloat16', 'model': model}
    return tiny_config(**fixed | {'parallel': {'devices': 1}} | changes)


def calls(lowered: jax.stages.Lowered) -> dict[str, int]:
    found = kernel_names.count(lowered)
    return {name: found[name] for name in (TARGET, CONVOLUTION, LINEAR) if found[name]}


@contextlib.contextmanager
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups gradients as on Hopper, in a step for the handlers of this machine."""
    with monkeypatch.context() as patch:
        patch.setattr(device, 'family', lambda: device.Target.HOPPER)
        yield


@pytest.mark.parametrize('count', [1, 2])
def test_a_step_calls_one_handler_and_trains_alike(
    count: int, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several micro-batches, the call is inside their loop."""
    changed = config(optimizer={'accumulate_steps': count})
    losses, states = [], []
    for transform in (lambda function: function, grouped):
        with monkeypatch.context() as patch:
            patch.setattr(step, 'transform_gradients', lambda *_, t=transform: t)
            bench = Bench(changed, source, shared=False)
            found = calls(bench.lowered)
            own_sums = 'samples = true' in bench.lowered.as_text()
        losses.append(bench.losses())
        states.append(jax.tree.map(np.asarray, bench.state.params))
        if transform is grouped:
            assert found == {TARGET: 1}
            assert not own_sums
        else:
            assert own_sums
            assert found[CONVOLUTION] > 10
            assert found[LINEAR] >= 4
            assert TARGET not in found
    assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_only_one_device_merges_calls(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sum the first gradients while they compute others."""
    with on_hopper(monkeypatch):
        one = calls(Bench(config(), source, shared=False).lowered)
        two = calls(Bench(config(parallel={'devices': 2}), source, shared=False).lowered)
    assert one == {TARGET: 1}
    assert two[CONVOLUTION] > 10
    assert TARGET not in two


def test_only_hopper_merges_calls() -> None:
    transform = transform_gradients('cuda', 'bfloat16')
    assert transform(abs) is abs
    with device.use(device.Target.TRITON):
        assert transform(abs) is abs
    with device.use(device.Target.HOPPER):
        assert transform(abs) is not abs


@pytest.mark.parametrize(
    'backend', ['xla', 'pallas', 'cuda+conv3x3=xla', 'cuda+norm_silu_conv3x3=pallas']
)
def test_other_backends_change_nothing(backend: str) -> None:
    with device.use(device.Target.HOPPER):
        assert transform_gradients(backend, 'bfloat16')(abs) is abs


def test_a_backend_need_not_transform_gradients() -> None:
    fields = {field.name: field for field in dataclasses.fields(plugins.Backend)}
    assert fields['transform_gradients'].default(abs) is abs
