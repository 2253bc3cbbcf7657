"""JAXUNET_KERNELS: every call of a handler says which kernels it may run, and nothing hides it."""

from __future__ import annotations

import functools
import random
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.handler_calls import HANDLERS, right

import xla_ffi
from jaxunet.benchmark import choose
from jaxunet.ops import backends, choices
from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Constants
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear.projections import Projection
from jaxunet.runtime import compiled_cache, device, rows
from jaxunet.runtime.device import VARIABLE, Target, use
from jaxunet.runtime.errors import UserError
from xla_ffi.weight_gradients.grouping import grouped

OPS = backends.choose('cuda', here=False).ops
HOPPER_ALONE = {
    'jaxunet_group_norm_statistics',
    'jaxunet_conv3x3_upsampled',
    'jaxunet_conv3x3_upsampled_weight_gradient',
}
CALL = re.compile(r'stablehlo\.custom_call @(jaxunet_\w+)\(.*?\{(.*)\}')


def network(x, kernel, row):
    """Every op of the UNet, on images whose norm Hopper's convolutions apply themselves."""
    image = Activation.of(x)
    (shift,) = OPS.project(x[:, 0, 0], [Projection(kernel[0, 0], (row[0],))])
    norm = Norm(row, row, 4)
    image = OPS.conv3x3(
        Convolution(image=image, kernel=kernel, shift=shift, residual=image, shortcut=kernel[0, 0])
    )
    image = OPS.norm_silu_conv3x3(Convolution(image=image, norm=norm, kernel=kernel, shift=row))
    dropout = Dropout(jnp.zeros((1, 2), jnp.uint32), 0.1)
    image = Activation.of(OPS.group_norm(image, norm, silu=True, dropout=dropout))
    y = OPS.linear(OPS.group_norm(image, norm), kernel[0, 0], row)
    tokens = OPS.attention(jnp.concatenate([y.reshape(1, -1, 16)[:, :8]] * 3, axis=2), num_heads=2)
    return jnp.sum(tokens.astype(jnp.float32)) + jnp.sum(y.astype(jnp.float32))


def upsampling(x, shift):
    """The convolution of an upsampled image of whole chunks of channels."""
    image = Activation.of(jnp.tile(x[:, :8, :8], (1, 1, 1, 4)))
    kernel = jnp.ones((3, 3, 64, 64), x.dtype)
    conv = Convolution(image=image, kernel=kernel, shift=shift)
    return jnp.sum(OPS.upsample_conv3x3(conv).value.astype(jnp.float32))


def everything(x, kernel, row):
    """All handlers: the network with its gradients, and the optimizer's kernels."""
    gradient = jax.grad(network, argnums=(0, 1, 2))
    gradients = (
        *gradient(x, kernel, row),
        *grouped(gradient)(x, kernel, row),
        *jax.grad(upsampling, argnums=(0, 1))(x, jnp.zeros((1, 64))),
    )
    fused = backends.choose('cuda', here=False).update
    leaves = [g.astype(jnp.float32) for g in gradients]
    one = jnp.ones(())
    new = fused.adamw(
        Constants(0.9, 0.99, 1e-8, 0.0), leaves, leaves, leaves, leaves, (),
        take=one > 0, factor=one, learning_rate=one, corrections=(one, one), follow=(),
    )  # fmt: skip
    sums, packed = fused.sum_of_squares(leaves), fused.pack(leaves)
    return new, sums, packed, fused.narrow(leaves, jnp.bfloat16)


def calls_of_everything() -> list[tuple[str, str]]:
    """(handler, attributes) of every call in the lowered program."""
    x = jax.ShapeDtypeStruct((1, 64, 64, 16), 'bfloat16')
    kernel = jax.ShapeDtypeStruct((3, 3, 16, 16), 'bfloat16')
    row = jax.ShapeDtypeStruct((1, 16), 'float32')
    # A new function: JAX keeps traces by function and shapes.
    lowered = jax.jit(functools.partial(everything)).trace(x, kernel, row)
    return CALL.findall(lowered.lower(lowering_platforms=('cuda',)).as_text())


@pytest.mark.parametrize('kernels', ['', 'fastest', 'portable', 'ada'])
def test_every_call_says_which_kernels_it_may_run(monkeypatch, kernels):
    monkeypatch.setenv(VARIABLE, kernels)
    calls = calls_of_everything()
    if xla_ffi._cpu is not None:
        assert {name for name, _ in calls} >= set(HANDLERS) - (
            HOPPER_ALONE if kernels in ('portable', 'ada') else set()
        )
    for _, attributes in calls:
        found = re.findall(r'kernels = "(\w+)"', attributes)
        assert found == ([kernels] if kernels in ('portable', 'ada') else []), attributes


@pytest.mark.parametrize(
    ('target', 'found'), [(Target.HOPPER, []), (Target.PORTABLE, ['portable'])]
)
def test_a_forced_family_comes_first(monkeypatch, target, found):
    monkeypatch.setenv(VARIABLE, 'portable')
    with use(target):
        attributes = ' '.join(text for _, text in calls_of_everything())
    assert sorted(set(re.findall(r'kernels = "(\w+)"', attributes))) == found


def test_an_unknown_value_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv(VARIABLE, 'fast')
    message = "JAXUNET_KERNELS: expected one of fastest, portable, ada, found 'fast'"
    for call in (
        lambda: str(backends.choose('xla')),
        lambda: backends.choose('auto', 'bfloat16'),
        rows.provenance,
        device.portable,
    ):
        with pytest.raises(UserError, match=f'^{message}$'):
            call()


def test_rows_logs_and_kept_programs_tell(monkeypatch):
    def told():
        key = compiled_cache.key({}, (), jax.devices(), {})
        return rows.provenance()['device'], str(backends.choose('xla')), key

    kind, line, key = told()
    monkeypatch.setenv(VARIABLE, 'portable')
    assert told()[:2] == (f'{kind}, portable kernels', f'{line} (JAXUNET_KERNELS=portable)')
    assert told()[2] != key
    monkeypatch.setenv(VARIABLE, 'ada')
    assert told()[0] == f'{kind}, ada kernels'


def test_what_was_measured_with_other_kernels_is_not_followed(monkeypatch):
    gpu = SimpleNamespace(platform='gpu', compute_capability='9.0', device_kind='some GPU')
    monkeypatch.setattr(jax, 'devices', lambda: [gpu])
    measured = dict.fromkeys(backends.OPS, 'xla')
    monkeypatch.setattr(choices, 'read', lambda device, precision: measured)
    assert device.target() is Target.HOPPER
    assert backends.measured('bfloat16') == measured
    monkeypatch.setenv(VARIABLE, 'portable')
    assert device.target() is Target.PORTABLE
    assert backends.measured('bfloat16') is None
    with pytest.raises(UserError, match='--choose: JAXUNET_KERNELS=portable leaves out'):
        choose.check_kernels()


def test_the_norm_is_applied_before_convolutions_of_portable_kernels(monkeypatch):
    """The implicit GEMM would apply it once per tap; the kernel for few features does once."""

    def handlers(features):
        x, row = jnp.zeros((1, 64, 64, 16), jnp.bfloat16), jnp.zeros((1, 16))
        kernel, shift = jnp.zeros((3, 3, 16, features), jnp.bfloat16), jnp.zeros((1, features))
        conv = Convolution(
            image=Activation.of(x), norm=Norm(row, row, 4), kernel=kernel, shift=shift
        )
        call = jax.jit(lambda conv: OPS.norm_silu_conv3x3(conv).value)
        text = call.trace(conv).lower(lowering_platforms=('cuda',)).as_text()
        return sorted(name for name, _ in CALL.findall(text))

    inside = ['jaxunet_conv3x3', 'jaxunet_group_norm_statistics']
    assert handlers(16) == handlers(8) == inside
    monkeypatch.setenv(VARIABLE, 'portable')
    assert handlers(16) == ['jaxunet_conv3x3', 'jaxunet_group_norm_forward']
    assert handlers(8) == inside


@pytest.mark.extension
@pytest.mark.parametrize('number', range(len(HANDLERS)))
def test_handlers_read_the_kernels(number):
    call = right(number, random.Random(number))
    written = len(call.results) - call.has_workspace
    plain = call()
    for kernels in ('portable', 'ada'):
        found = call._replace(attributes=call.attributes | {'kernels': kernels})()
        for a, b in zip(found[:written], plain[:written], strict=True):
            np.testing.assert_array_equal(a, b)
    for wrong, message in [
        ('fastest', r'expected "portable" or "ada", found "fastest"'),
        (np.int64(1), 'expected a string'),
    ]:
        spoiled = call._replace(attributes=call.attributes | {'kernels': wrong})
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f'{call.target}: attribute kernels: {message}'
        ):
            spoiled()


@pytest.mark.parametrize(
    ('architectures', 'runs', 'fails'),
    [
        ('80,90a-real', ['8.0', '9.0', '10.0'], []),
        ('90a-real', ['9.0'], ['8.0']),
        ('80', ['9.0'], []),  # the driver compiles its PTX
        ('80-real', ['8.6'], ['9.0']),
    ],
)
def test_portable_kernels_run_on_hopper_without_its_own_code(architectures, runs, fails):
    for capability in runs + fails:
        found = xla_ffi._runs_on(architectures, capability, fastest=False)
        assert found == (capability in runs), capability
