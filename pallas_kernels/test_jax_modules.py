"""A version of JAX that lacks a module: what is said, and what still runs."""

import importlib.util
import pathlib
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest
from support import kernel_names

from jaxunet.ops import backends
from jaxunet.ops.activation import Activation
from jaxunet.runtime import device, plugins
from jaxunet.runtime.errors import UserError
from pallas_kernels import backend, jax_modules
from pallas_kernels.conv3x3 import dispatch, hopper_views, triton_blocks

PROJECT = pathlib.Path(__file__).parents[1] / 'pyproject.toml'
TRITON = (
    r'the Pallas kernels for convolutions, GroupNorm and attention that .* need '
    r'jax\.experimental\.pallas\.triton, which jax .*'
)
MOSAIC = r'the Pallas kernels for convolutions, GroupNorm and attention on Hopper need '
INSTALL = rf'install {jax_modules.TESTED}, '


@pytest.fixture
def without(monkeypatch):
    """Makes modules that cannot be imported, as if this version of JAX lacked them."""

    def make(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        jax_modules.missing.cache_clear()

    yield make
    monkeypatch.undo()
    jax_modules.missing.cache_clear()


def executed(module):
    """A module, executed once more under another name."""
    spec = importlib.util.spec_from_file_location('another', module.__file__)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_message_names_the_versions_of_the_project():
    project = tomllib.loads(PROJECT.read_text())['project']
    assert jax_modules.TESTED in project['dependencies']
    for extra in ('cuda12', 'cuda13'):
        assert project['optional-dependencies'][extra] == [
            jax_modules.TESTED.replace('jax', f'jax[{extra}]')
        ]


def test_this_version_has_all():
    assert jax_modules.missing(jax_modules.TRITON) is None
    assert jax_modules.missing(jax_modules.MOSAIC) is None
    for name in (*jax_modules.TRITON.names, *jax_modules.MOSAIC.names):
        assert getattr(jax_modules, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = jax_modules.other


def test_without_triton_the_backend_says_so(without, monkeypatch):
    told = []
    monkeypatch.setattr(
        backends.logging, 'log_first_n', lambda level, text, n, *values: told.append(text % values)
    )
    without('jax.experimental.pallas.triton')
    found = executed(backend).BACKEND
    both = {'pallas': found, 'cuda': plugins.load_backend('cuda')}
    monkeypatch.setattr(backends, 'load_backend', both.__getitem__)
    with device.use(device.Target.HOPPER):
        lacks = found.unavailable()
        with pytest.raises(
            UserError, match=rf'^backend=pallas: {TRITON}; {INSTALL}or use backend='
        ):
            backends.load_ops('pallas')
        monkeypatch.setattr(
            backends, '_unavailable', lambda name: lacks if name == 'pallas' else ''
        )
        assert set(backends.named('auto', 'float32').values()) == {'xla', 'cuda'}
    assert lacks
    assert told == [f'backend=auto: the Pallas kernels are left out: {lacks}']
    with pytest.raises(UserError, match=TRITON):
        found.ops['conv3x3'](None, None, None)
    assert set(found.ops) == set(plugins.load_backend('pallas').ops)


def test_without_triton_hopper_has_attention(without):
    """The op runs where its own kernels take the shape."""
    without('jax.experimental.pallas.triton')
    op = executed(backend).BACKEND.ops['attention']

    def lower(tokens):
        qkv = jax.ShapeDtypeStruct((1, tokens, 96), 'float16')
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(op(x, num_heads=1))))
        return gradient.trace(qkv).lower(lowering_platforms=('cuda',))

    with device.use(device.Target.HOPPER):
        assert set(kernel_names.count(lower(64))) == {
            'jaxunet_attention_forward',
            'jaxunet_attention_backward_delta',
            'jaxunet_attention_backward',
        }
        with pytest.raises(UserError, match=f'^backend=pallas: {TRITON}'):
            lower(65)


def test_without_triton_hopper_has_group_norm(without):
    """The op runs where its own kernels take the shape."""
    without('jax.experimental.pallas.triton')
    op = executed(backend).BACKEND.ops['group_norm']

    def lower(channels):
        x = jax.ShapeDtypeStruct((2, 8, 8, channels), 'bfloat16')
        vector = jax.ShapeDtypeStruct((1, channels), 'float32')
        function = jax.jit(lambda x, scale, offset: op(Activation((x,)), scale, offset, groups=8))
        return function.trace(x, vector, vector).lower(lowering_platforms=('cuda',))

    with device.use(device.Target.HOPPER):
        assert set(kernel_names.count(lower(64))) == {
            'jaxunet_group_norm_moments',
            'jaxunet_group_norm_normalise',
        }
        with pytest.raises(UserError, match=f'^backend=pallas: {TRITON}'):
            lower(24)


def test_without_mosaic_only_hopper_lacks_kernels(without):
    without('jax.experimental.mosaic.gpu.utils')
    found = executed(backend).BACKEND
    with device.use(device.Target.TRITON):
        assert found.unavailable() is None
        assert executed(dispatch)._target() is device.Target.TRITON
    message = (
        rf'{MOSAIC}jax\.experimental\.mosaic\.gpu\.utils, .*; {INSTALL}use backend=cuda, '
        'or set JAXUNET_KERNELS=portable'
    )
    with device.use(device.Target.HOPPER):
        with pytest.raises(UserError, match=message):
            executed(dispatch)._target()
        lacks = found.unavailable()
    assert lacks is not None
    assert lacks.startswith(
        'the Pallas kernels for convolutions, GroupNorm and attention on Hopper'
    )


@pytest.mark.parametrize(
    ('module', 'name', 'message'),
    [
        (triton_blocks, 'jax.experimental.pallas.triton', TRITON),
        (hopper_views, 'jax._src.pallas.mosaic_gpu.core', MOSAIC),
        (hopper_views, 'jax._src.state.types', MOSAIC),
    ],
)
def test_a_module_of_kernels_says_what_it_needs(without, module, name, message):
    without(name)
    with pytest.raises(ImportError, match=f'{message}.*{INSTALL}'):
        executed(module)
