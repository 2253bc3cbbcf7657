"""`tools/gpu/fp8.py`: how its backends round, which operands they round, and its rows and table."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.merging import assert_equal, calls

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops
from jaxunet.runtime import plugins, rows
from tools.gpu import fp8, fp8_ops
from tools.gpu.fp8_ops import E4M3, E5M2
from xla_ffi.weight_gradients.grouping import TARGET, grouped
from xla_ffi.weight_gradients.selection import CONVOLUTION

FORMATS = (E4M3, E5M2)
FEATURES = pathlib.Path(__file__).parents[2] / 'docs/results/digits/features.npz'
GRADIENTS = {'fp8-forward': None, 'fp8-e4m3': E4M3, 'fp8-e5m2': E5M2}
ROUNDING = {one.name: one for one in fp8_ops.BACKENDS.values() if one.name in GRADIENTS}


def quantized(x, to, scale=None):
    """`fp8_ops.quantized` by ml_dtypes."""
    wide = np.asarray(x, np.float32)
    scale = 2.0 ** np.floor(np.log2(to.most / np.abs(wide).max())) if scale is None else scale
    narrow = np.clip(wide * np.float32(scale), -to.most, to.most).astype(to.dtype)
    return jnp.asarray(narrow.astype(np.float32) / np.float32(scale), x.dtype)


def test_rounding_is_that_of_the_type(monkeypatch):
    """Inside jit. Other subnormals, other largest numbers and other steps are noticed."""
    fp8_ops.check_rounding()
    assert np.isnan(fp8_ops.rounded(jnp.float32(np.nan), E4M3))
    for wrong in (E4M3._replace(least=-5), E4M3._replace(most=240.0), E5M2._replace(mantissa=3)):
        monkeypatch.setattr(fp8_ops, 'E4M3', wrong)
        with pytest.raises(AssertionError, match='Mismatched elements'):
            fp8_ops.check_rounding()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('to', FORMATS, ids=['e4m3', 'e5m2'])
def test_scales_are_powers_of_two_that_fill_the_type(to, dtype):
    x = jax.random.normal(jax.random.key(0), (1000,))
    x = (x / jnp.abs(x).max()).astype(dtype)
    compiled = jax.jit(fp8_ops.quantized, static_argnums=(1, 2))
    for most in (to.most, to.most * (1 + 2**-7), 1e-6, 3.0, 1e9):
        given = x * jnp.asarray(most, dtype)
        found = compiled(given, to, None)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, quantized(given, to))
        fixed = compiled(given, to, fp8_ops.SCALE)
        np.testing.assert_array_equal(fixed, quantized(given, to, fp8_ops.SCALE))
    np.testing.assert_array_equal(compiled(jnp.zeros(3), to, None), np.zeros(3))


def convolution(dtype, channels=8, features=16):
    """A convolution of two parts with a shift per sample and a shortcut, and dy."""
    keys = jax.random.split(jax.random.key(1), 6)
    x, y, r, dy = (
        2 * jax.random.normal(key, (2, 5, 6, size)).astype(dtype)
        for key, size in zip(keys, (channels // 2, channels // 2, 5, features), strict=False)
    )
    conv = Convolution(
        image=Activation((x, y)),
        kernel=(0.1 * jax.random.normal(keys[4], (3, 3, channels, features))).astype(dtype),
        shift=jax.random.normal(keys[5], (2, features)),
        residual=Activation.of(r),
        shortcut=jnp.ones((5, features), dtype),
    )
    return conv, Activation.of(dy)


def close(found, wanted):
    def compare(a, b):
        assert a.dtype == b.dtype
        tolerance = 1e-5 if a.dtype == jnp.float32 else 2**-7
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())

    jax.tree.map(compare, found, wanted)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', ROUNDING)
def test_which_operands_are_rounded(name, dtype):
    """Weight gradients, and those of shift and shortcut, are those of unrounded operands."""
    conv, dy = convolution(dtype)
    op, to = ROUNDING[name].ops['conv3x3'], GRADIENTS[name]

    @jax.jit
    def run(conv, dy):
        y, pull = jax.vjp(op, conv)
        return y, pull(dy)[0]

    found, gradients = run(conv, dy)
    narrow = dataclasses.replace(
        conv,
        image=Activation.of(quantized(conv.image.value, E4M3, fp8_ops.SCALE)),
        kernel=quantized(conv.kernel, E4M3),
    )
    close(found, XLA.conv3x3(narrow))
    _, pull = jax.vjp(XLA.conv3x3, conv)
    (wanted,) = pull(dy)
    if to is not None:
        _, pull = jax.vjp(XLA.conv3x3, dataclasses.replace(conv, kernel=narrow.kernel))
        (rounded,) = pull(Activation.of(quantized(dy.value, to)))
        wanted = dataclasses.replace(wanted, image=rounded.image)
    close(gradients, wanted)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_norm_comes_before_the_rounding(dtype):
    conv, _ = convolution(dtype)
    conv = dataclasses.replace(conv, norm=Norm(jnp.ones((1, 8)), jnp.zeros((1, 8)), 2))
    active = XLA.group_norm(conv.image, conv.required_norm, silu=True)
    y, passed = fp8_ops.FORWARD.ops['norm_silu_conv3x3_and_input'](conv, copies=2)
    close(y, fp8_ops.FORWARD.ops['conv3x3'](conv.of(active)))
    assert passed == (conv.image,) * 2
    close(fp8_ops.FORWARD.ops['norm_silu_conv3x3'](conv), y)
    assert np.abs(y.value - XLA.norm_silu_conv3x3(conv).value).max() > 0.01


@pytest.mark.parametrize('shape', [(4, 16), (16, 3)])
def test_few_channels_are_not_rounded(shape):
    conv, _ = convolution('float32', *shape)
    for one in fp8_ops.BACKENDS.values():
        np.testing.assert_array_equal(one.ops['conv3x3'](conv).value, XLA.conv3x3(conv).value)
        norm = Norm(jnp.ones((1, shape[0])), jnp.zeros((1, shape[0])), 2)
        active = dataclasses.replace(conv, norm=norm)
        for op in ('norm_silu_conv3x3', 'norm_silu_conv3x3_and_input'):
            found, wanted = (ops[op](active) for ops in (one.ops, XLA._asdict()))
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_without_rounding_it_is_the_plain_op(dtype):
    conv, dy = convolution(dtype)
    conv = dataclasses.replace(conv, norm=Norm(jnp.ones((1, 8)), jnp.zeros((1, 8)), 2))
    (y, pull), (wanted, pull_wanted) = (
        jax.vjp(op, conv) for op in (fp8_ops.NONE.ops['norm_silu_conv3x3'], XLA.norm_silu_conv3x3)
    )
    found = (y, pull(dy)), (wanted, pull_wanted(dy))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.extension
@pytest.mark.parametrize('one', fp8_ops.BACKENDS.values(), ids=lambda one: one.name)
def test_weight_gradients_are_merged(one, monkeypatch):
    """On the CUDA kernels: one call computes the weight gradients of both layers."""
    cuda = plugins.load_backend('cuda').ops
    ops = Ops(**{name: cuda.get(name, getattr(XLA, name)) for name in Ops._fields})
    monkeypatch.setattr(fp8_ops, 'base', lambda: ops)
    conv, _ = convolution('bfloat16', 16, 16)
    conv = dataclasses.replace(conv, norm=Norm(jnp.ones((1, 16)), jnp.zeros((1, 16)), 2))

    def network(kernels, x):
        first = dataclasses.replace(conv, image=x, kernel=kernels[0])
        y, _ = one.ops['norm_silu_conv3x3_and_input'](first)
        second = dataclasses.replace(conv, image=y, kernel=kernels[1])
        return jnp.sum(one.ops['norm_silu_conv3x3'](second).value.astype(jnp.float32) ** 2)

    gradient, kernels = jax.grad(network), (conv.kernel, 2 * conv.kernel)
    assert calls(gradient, kernels, conv.image)[CONVOLUTION] == 2
    found = calls(grouped(gradient), kernels, conv.image)
    assert (found[TARGET], found.get(CONVOLUTION)) == (1, None)
    assert_equal(gradient, kernels, conv.image)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of outputs; the process afterwards is as before."""
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(fp8, 'interrupt_when_terminated', lambda: None)
    monkeypatch.setattr(fp8.compiled_cache, 'enable_compilation_cache', lambda: None)
    yield tmp_path
    for function in (plugins.backend_entry_points, plugins.load_backend):
        function.cache_clear()


def test_runs_and_their_table(folder, capsys):
    """Seeds share a compiled step; the same command again trains nothing."""
    compiled = []

    def compile_step(*arguments, **options):
        compiled.append(arguments[0].config.seed)
        return one_step(*arguments, **options)

    flags = ['--jobs', 'digits', '--steps', '20', '--features', str(FEATURES)]
    flags += ['--output', str(folder / '1'), '--variants']
    one_step = fp8.Parallel.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8.Parallel, 'compile', compile_step)
        assert fp8.main([*flags, 'bf16', '--seeds', '3', '4']) == 0
        assert compiled == [3]
        assert fp8.main([*flags, 'bf16', 'e4m3', '--seeds', '3']) == 0
        assert compiled == [3, 3]
    assert fp8.Parallel.compile is one_step
    found = {(row['case'], row['seed']): row for row in rows.read(folder / 'fp8.jsonl')}
    bf16, other, e4m3 = found['bf16', 3], found['bf16', 4], found['e4m3', 3]
    assert len(found) == 3
    assert {row['step'] for row in found.values()} == {20}
    assert e4m3['fields']['backend'].endswith('norm_silu_conv3x3=fp8-e4m3')
    assert 0 < abs(e4m3['loss'] / bf16['loss'] - 1) < 0.01
    assert abs(other['loss'] / bf16['loss'] - 1) > 0.01
    assert 0 < e4m3['rms'] < 0.1
    assert capsys.readouterr().out.count('| digits | 20 | e4m3 | 3 |') == 1


def test_table_compares_runs_of_the_same_seed():
    every = [
        {'data': 'd', 'step': 9, 'case': case, 'seed': seed, 'loss': loss, 'ms': 1.0}
        for case, losses in {'forward': {0: 2.2, 1: 4.4}, 'bf16': {0: 2.0, 1: 4.0, 2: 9}}.items()
        for seed, loss in losses.items()
    ]
    header, _, first, second = fp8.report(every).splitlines()
    assert header.split(' | ')[4] == 'loss, last tenth'
    assert first.split(' | ')[2:5] == ['bf16', '0, 1, 2', '5 ± 2.1']
    assert second.split(' | ')[2:5] == ['forward', '0, 1', '3.3 ± 1.1 (1.1000 ± 0)']
