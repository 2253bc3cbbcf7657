"""The UNet of elephants64 with backend=cuda: what its training step leaves to XLA's products."""

from __future__ import annotations

import collections
import pathlib
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import kernel_names
import pytest

import xla_ffi
from jaxunet import config
from jaxunet.ops import CUDA, XLA
from jaxunet.unet import build_unet

BATCH = 2
CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'elephants64.py'

if xla_ffi._cpu is None:
    pytest.skip(f'the extension is not built: {xla_ffi.unavailable()}', allow_module_level=True)


def products(operation: Any, found: collections.Counter[str]) -> collections.Counter[str]:
    """How often the program multiplies matrices, by the layer whose scope it is in: its name without numbers."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                if child.operation.name == 'stablehlo.dot_general':
                    scope = str(child.operation.location).split('"')[1].split('/')
                    found[scope[-2].rstrip('0123456789')] += 1
                products(child.operation, found)
    return found


def test_only_the_embeddings_are_products_of_xla() -> None:
    resolved = config.resolve(runpy.run_path(str(CONFIG))['get_config']())
    x, t = jax.ShapeDtypeStruct((BATCH, *resolved.image_shape), 'float32'), jax.ShapeDtypeStruct((BATCH,), 'int32')
    parameters = jax.eval_shape(lambda x, t: build_unet(resolved, XLA).init(jax.random.key(0), x, t)['params'], x, t)
    shortcuts = sum('shortcut' in block for block in parameters.values())
    blocks = sum('conv_1' in block for block in parameters.values())
    attentions = sum('qkv' in block for block in parameters.values())
    model = build_unet(resolved, CUDA)

    def loss(parameters: Any, x: Any, t: Any) -> Any:
        return jnp.mean(jnp.square(model.predict(parameters, x, t)))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(parameters, x, t)
    kernels = kernel_names.count(lowered)
    assert (shortcuts, blocks, attentions) == (15, 22, 11)
    assert kernels['jaxunet_linear'] == kernels['jaxunet_linear_weight_gradient'] == 2 * attentions
    assert kernels['jaxunet_conv3x3_shortcut_gradient'] == shortcuts + 2 * attentions  # the linear layers' inputs'
    assert kernels['jaxunet_conv3x3_weight_gradient'] == 2 * blocks + 2  # with those of the first and the last convolution
    found = products(lowered.compiler_ir('stablehlo').operation, collections.Counter())
    # Forward, by the input and by the weights; the time itself needs no gradient.
    assert found == {'embed': 3 * blocks, 'time_embed_': 5}, found
