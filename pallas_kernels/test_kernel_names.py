"""The UNet of elephants64 with backend=pallas runs only on our kernels; none falls back quietly."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from support import kernel_names

from jaxunet import config
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import choose
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Conv3x3, Ops
from jaxunet.runtime import device

BATCH = 2
CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'elephants64.py'
PALLAS = choose('pallas', here=False).ops
Function = Callable[..., jax.Array]
Op = Callable[..., object]  # a field of `Ops`
Call = tuple[str, tuple[int, ...], int, int]  # op, shape of x, parts of x, features
Lowered = tuple[list[Call], collections.Counter[str]]  # calls of ops, launches of kernels


class Calls:
    """Ops that note their calls."""

    def __init__(self, ops: Ops) -> None:
        self.seen: list[Call] = []
        self.ops = Ops(*(self._noting(name, op) for name, op in ops._asdict().items()))

    def _noting(self, name: str, op: Op) -> Op:
        def call(
            first: Convolution | Activation | jax.Array, *arguments: object, **options: object
        ) -> object:
            x, features = first, 0
            if isinstance(first, Convolution):
                x, features = first.image, first.kernel.shape[-1]
            parts = x.parts if isinstance(x, Activation) else (x,)
            shape = (*parts[0].shape[:-1], sum(p.shape[-1] for p in parts))
            self.seen.append((name.removesuffix('_and_input'), shape, len(parts), features))
            return op(first, *arguments, **options)

        return call


@pytest.fixture(scope='module')
def lowered() -> Lowered:
    """The op calls of a forward pass, and the kernels of the loss with its gradient, lowered for an
    H200.
    """
    spec = importlib.util.spec_from_file_location('elephants64', CONFIG)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    resolved = config.resolve(module.get_config())
    x, t = (
        jax.ShapeDtypeStruct((BATCH, *resolved.image_shape), 'float32'),
        jax.ShapeDtypeStruct((BATCH,), 'int32'),
    )
    parameters = jax.eval_shape(
        lambda x, t: build_unet(resolved, XLA).init(jax.random.key(0), x, t)['params'], x, t
    )
    calls = Calls(PALLAS)
    model = build_unet(resolved, calls.ops)

    def loss(parameters: Params, x: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.predict(parameters, x, t)))

    with device.use(device.Target.HOPPER):
        program = (
            jax.jit(jax.value_and_grad(loss))
            .trace(parameters, x, t)
            .lower(lowering_platforms=('cuda',))
        )
    return calls.seen, kernel_names.count(program)


@pytest.mark.long
def test_every_op_runs_on_its_kernels(lowered: Lowered) -> None:
    calls, kernels = lowered
    convs = [c for c in calls if 'conv3x3' in c[0]]
    fused = [c for c in convs if c[0] == 'norm_silu_conv3x3']
    # Large images are activated inside the convolution, so separate kernels compute their
    # statistics.
    inside = [c for c in fused if c[1][1] * c[1][2] >= 1024]
    attention = [c for c in calls if c[0] == 'attention']
    norms = [c for c in calls if c[0] == 'group_norm']
    assert (len(convs), len(fused), len(inside)) == (46, 45, 21)
    assert (len(attention), len(norms)) == (11, 11)
    assert kernels == {
        # forward, and the input gradient, except for that of the image, which nothing needs
        'jaxunet_conv3x3_forward': 2 * len(convs) - 1,
        'jaxunet_conv3x3_weight_gradient': len(convs),
        'jaxunet_group_norm_channel_sums': len(convs),  # the gradient of bias or shift
        'jaxunet_group_norm_moments': len(fused) + len(norms),
        'jaxunet_group_norm_affine': len(inside),
        'jaxunet_group_norm_normalise': len(fused) - len(inside) + len(norms),
        'jaxunet_group_norm_gradient_sums': len(fused) + len(norms),
        'jaxunet_group_norm_gradient': len(fused) + len(norms),
        'jaxunet_attention_forward': len(attention),
        'jaxunet_attention_backward_delta': len(attention),
        'jaxunet_attention_backward': len(attention),
    }


def test_a_fallback_would_be_seen() -> None:
    """The counter of the test above tells a convolution of XLA from a kernel."""
    x, kernel = (
        jax.ShapeDtypeStruct((1, 8, 8, 64), 'bfloat16'),
        jax.ShapeDtypeStruct((3, 3, 64, 64), 'bfloat16'),
    )
    shift = jax.ShapeDtypeStruct((1, 64), 'float32')

    def twice(op: Conv3x3) -> Function:
        def convolve(x: jax.Array, kernel: jax.Array, shift: jax.Array) -> jax.Array:
            return op(Convolution(image=Activation.of(x), kernel=kernel, shift=shift)).value

        step = jax.jit(convolve)
        return lambda x, kernel, shift: step(step(x, kernel, shift), kernel, shift)

    def counted(function: Function) -> collections.Counter[str]:
        with device.use(device.Target.HOPPER):
            return kernel_names.count(
                jax.jit(function).trace(x, kernel, shift).lower(lowering_platforms=('cuda',))
            )

    assert counted(twice(XLA.conv3x3)) == {'convolution': 2}
    assert counted(twice(PALLAS.conv3x3)) == {'jaxunet_conv3x3_forward': 2}
    down = {
        'window_strides': (2, 2),
        'padding': 'SAME',
        'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'),
    }
    assert counted(lambda x, kernel, shift: jax.lax.conv_general_dilated(x, kernel, **down)) == {}


def test_equal_calls_share_one_lowering() -> None:
    """A network calls a kernel with the same shapes many times; tracing and lowering each call
    would take most of the start-up time.
    """

    def network(x: jax.Array, kernel: jax.Array, vector: jax.Array, packed: jax.Array) -> jax.Array:
        norm = Norm(vector, vector)
        for _ in range(3):
            conv = Convolution(image=Activation.of(x), norm=norm, kernel=kernel, shift=vector)
            x = PALLAS.norm_silu_conv3x3(conv).value
            x = PALLAS.conv3x3(conv.of(x)).value
            x = PALLAS.group_norm(Activation.of(x), norm, silu=True)
            packed = jnp.tile(PALLAS.attention(packed, num_heads=2), 3)
        return jnp.sum(x.astype(jnp.float32)) + jnp.sum(packed.astype(jnp.float32))

    def gradient() -> tuple[jax.Array, ...]:
        # Made here, so that `device.use` makes most for the GPU: JAX traces again for arguments
        # from elsewhere.
        shapes = (
            ((2, 16, 16, 64), 'bfloat16'),
            ((3, 3, 64, 64), 'float32'),
            ((1, 64), 'float32'),
            ((2, 64, 192), 'bfloat16'),
        )
        return jax.grad(network, argnums=(0, 1, 2, 3))(*(jnp.zeros(*shape) for shape in shapes))

    with device.use(device.Target.HOPPER):
        program = jax.jit(gradient).trace().lower(lowering_platforms=('cuda',))
    launches = kernel_names.count(program)
    assert (
        launches['jaxunet_conv3x3_forward'] == 12
    )  # forward and input gradient, of two convolutions, three times
    assert min(launches.values()) == 3
    written = re.findall(r'custom_call @\S*mosaic', program.as_text())
    # Not exactly one per name: the input gradient is a separate kernel, and without a GPU the first
    # and last calls get other types.
    assert len(launches) < len(written) <= len(launches) + 3
    assert 3 * len(written) < sum(launches.values())
