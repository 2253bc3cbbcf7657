"""A version of JAX that lacks a module: the messages, and the calls that still run."""

import importlib.util
import pathlib
import re
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest
from support import kernel_names

from jaxunet.config import Config, resolve, to_dict
from jaxunet.model.unet import build_unet
from jaxunet.ops import backends, references
from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.runtime import device, plugins
from jaxunet.runtime.errors import UserError
from pallas_kernels import hopper_views, jax_modules

PROJECT = pathlib.Path(__file__).parents[1] / 'pyproject.toml'
NEEDS = 'the Pallas kernels need '
INSTALL = rf'install {jax_modules.TESTED}'


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
    assert jax_modules.missing() is None
    for name in jax_modules.NAMES:
        assert getattr(jax_modules, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = jax_modules.other


@pytest.fixture
def fresh(without, monkeypatch):
    """Imports the Pallas backend anew without some modules, and makes `choose` use it."""

    def make(*names):
        without(*names)
        for name in [name for name in sys.modules if name.split('.')[0] == 'pallas_kernels']:
            monkeypatch.delitem(sys.modules, name)
        found = importlib.import_module('pallas_kernels.backend').BACKEND
        both = {'pallas': found, 'cuda': plugins.load_backend('cuda')}
        monkeypatch.setattr(backends, 'load_backend', both.__getitem__)
        return found

    return make


@pytest.mark.parametrize(
    ('kind', 'variable', 'found'),
    [
        ('NVIDIA A100-SXM4-80GB', None, 'NVIDIA A100-SXM4-80GB'),
        ('NVIDIA H200', 'portable', 'NVIDIA H200 with JAXUNET_KERNELS=portable'),
    ],
)
def test_other_gpus_are_told_what_to_use(kind, variable, found, monkeypatch):
    if variable:
        monkeypatch.setenv(device.VARIABLE, variable)
    else:
        monkeypatch.setattr(device, 'kernels', lambda: device.Kernels.FASTEST)
    with device.use(device.Target.PORTABLE, kind), pytest.raises(UserError) as error:
        backends.choose('pallas')
    assert str(error.value) == (
        'backend=pallas: the Pallas kernels need a GPU of compute capability 9.0 (Hopper), found '
        f'{found}; use backend=cuda, or xla, which runs everywhere'
    )


@pytest.fixture
def told(monkeypatch):
    """The lines of the log."""
    found = []
    jax_modules._log.cache_clear()
    jax.clear_caches()  # of calls that were logged before
    monkeypatch.setattr(
        jax_modules.logging, 'warning', lambda text, *args: found.append(text % args)
    )
    return found


def lower_network(backend, image_size=8, **model):
    """Lowers the gradient of a small network in bfloat16 for an H200."""
    config = resolve(
        to_dict(
            Config().replace(
                precision='bfloat16',
                model={
                    'image_channels': 64,
                    'base_channels': 64,
                    'channel_mult': (1,),
                    'num_res_blocks': 1,
                    'attention_resolutions': (8,),
                }
                | model,
                data={'image_size': (image_size,)},
                train={'sample_every': 0},  # no grids of 64 channels
            )
        )
    )
    x = jax.ShapeDtypeStruct((2, *config.image_shape), 'float32')
    t = jax.ShapeDtypeStruct((2,), 'int32')
    initial = build_unet(config, references.XLA).init
    params = jax.eval_shape(lambda x, t: initial(jax.random.key(0), x, t)['params'], x, t)
    with device.use(device.Target.HOPPER):
        network = build_unet(config, backends.choose(backend).ops)
        loss = jax.grad(lambda p, x, t: jnp.sum(network.predict(p, x, t)))
        return jax.jit(loss).trace(params, x, t).lower(lowering_platforms=('cuda',))


def test_a_network_of_supported_shapes(told):
    """Zeros fill up the channels of an image.

    Large images are activated inside the convolutions, small ones before; skips are parts.
    """
    model = {'image_channels': 3, 'channel_mult': (1, 1), 'attention_resolutions': ()}
    kernels = kernel_names.count(lower_network('pallas', image_size=32, **model))
    assert 'convolution' not in kernels
    assert {'jaxunet_group_norm_gradient', 'jaxunet_attention_backward'} <= kernels.keys()
    convolutions = kernels['jaxunet_conv3x3_weight_gradient']
    # Nothing needs the gradient of the image, or the sum of the predictions.
    assert kernels['jaxunet_conv3x3_forward'] == 2 * (convolutions - 1)
    assert kernels['jaxunet_group_norm_channel_sums'] == convolutions
    assert not told


def test_xla_runs_what_the_kernels_do_not_take(told):
    kernels = kernel_names.count(lower_network('pallas', num_head_channels=16))
    assert kernels['jaxunet_conv3x3_forward']
    assert not [name for name in kernels if 'attention' in name]
    assert told == [
        'backend=pallas: XLA runs attention, whose kernels do not take qkv: expected heads of 32 '
        'or 64 channels, found 16'
    ]


def call_conv3x3(ops, dtype, channels, features, side):
    """Returns a call's gradients by x and kernel, and their abstract arguments."""
    x = jax.ShapeDtypeStruct((1, side, side, channels), dtype)
    kernel = jax.ShapeDtypeStruct((3, 3, channels, features), 'float32')

    def loss(x, kernel):
        shift = jnp.zeros((1, features), jnp.float32)
        conv = Convolution(image=Activation.of(x), kernel=kernel, shift=shift)
        return jnp.sum(ops['conv3x3'](conv).value)

    return jax.grad(loss, (0, 1)), (x, kernel)


def call_attention(ops, dtype, tokens, heads):
    qkv = jax.ShapeDtypeStruct((1, tokens, 96), dtype)
    return jax.grad(lambda qkv: jnp.sum(ops['attention'](qkv, num_heads=heads))), (qkv,)


def call_group_norm(ops, dtype, channels, groups):
    x = jax.ShapeDtypeStruct((2, 8, 8, channels), dtype)
    vector = jnp.ones((1, channels), jnp.float32)
    return (
        lambda x: ops['group_norm'](Activation.of(x), Norm(vector, vector, groups)),
        (x,),
    )


@pytest.mark.parametrize(
    ('call', 'arguments', 'reason'),
    [
        (call_attention, ('float16', 64, 1), None),
        (call_attention, ('float32', 64, 1), 'attention, .*qkv: expected bfloat16 or float16'),
        (call_attention, ('float16', 65, 1), 'attention, .*a multiple of 64 tokens'),
        (call_group_norm, ('float32', 64, 8), None),
        (call_group_norm, ('bfloat16', 24, 8), 'group_norm, .*channels: expected multiples of 32'),
        (call_group_norm, ('bfloat16', 96, 48), 'group_norm, .*groups: expected a divisor'),
        (call_conv3x3, ('bfloat16', 64, 64, 8), None),
        (call_conv3x3, ('bfloat16', 3, 5, 8), None),
        (
            call_conv3x3,
            ('float32', 64, 64, 8),
            "conv3x3's weight gradient, .*dy: expected 2048 pixels or more in float32",
        ),
        (
            call_conv3x3,
            ('bfloat16', 64, 64, 2),
            "conv3x3's gradient of shift, .*x: expected at least one sample of 16 pixels",
        ),
    ],
)
def test_the_log_says_what_the_kernels_do_not_take(told, call, arguments, reason):
    function, operands = call(backends.load_backend('pallas').ops, *arguments)
    with device.use(device.Target.HOPPER):
        program = jax.jit(function).trace(*operands).lower(lowering_platforms=('cuda',))
    if reason is None:
        assert kernel_names.count(program)
        assert not told
    else:
        (line,) = told
        assert re.match(f'backend=pallas: XLA runs {reason}', line)


def test_without_mosaic(fresh):
    found = fresh('jax.experimental.mosaic.gpu.utils')
    message = rf'{NEEDS}jax\.experimental\.mosaic\.gpu\.utils, .*; {INSTALL}'
    with device.use(device.Target.HOPPER):
        assert re.match(message, found.unavailable())
        for call, arguments in (
            (call_attention, ('float16', 64, 1)),
            (call_group_norm, ('bfloat16', 64, 8)),
            (call_conv3x3, ('bfloat16', 64, 64, 8)),
        ):
            function, operands = call(found.ops, *arguments)
            with pytest.raises(UserError, match=f'^backend=pallas: {message}; use backend=cuda'):
                jax.eval_shape(function, *operands)


@pytest.mark.parametrize('name', ['jax._src.pallas.mosaic_gpu.core', 'jax._src.state.types'])
def test_a_module_of_kernels_says_what_it_needs(without, name):
    without(name)
    with pytest.raises(ImportError, match=f'{NEEDS}.*{INSTALL}'):
        executed(hopper_views)
