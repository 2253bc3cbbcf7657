"""A step with the CUDA backend computes its small weight gradients in one call on Hopper."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import runpy
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_names
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.config import Config, resolve
from jaxunet.data.source import Source
from jaxunet.model.unet import Params, build_unet, init_params
from jaxunet.ops import backends
from jaxunet.ops.backends import choose
from jaxunet.runtime import device, plugins
from jaxunet.training import all_reduce
from jaxunet.training.all_reduce import computed_last
from xla_ffi.weight_gradients.grouping import TARGET, grouped
from xla_ffi.weight_gradients.selection import CONVOLUTION, LINEAR

pytestmark = pytest.mark.extension

ROOT = pathlib.Path(__file__).parents[2]


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


@pytest.mark.parametrize('count', [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_step_calls_one_handler_and_trains_alike(
    count: int, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several micro-batches, the call is inside their loop."""
    changed = config(optimizer={'accumulate_steps': count})
    losses, states = [], []
    for transform in (plugins.unchanged, lambda function, _: grouped(function)):
        with monkeypatch.context() as patch:
            patch.setattr(backends, 'checked_transform', lambda _, t=transform: t)
            bench = Bench(changed, source, shared=False)
            found = calls(bench.lowered)
            own_sums = 'samples = true' in bench.lowered.as_text()
        losses.append(bench.losses())
        states.append(jax.tree.map(np.asarray, bench.state.params))
        if transform is plugins.unchanged:
            assert own_sums
            assert found[CONVOLUTION] > 10
            assert found[LINEAR] >= 4
            assert TARGET not in found
        else:
            assert found == {TARGET: 1}
            assert not own_sums
    assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize('mode', ['jit', pytest.param('pmap', marks=pytest.mark.long)])
def test_several_devices_sum_most_gradients_before_the_last_call(
    mode: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute the same bits as with a call for each gradient."""
    changed = config(parallel={'devices': 2, 'mode': mode})
    alone = Bench(changed, source, shared=False)
    with on_hopper(monkeypatch):
        merged = Bench(changed, source, shared=False)
        program = merged.lowered.as_text()
    assert TARGET not in calls(alone.lowered)
    assert calls(merged.lowered) == {TARGET: 2}
    order = re.findall(r'stablehlo.(all_reduce|optimization_barrier)', program)
    assert order == ['all_reduce', 'optimization_barrier', 'all_reduce', 'all_reduce']  # the loss
    assert alone.losses() == merged.losses()
    states = [jax.tree.map(np.asarray, bench.state.params) for bench in (alone, merged)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ('changes', 'simultaneous'),
    [
        ({}, True),
        ({'precision': 'float32'}, False),
        ({'model': {'channel_mult': (1, 2), 'remat': True}}, False),
        ({'optimizer': {'accumulate_steps': 2}, 'precision': 'float32'}, True),
    ],
)
def test_gradients_that_become_known_one_by_one_fill_several_arrays(
    changes: dict[str, object], simultaneous: bool, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, 'FULL', 1000)
    with on_hopper(monkeypatch):
        lowered = Bench(config(parallel={'devices': 2}, **changes), source, shared=False).lowered
    sums = lowered.as_text().count('stablehlo.all_reduce')
    assert sums == 3 if simultaneous else sums > 5


@pytest.mark.parametrize('name', ['elephants64', 'cifar10', 'imagenet64'])
def test_the_last_call_computes_no_gradient_that_is_summed_early(name: str) -> None:
    """Its gradients are packed apart from the others, which are most."""
    values = runpy.run_path(str(ROOT / 'configs' / f'{name}.py'))['get_config']()
    full = resolve(values).replace(backend='cuda', precision='bfloat16')
    model = build_unet(full, choose('cuda', here=False).ops)
    params = jax.eval_shape(lambda: init_params(model, full, jax.random.key(0)))
    images = jnp.zeros((2, *full.image_shape))
    labels = jnp.zeros(2, jnp.int32) if full.model.num_classes else None

    def loss(params: Params) -> jax.Array:
        return jnp.sum(model.predict(params, images, jnp.zeros(2, jnp.int32), labels))

    jaxpr = jax.make_jaxpr(grouped(jax.grad(loss), last_apart=True))(params).jaxpr
    last = [e for e in jaxpr.eqns if e.params.get('target_name') == TARGET][1:]
    assert len(last) == 1
    late = set(last[0].outvars)
    for equation in jaxpr.eqns:
        if not late.isdisjoint(v for v in equation.invars if isinstance(v, jax.extend.core.Var)):
            late.update(equation.outvars)
    told = computed_last(params)
    found = [var in late for var in jaxpr.outvars]
    assert sum(found) > 5
    assert not [late for late, known in zip(found, told, strict=True) if late and not known]
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert sum(s for s, late in zip(sizes, found, strict=True) if late) < 0.1 * sum(sizes)
    assert sum(s for s, known in zip(sizes, told, strict=True) if known) < 0.11 * sum(sizes)


def test_several_devices_merge_micro_batches_in_one_call(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are summed after the last micro-batch."""
    changed = config(parallel={'devices': 2}, optimizer={'accumulate_steps': 2})
    with on_hopper(monkeypatch):
        assert calls(Bench(changed, source, shared=False).lowered) == {TARGET: 1}


def test_only_hopper_merges_calls() -> None:
    transform = choose('cuda', here=False).transform
    assert transform(abs) is abs
    with device.use(device.Target.PORTABLE):
        assert transform(abs) is abs
    with device.use(device.Target.HOPPER):
        assert transform(abs) is not abs


@pytest.mark.parametrize(
    'backend', ['xla', 'pallas', 'cuda+conv3x3=xla', 'cuda+norm_silu_conv3x3=pallas']
)
def test_other_backends_change_nothing(backend: str) -> None:
    with device.use(device.Target.HOPPER):
        assert choose(backend, here=False).transform(abs) is abs


def test_a_backend_need_not_transform_gradients() -> None:
    fields = {field.name: field for field in dataclasses.fields(plugins.Backend)}
    assert fields['transform_gradients'].default(abs) is abs
    assert fields['transform_gradients'].default(abs, 2) is abs
