"""The UNet with moments handed from convolution to norm, against the UNet whose norms read their input: on the CPU handlers."""

from typing import Any

import jax
import jax.numpy as jnp
import kernel_names
import numpy as np
import pytest

import xla_ffi
from jaxunet import config, ops
from jaxunet.unet import build_unet
from xla_ffi import backend
from xla_ffi.conv3x3 import vjp

if xla_ffi._cpu is None:
    pytest.skip(f'the extension is not built: {xla_ffi.unavailable()}', allow_module_level=True)

CPU = jax.local_devices(backend='cpu')[0]


def small(precision: str, **changes: Any) -> config.Config:
    model = {'base_channels': 16, 'channel_mult': (1, 2), 'num_res_blocks': 1, 'attention_resolutions': (), 'norm_groups': 4}
    model |= {'num_classes': 0, 'label_dropout': 0.0, 'dropout': 0.0, 'zero_init': False}
    return config.Config().replace(precision=precision, model=model | changes, data={'image_size': (12,)})


@pytest.mark.parametrize(
    ('precision', 'allowed', 'changes'),
    [
        ('float32', 2e-5, {'conv_resample': True}),  # norms and convolutions in kernels of their own
        ('float32', 2e-5, {'resblock_updown': True}),
        ('bfloat16', 0.03, {'conv_resample': True}),  # norms inside of convolutions
        ('bfloat16', 0.03, {'remat': True}),
    ],
)
def test_predictions_and_gradients_agree(monkeypatch, precision, allowed, changes):
    """In float32 to its rounding, in bfloat16 to what another rounding of a norm's coefficients brings about."""
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', 0)
    resolved = small(precision, **changes)
    plain_ops = ops.CUDA._replace(conv3x3=backend.conv3x3, norm_silu_conv3x3=backend.norm_silu_conv3x3)
    handing = plain_ops._replace(conv3x3=backend.conv3x3_with_moments, norm_silu_conv3x3=backend.norm_silu_conv3x3_with_moments)
    with jax.default_device(CPU):
        x = jax.random.normal(jax.random.key(0), (2, *resolved.image_shape))
        t = jnp.array([3, 500])
        parameters = build_unet(resolved, ops.XLA).init(jax.random.key(1), x, t)['params']

    monkeypatch.setattr(vjp, 'hands_out_moments', lambda first, features: features > vjp.FEW)  # in float32 too

    def run(table: ops.Ops) -> tuple[Any, int]:
        model = build_unet(resolved, table)

        def loss(parameters: Any) -> tuple[Any, Any]:
            y = model.predict(parameters, x, t)
            return jnp.mean(jnp.square(y)), y

        with jax.default_device(CPU):
            traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(parameters)
            ((_, y), gradients) = traced.compile()(parameters)
        return (y, gradients), kernel_names.count(traced)['jaxunet_group_norm_combine']

    (plain, none), (handed, some) = run(plain_ops), run(handing)
    assert none == 0
    assert some >= 4
    for path, want in jax.tree.leaves_with_path(plain):
        got = jax.tree.leaves([leaf for at, leaf in jax.tree.leaves_with_path(handed) if at == path])[0]
        scale = float(np.max(np.abs(want)))
        assert float(np.max(np.abs(got - want))) <= allowed * scale + 1e-7, jax.tree_util.keystr(path)
