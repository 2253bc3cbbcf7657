"""Gradients are reduced one by one, and XLA gets the options with which work overlaps."""

import types

import jax
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import fresh_state
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import choose
from jaxunet.training.all_reduce import OVERLAP
from jaxunet.training.compiler_options import CONCURRENT, WHOLE_GRAPH
from jaxunet.training.parallel import STOP, Parallel, stop_asked
from jaxunet.training.step import make_train_step


@pytest.mark.parametrize('mode', ['jit', 'pmap'])
def test_each_gradient_is_reduced_on_its_own(mode):
    """XLA can reduce those that are ready while the rest of the backward pass runs."""
    config = tiny_config(parallel={'mode': mode})
    kernels = choose('xla')
    parallel = Parallel(config, kernels)
    state = parallel.replicate(fresh_state(config))
    batch = {'image': np.zeros((8, 8, 8, 1), np.uint8), 'label': np.zeros(8, np.int32)}
    model, optimizer = build_unet(config, kernels.ops), make_optimizer(config)
    lowered = parallel.lower(
        lambda axis: make_train_step(
            config, model, make_diffusion(config.diffusion), optimizer, kernels, axis_name=axis
        ),
        state,
        parallel.put_batches([batch]),
    )
    reductions = [line for line in lowered.as_text().splitlines() if 'stablehlo.all_reduce' in line]
    assert len(reductions) == len(jax.tree.leaves(state.params)) + 1  # and the loss
    assert not any(
        ':' in line.split('=')[0] for line in reductions
    )  # %7:2 = ... would reduce two at once


def parallel_of(**changes):
    config = tiny_config(**changes)
    return Parallel(config, choose(config.backend, here=False))


def test_xla_knows_the_options_of_overlap():
    """Options for GPUs are parsed, and refused if unknown, on any device."""
    for name, value in (OVERLAP | WHOLE_GRAPH | CONCURRENT).items():
        assert int(jax.jit(lambda x: x + 1, compiler_options={name: value})(1)) == 2
    with pytest.raises(Exception, match='No such compile option'):
        jax.jit(lambda x: x + 1, compiler_options={'xla_gpu_overlap': True})(1)
    assert not parallel_of(backend='cuda').compiler_options  # on a CPU


SEVERAL = OVERLAP | WHOLE_GRAPH


@pytest.mark.parametrize(
    ('backend', 'batch', 'parallel', 'found'),
    [
        ('cuda', 8, {}, CONCURRENT),
        ('cuda+conv3x3=xla', 8, {}, CONCURRENT),
        ('cuda', 8, {'concurrent_kernels': False}, {}),
        ('cuda', 2**15, {}, {}),
        ('xla', 8, {}, {}),
        ('cuda', 8, {'devices': 2}, SEVERAL | CONCURRENT),
        ('cuda', 2**14, {'devices': 2}, SEVERAL | CONCURRENT),
        ('cuda', 2**15, {'devices': 2}, SEVERAL),
        ('cuda', 8, {'devices': 2, 'concurrent_kernels': False}, SEVERAL),
        ('xla', 8, {'devices': 2}, SEVERAL),
    ],
)
def test_kernels_overlap_where_it_helps(monkeypatch, backend, batch, parallel, found):
    parallel = {'devices': 1} | parallel
    step = parallel_of(backend=backend, data={'batch_size': batch}, parallel=parallel)
    step.devices = [types.SimpleNamespace(platform='gpu')] * parallel['devices']
    monkeypatch.delenv('XLA_FLAGS')
    assert step.compiler_options == found
    monkeypatch.setenv('XLA_FLAGS', ' '.join(f'--{name}=x' for name in found))
    assert step.compiler_options == {}


class Metric:
    """An array on a device: it can be copied to the host, but its methods run on the device."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def any(self, *arguments, **options):
        raise AssertionError('runs after the steps that are queued on the device')


def test_a_stop_is_read_without_a_program_on_the_device():
    assert stop_asked({STOP: Metric([0, 1])})
    assert not stop_asked({STOP: Metric([0, 0])})
    assert not stop_asked({})  # a run of one process


def test_several_processes_keep_the_default_graphs(monkeypatch):
    step = parallel_of(backend='cuda', parallel={'devices': 2})
    step.devices = [types.SimpleNamespace(platform='gpu')] * 2
    monkeypatch.delenv('XLA_FLAGS')
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert step.compiler_options == OVERLAP | CONCURRENT
