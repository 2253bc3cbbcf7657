"""PyTorch and our files: the same networks compute the same, torch reads what we write, we read
what torch writes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import call
from support.weight_cases import ADM, make, random_params

from jaxunet.config import Config
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.weights import read_weights, write_weights
from jaxunet.weights.names import flatten

torch = pytest.importorskip(
    'torch', reason='PyTorch is not installed: its side of the comparison is missing'
)

from jaxunet.benchmark.torch_unet import build_torch_unet  # noqa: E402


def peer(config: Config, new_order: bool) -> Any:
    return build_torch_unet(config, new_attention_order=new_order).eval()


def inputs(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(0)
    labels = (
        rng.integers(0, config.model.num_classes, 2).astype(np.int32)
        if config.model.num_classes
        else None
    )
    return (
        rng.standard_normal((2, *config.image_shape), np.float32),
        np.array([3, 977], np.int32),
        labels,
    )


def torch_output(model: Any, config: Config) -> np.ndarray:
    x, t, labels = inputs(config)
    with torch.no_grad():
        out = model(
            torch.tensor(x.transpose(0, 3, 1, 2)),
            torch.tensor(t),
            None if labels is None else torch.tensor(labels),
        )
    return out.numpy().transpose(0, 2, 3, 1)


def our_output(params: Any, config: Config) -> np.ndarray:
    x, t, labels = inputs(config)
    unet = build_unet(config, XLA)
    return np.asarray(
        jax.jit(unet.apply)({'params': jax.tree.map(jnp.asarray, params)}, x, t, labels)
    )


@pytest.mark.parametrize('new_order', [False, True])
@pytest.mark.parametrize('name', ADM)
def test_torch_network_in_our_hands(tmp_path: pathlib.Path, name: str, new_order: bool) -> None:
    """torch's state dict, saved by torch, read by us: the same outputs, whatever the options and
    the order of qkv.
    """
    config = ADM[name]
    model = peer(config, new_order)
    torch.manual_seed(0)
    for parameter in model.parameters():  # torch's own initial biases and norms would hide mistakes
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    torch.save(model.state_dict(), tmp_path / 'a.pt')
    weights = read_weights(tmp_path / 'a.pt', config, new_attention_order=new_order)
    expected, found = torch_output(model, config), our_output(weights.params, config)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize('new_order', [False, True])
@pytest.mark.parametrize('name', ['resblock_updown', 'classes_and_sigma', 'num_heads'])
def test_our_network_in_torch_hands(tmp_path: pathlib.Path, name: str, new_order: bool) -> None:
    """Our .pt loads strictly into torch's network (`weights_only=True`) and computes the same."""
    config, params = ADM[name], random_params(ADM[name])
    write_weights(tmp_path / 'a.pt', params, config, new_attention_order=new_order)
    model = peer(config, new_order)
    state = torch.load(tmp_path / 'a.pt', weights_only=True)
    assert list(state) == [key for key in model.state_dict() if key in state]
    model.load_state_dict(state, strict=True)
    expected, found = torch_output(model, config), our_output(params, config)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize('order', ['legacy', 'new'])
def test_a_converted_order_in_torch_hands(tmp_path: pathlib.Path, order: str) -> None:
    """Torch's network of the other order computes the same with the converted file."""
    config = ADM['num_heads']
    files = tmp_path / 'a.pt', tmp_path / 'b.pt'
    write_weights(files[0], random_params(config), config, new_attention_order=order == 'legacy')
    call(
        'jaxunet.export',
        f'--checkpoint={files[0]}',
        f'--output={files[1]}',
        f'--output_order={order}',
    )
    models = peer(config, order == 'legacy'), peer(config, order == 'new')
    for model, file in zip(models, files, strict=True):
        model.load_state_dict(torch.load(file, weights_only=True))
    expected, found = (torch_output(model, config) for model in models)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_the_order_of_qkv_matters(tmp_path: pathlib.Path) -> None:
    """Read in the wrong order, a file gives other outputs: the tests above could not pass by
    chance.
    """
    config = make(attention_resolutions=(16, 8), num_head_channels=16)
    write_weights(tmp_path / 'a.pt', random_params(config), config, new_attention_order=False)
    model = peer(config, True)
    model.load_state_dict(torch.load(tmp_path / 'a.pt', weights_only=True))
    difference = torch_output(model, config) - our_output(random_params(config), config)
    assert np.abs(difference).max() > 1e-2


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float64'])
def test_types_and_nesting(tmp_path: pathlib.Path, dtype: str) -> None:
    """Half-precision and double files, nested under a key, with parameters and views of one flat
    buffer.
    """
    config = ADM['one_level']
    state = peer(config, False).state_dict()
    flat = torch.cat([value.flatten() for value in state.values()]).to(getattr(torch, dtype))
    sizes = [value.numel() for value in state.values()]
    views = {
        name: piece.view(value.shape)
        for (name, value), piece in zip(state.items(), flat.split(sizes), strict=True)
    }
    first = next(iter(views))
    views[first] = torch.nn.Parameter(views[first].T.contiguous().T)
    torch.save({'model': views, 'step': 12}, tmp_path / 'a.pt')
    assert (
        tmp_path / 'a.pt'
    ).stat().st_size < 2 * flat.numel() * flat.element_size()  # one storage
    found = read_weights(tmp_path / 'a.pt', config).params
    torch.save(
        {name: value.detach().float().contiguous() for name, value in views.items()},
        tmp_path / 'b.pt',
    )
    expected = read_weights(tmp_path / 'b.pt', config).params
    for path, value in flatten(expected).items():
        np.testing.assert_array_equal(flatten(found)[path], value)
