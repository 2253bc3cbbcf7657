"""The references, which are also the xla backend, against other implementations, in float64."""

import dataclasses
import inspect
import pathlib
import runpy
import types
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxunet.config import resolve
from jaxunet.model.unet import build_unet
from jaxunet.ops import backends as seam
from jaxunet.ops import references, vocabulary
from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw import reference as adamw_reference
from jaxunet.ops.adamw.cases import CIFAR10, ELEPHANTS64
from jaxunet.ops.adamw.operands import Constants
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear import projection_cases
from jaxunet.ops.linear.projection_cases import Layer
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plugins import load_backend

OPS = seam.XLA
CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'


def draw(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def test_group_norm_is_flax_group_norm():
    x, scale, offset = draw(3, 5, 4, 64) * 3 + 50, draw(1, 64, seed=1), draw(1, 64, seed=2)
    with jax.numpy_dtype_promotion('standard'):  # flax's own code needs it
        want = nn.GroupNorm(32, epsilon=1e-5, use_fast_variance=False, dtype=jnp.float64).apply(
            {'params': {'scale': scale[0], 'bias': offset[0]}}, x
        )
    np.testing.assert_allclose(
        OPS.group_norm(Activation.of(x), Norm(scale, offset)), want, rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        OPS.group_norm(Activation.of(x), Norm(scale, offset), silu=True),
        jax.nn.silu(want),
        rtol=1e-9,
        atol=1e-9,
    )


def test_group_norm_of_parts_is_that_of_the_whole():
    x, scale, offset = draw(2, 4, 4, 48), draw(2, 48, seed=1), draw(2, 48, seed=2)
    a, b = x[..., :20], x[..., 20:]  # the cut goes through a group
    joined = Activation.of(a).join(Activation.of(b))
    norm = Norm(scale, offset, 8)
    want = OPS.group_norm(Activation.of(x), norm)
    np.testing.assert_allclose(OPS.group_norm(joined, norm), want, rtol=1e-9, atol=1e-9)


def test_group_norm_survives_a_large_mean_in_float32():
    x = draw(1, 16, 16, 32, dtype=np.float32) + jnp.float32(3000)
    one, zero = jnp.ones((1, 32), jnp.float32), jnp.zeros((1, 32), jnp.float32)
    norm = Norm(one, zero)
    exact = OPS.group_norm(Activation.of(x.astype(jnp.float64)), norm)
    np.testing.assert_allclose(OPS.group_norm(Activation.of(x), norm), exact, atol=2e-3)


def test_conv3x3_is_nine_shifted_products():
    x, kernel, bias = draw(2, 5, 7, 6), draw(3, 3, 6, 4, seed=1), draw(1, 4, seed=2)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    want = sum(
        padded[:, i : i + 5, j : j + 7] @ np.asarray(kernel[i, j])
        for i in range(3)
        for j in range(3)
    ) + np.asarray(bias)
    np.testing.assert_allclose(
        OPS.conv3x3(Convolution(image=Activation.of(x), kernel=kernel, shift=bias)).value,
        want,
        rtol=1e-9,
        atol=1e-9,
    )


def test_fused_conv_is_its_composition():
    x, kernel = draw(2, 4, 4, 32), draw(3, 3, 32, 8, seed=1)
    scale, offset, shift = draw(2, 32, seed=2), draw(2, 32, seed=3), draw(2, 8, seed=4)
    residual, shortcut = draw(2, 4, 4, 12, seed=5), draw(12, 8, seed=6)
    parts = Activation.of(residual[..., :5]).join(Activation.of(residual[..., 5:]))
    conv = Convolution(
        image=Activation.of(x),
        norm=Norm(scale, offset, 8),
        kernel=kernel,
        shift=shift,
        residual=parts,
        shortcut=shortcut,
    )
    got = OPS.norm_silu_conv3x3(conv)
    active = Activation.of(OPS.group_norm(conv.image, conv.required_norm, silu=True))
    plain = Convolution(image=active, kernel=kernel, shift=jnp.zeros((1, 8)))
    want = OPS.conv3x3(plain).value + shift[:, None, None, :] + residual @ shortcut
    np.testing.assert_allclose(got.value, want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match='shortcut needs a residual'):
        OPS.conv3x3(dataclasses.replace(plain, shortcut=shortcut))


def test_a_norm_belongs_to_the_op_that_applies_it():
    row = jnp.ones((1, 8))
    conv = Convolution(image=Activation.of(draw(1, 2, 2, 8)), kernel=draw(3, 3, 8, 8), shift=row)
    with pytest.raises(ValueError, match='norm_silu_conv3x3: norm: expected a Norm, found None'):
        OPS.norm_silu_conv3x3(conv)
    for op in (OPS.conv3x3, OPS.upsample_conv3x3):
        with pytest.raises(ValueError, match='conv3x3: norm: expected None; norm_silu_conv3x3 ap'):
            op(dataclasses.replace(conv, norm=Norm(row, row, 8)))
    with pytest.raises(ValueError, match='upsample_conv3x3: residual: expected None'):
        OPS.upsample_conv3x3(dataclasses.replace(conv, residual=conv.image))


def test_attention_is_softmax_of_products_times_values():
    qkv = draw(2, 9, 3 * 4 * 8)
    q, k, v = (np.asarray(part).reshape(2, 9, 4, 8) for part in jnp.split(qkv, 3, axis=-1))
    want = np.empty((2, 9, 4, 8))
    for b, h in np.ndindex(2, 4):
        scores = np.exp(q[b, :, h] @ k[b, :, h].T / np.sqrt(8))
        want[b, :, h] = scores / scores.sum(1, keepdims=True) @ v[b, :, h]
    want = want.reshape(2, 9, 32)
    np.testing.assert_allclose(OPS.attention(qkv, num_heads=4), want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match='not 3 x 5 heads'):
        OPS.attention(qkv, num_heads=5)


@pytest.mark.parametrize('dtype', [jnp.float64, jnp.float32, jnp.bfloat16])
def test_linear_is_flax_dense(dtype):
    """Bit for bit, and with what a block adds: the UNet computed it so before there was an op."""
    x, residual = draw(2, 3, 4, 8, dtype=dtype), draw(2, 3, 4, 5, seed=1, dtype=dtype)
    params = {
        'kernel': draw(8, 5, seed=2, dtype=np.float32),
        'bias': draw(5, seed=3, dtype=np.float32),
    }
    want = nn.Dense(5, dtype=dtype).apply({'params': params}, x)
    kernel, bias = params['kernel'], params['bias'][None, :]
    np.testing.assert_array_equal(OPS.linear(x, kernel, bias), want)
    np.testing.assert_array_equal(OPS.linear(x, kernel, bias, residual=residual), residual + want)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_results_have_the_type_of_their_input(dtype):
    x = draw(1, 4, 4, 32, dtype=dtype)
    one, bias = jnp.ones((1, 32), jnp.float32), jnp.zeros((1, 4), jnp.float32)
    norm, kernel = Norm(one, one), draw(3, 3, 32, 4)
    conv = Convolution(image=Activation.of(x), norm=norm, kernel=kernel, shift=bias)
    assert OPS.group_norm(conv.image, norm).dtype == dtype
    assert OPS.norm_silu_conv3x3(conv).value.dtype == dtype
    assert OPS.attention(x.reshape(1, 16, 32)[..., :24], num_heads=2).dtype == dtype
    assert OPS.linear(x, draw(32, 4), bias, residual=x[..., :4]).dtype == dtype


@pytest.mark.parametrize('backend', ['xla', 'pallas', 'cuda'])
def test_backends_implement_the_signatures_of_the_vocabulary(backend):
    ops = references.REFERENCES if backend == 'xla' else load_backend(backend).ops
    for name, protocol in typing.get_type_hints(vocabulary.Ops).items():
        if name in ops:
            wanted = list(inspect.signature(protocol.__call__).parameters)[1:]
            assert list(inspect.signature(ops[name]).parameters) == wanted, name


def test_the_variants_return_the_result_and_copies_of_the_input():
    x, one = Activation.of(draw(2, 4, 4, 8)), jnp.ones((1, 8))
    norm = Norm(one, one, 4)
    conv = Convolution(image=x, norm=norm, kernel=draw(3, 3, 8, 8), shift=one)
    pairs: list = [
        (OPS.group_norm, OPS.group_norm_and_input, (x, norm)),
        (OPS.norm_silu_conv3x3, OPS.norm_silu_conv3x3_and_input, (conv,)),
    ]
    for plain, variant, operands in pairs:
        found = variant(*operands, copies=2)
        jax.tree.map(np.testing.assert_array_equal, found.result, plain(*operands))
        assert found.copies == (x, x)


@pytest.mark.parametrize('steps', [0, 7])
def test_adamw_is_that_of_optax(steps):
    constants, rate, factor, share = Constants(0.9, 0.99, 1e-6, 0.05), 0.02, 0.5, 0.25
    g, p, mu, nu, average = (
        {'kernel': draw(3, 4, seed=seed), 'bias': draw(4, seed=seed + 9)} for seed in range(5)
    )
    nu = jax.tree.map(jnp.square, nu)
    optimizer = optax.adamw(
        rate, constants.b1, constants.b2, constants.eps, weight_decay=constants.weight_decay
    )
    adam, *others = optimizer.init(p)
    adam = adam._replace(count=jnp.asarray(steps, jnp.int32), mu=mu, nu=nu)
    with jax.numpy_dtype_promotion('standard'):
        moves, (adam, *_) = optimizer.update(
            jax.tree.map(lambda x: x * factor, g), (adam, *others), p
        )
    moved = optax.apply_updates(p, moves)
    wanted = (
        moved,
        adam.mu,
        adam.nu,
        jax.tree.map(lambda e, q: e + share * (q - e), average, moved),
    )

    def step(take):
        numbers = {'factor': factor, 'learning_rate': rate}
        corrections = tuple(jnp.asarray(1 - b ** (steps + 1)) for b in constants[:2])
        return adamw_reference.adamw(
            constants, g, p, mu, nu, (average,), take=jnp.asarray(take), corrections=corrections,
            follow=[jnp.asarray(share)], **{n: jnp.asarray(v) for n, v in numbers.items()},
        )  # fmt: skip

    found = step(take=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), (*found[:3], *found[3]), wanted
    )
    kept = step(take=False)
    jax.tree.map(np.testing.assert_array_equal, (*kept[:3], *kept[3]), (p, mu, nu, average))
    squares = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(g))
    assert float(adamw_reference.sum_of_squares(g)) == pytest.approx(squares, rel=1e-12)


def network_of(name, ops=OPS):
    """Returns the config of a name, its network, and the shapes of an image, t and parameters."""
    config = resolve(runpy.run_path(str(CONFIGS / f'{name}.py'))['get_config']())
    network = build_unet(config, ops)
    x = jax.ShapeDtypeStruct((1, *config.image_shape), 'float32')
    t = jax.ShapeDtypeStruct((1,), 'int32')
    params = jax.eval_shape(lambda x, t: network.init(jax.random.key(0), x, t)['params'], x, t)
    return config, network, x, t, params


@pytest.mark.parametrize('case', [ELEPHANTS64, CIFAR10], ids=lambda c: c.name)
def test_the_cases_of_adamw_are_the_parameters_of_the_configs(case):
    with jax.enable_x64(False):
        config, *_, params = network_of(case.name)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    assert sorted(case.shapes) == sorted(shapes)
    assert case.averages == len(config.ema.rates)


@pytest.mark.parametrize(
    'case', [projection_cases.ELEPHANTS64, projection_cases.CIFAR10], ids=lambda c: c.name
)
def test_the_cases_of_projections_are_the_layers_of_the_configs(case):
    calls = []

    def project(x, layers):
        found = tuple(
            Layer(b[0].shape[0], len(b), product=kernel is not None) for kernel, b in layers
        )
        calls.append((x.shape, found))
        return OPS.project(x, layers)

    with jax.enable_x64(False):
        _, network, x, t, params = network_of(case.name, OPS._replace(project=project))
        jax.eval_shape(network.predict, params, x, t, None)
    assert calls == [((1, case.width), case.layers)]


def test_an_unknown_backend_is_named():
    with pytest.raises(UserError, match='expected one of auto, xla, pallas, cuda'):
        seam.choose('tpu')


@pytest.mark.skipif(jax.default_backend() == 'gpu', reason='a machine without a GPU says so')
def test_a_machine_without_a_gpu():
    with pytest.raises(
        UserError,
        match=r'backend=pallas: the kernels need an NVIDIA GPU.*found cpu; use backend=xla',
    ):
        seam.choose('pallas')
    with pytest.raises(
        UserError, match=r'backend=cuda: .*; or use backend=pallas on a Hopper GPU, or xla'
    ):
        seam.choose('cuda')
    assert (
        str(seam.choose('auto', 'bfloat16'))
        == 'ops: conv3x3=xla, norm_silu_conv3x3=xla, group_norm=xla, attention=xla, linear=xla, '
        'adamw=xla'
    )


PALLAS = (
    'ops: conv3x3=pallas, norm_silu_conv3x3=pallas, group_norm=pallas, attention=pallas, '
    'linear=xla, adamw='
)
CUDA = (
    'ops: conv3x3=cuda, norm_silu_conv3x3=cuda, group_norm=cuda, attention=cuda, '
    'linear=cuda, adamw=cuda'
)
ALL_XLA = PALLAS.replace('pallas', 'xla') + 'xla'


@pytest.mark.parametrize(
    ('target', 'missing', 'precision', 'auto'),
    [
        (device.Target.HOPPER, None, 'bfloat16', CUDA),
        (device.Target.HOPPER, None, 'float16', CUDA),
        (device.Target.HOPPER, None, 'float32', CUDA.replace('linear=cuda', 'linear=xla')),
        (device.Target.HOPPER, 'no extension', 'float32', PALLAS + 'xla'),
        (device.Target.HOPPER, 'no extension', 'bfloat16', PALLAS + 'xla'),
        (device.Target.PORTABLE, None, 'bfloat16', CUDA),
        (device.Target.PORTABLE, None, 'float16', CUDA),
        (device.Target.PORTABLE, None, 'float32', ALL_XLA),
        (device.Target.PORTABLE, 'no extension', 'bfloat16', ALL_XLA),
    ],
)
def test_auto_takes_what_was_measured(target, missing, precision, auto, monkeypatch):
    """Hopper's and the portable kernels, not those in float32, are faster than XLA's steps."""
    monkeypatch.setattr(seam, '_unavailable', lambda name: missing if name == 'cuda' else None)
    with device.use(target):
        assert str(seam.choose('auto', precision)) == auto
        assert str(seam.choose('pallas', precision)) == PALLAS + 'xla'
        assert (seam.choose('auto', precision).update is not None) == auto.endswith('adamw=cuda')


@pytest.mark.parametrize(
    ('capability', 'kernels', 'auto'),
    [
        ('8.0', '', CUDA),
        ('8.6', '', CUDA),
        ('8.7', '', CUDA),
        ('8.9', '', CUDA),
        ('9.0', '', CUDA),
        ('9.0', 'portable', CUDA + ' (JAXUNET_KERNELS=portable)'),
        ('9.0', 'ada', CUDA + ' (JAXUNET_KERNELS=ada)'),
        ('7.5', '', ALL_XLA),
        ('10.0', '', ALL_XLA),
        ('12.0', '', ALL_XLA),
    ],
)
def test_auto_goes_by_the_compute_capability(capability, kernels, auto, monkeypatch):
    gpu = types.SimpleNamespace(platform='gpu', compute_capability=capability, device_kind='a GPU')
    monkeypatch.setattr(jax, 'devices', lambda: [gpu])
    monkeypatch.setenv(device.VARIABLE, kernels)
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    monkeypatch.setattr(seam.choices, 'read', lambda device, precision: None)
    assert str(seam.choose('auto', 'bfloat16')) == auto


@pytest.mark.parametrize(
    ('capability', 'backend', 'measured', 'said'),
    [
        ('10.0', 'auto', None, True),
        ('12.0', 'cuda', None, True),
        ('12.0', 'xla', None, False),
        ('12.0', 'auto', dict.fromkeys(seam.OPS, 'xla'), False),
        ('9.0', 'auto', None, False),
        ('8.9', 'cuda', None, False),
    ],
)
def test_a_gpu_newer_than_those_measured_is_told(
    capability, backend, measured, said, monkeypatch, caplog
):
    gpu = types.SimpleNamespace(platform='gpu', compute_capability=capability, device_kind='a GPU')
    monkeypatch.setattr(jax, 'devices', lambda: [gpu])
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(seam, '_unavailable', lambda name: None)
    monkeypatch.setattr(seam.choices, 'read', lambda device, precision: measured)
    seam._warn_once.cache_clear()
    for _ in range(2):  # one line a process
        seam.choose(backend, 'bfloat16')
    line = (
        f'a GPU (compute capability {capability}) is newer than the GPUs that the kernels were '
        'measured on; backend=cuda runs the portable ones there, and '
        'python -m jaxunet.benchmark --choose finds the fastest backends'
    )
    assert [record.getMessage() for record in caplog.records] == [line] * said


def test_backends_mix_op_by_op(monkeypatch):
    """Each op comes from the backend that it was given, and what is missing is said under the name
    that was asked for.
    """
    cuda, pallas = (seam.choose(name, here=False).ops for name in ('cuda', 'pallas'))
    with device.use(device.Target.HOPPER):
        monkeypatch.setattr(
            seam, '_unavailable', lambda name: 'no driver' if name == 'cuda' else None
        )
        with pytest.raises(UserError, match=r'backend=pallas\+adamw=cuda: no driver; or use'):
            seam.choose('pallas+adamw=cuda')
        monkeypatch.setattr(seam, '_unavailable', lambda name: None)
        mixed = seam.choose('auto+attention=pallas+group_norm=xla', 'bfloat16').ops
        xla = {name: getattr(seam.XLA, name) for name in ('group_norm', 'group_norm_and_input')}
        assert mixed == cuda._replace(attention=pallas.attention, **xla)
        assert seam.choose('pallas+adamw=cuda').names['adamw'] == 'cuda'
        linear = {'linear': cuda.linear, 'project': cuda.project}
        assert seam.choose('pallas+linear=cuda').ops == pallas._replace(**linear)
        linear = {'linear': seam.XLA.linear, 'project': seam.XLA.project}
        assert seam.choose('cuda+linear=xla').ops == cuda._replace(**linear)
        with pytest.raises(UserError, match="linear: expected one of xla, cuda, found 'pallas'"):
            seam.choose('pallas+linear=pallas')
        assert [
            seam.choose(b).update is None
            for b in ('pallas', 'pallas+adamw=cuda', 'cuda', 'cuda+adamw=xla')
        ] == [
            True,
            False,
            False,
            True,
        ]
