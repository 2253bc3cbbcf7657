"""Outputs and gradients of unet.cu's own PyTorch model on weights given by a formula, read back
from a .bin file.

The golden numbers were computed in float32, and most of a gradient cancels in this network: against
float64 arithmetic they are off by up to 1.2e-4 of a tensor's gradient norm (three tensors at 64x64
by more than 1e-4), and gradients that are exactly zero hold rounding noise. So the network is held
to 1.25e-4 on every tensor in float64, where the difference is the golden numbers' own; and in
float32, whose rounding is as large again, to 1e-4 on nine tensors out of ten and 1e-3 on all.
Output and loss: 1e-4 in both.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.memory import drop_compiled_programs

from jaxunet.config import Config
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.weights import read_weights, write_weights
from jaxunet.weights.names import Entry, flatten, from_file, to_file, unflatten
from jaxunet.weights.unetcu import MAGIC, Header, config_of, table

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
TOLERANCE = 1e-4
NOISE = 1e-8  # share of the largest gradient norm that float32 may leave of a zero gradient


@pytest.fixture(autouse=True, scope='module')
def _room() -> None:
    """Networks of 64 × 64 in float64 take more than a GiB."""
    drop_compiled_programs()


def formula_weights(config: Config) -> dict[str, Any]:
    """Parameter k of unet.cu's order, flat index i, fan-in f: sin(0.7i + k)/√f, 1 + 0.1·sin for
    norms, 0.1·sin for biases.
    """
    leaves = {}
    for k, entry in enumerate(table(config)):
        wave = np.sin(0.7 * np.arange(np.prod(entry.shape), dtype=np.float64) + k)
        kind = entry.path[-1]
        value = {
            'kernel': wave / np.sqrt(np.prod(entry.shape[1:])),
            'scale': 1 + 0.1 * wave,
            'bias': 0.1 * wave,
        }[kind]
        leaves[entry.path] = from_file(entry, value.astype(np.float32).reshape(entry.shape))
    return unflatten(leaves)


Network = Callable[[Any], tuple[jax.Array, jax.Array]]


def network(path: pathlib.Path, channels: int, side: int) -> tuple[Network, Any, list[Entry]]:
    """Returns loss and output as a function of the weights, the weights, and their table."""
    config = config_of(Header(MAGIC, 2, 3, channels, 3, side, side, 1000, 0, 0))
    write_weights(path / 'formula.bin', formula_weights(config), config)
    weights = read_weights(path / 'formula.bin')
    assert weights.config == config
    unet = build_unet(weights.config, XLA)
    unet = unet.clone(dtype=jnp.zeros((), float).dtype)  # float64 where it is enabled

    shape = (2, 3, side, side)
    i = np.arange(np.prod(shape), dtype=np.float64)
    x = np.sin(0.37 * i).astype(np.float32).reshape(shape).transpose(0, 2, 3, 1)
    y = np.cos(0.53 * i).astype(np.float32).reshape(shape).transpose(0, 2, 3, 1)
    t = jnp.asarray([3, 977], jnp.int32)

    def loss_and_out(params: Any) -> tuple[jax.Array, jax.Array]:
        out = unet.apply({'params': params}, jnp.asarray(x), t)
        return jnp.mean(jnp.square(out - y)), out

    return loss_and_out, jax.tree.map(jnp.asarray, weights.params), table(config)


def check_output(golden: Any, tag: str, loss: jax.Array, out: jax.Array) -> None:
    out = np.asarray(out).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(loss, golden[f'{tag}_loss'], rtol=TOLERANCE)
    if f'{tag}_out' in golden:
        expected = golden[f'{tag}_out']
    else:
        expected, norm = golden[f'{tag}_out_patch'], np.linalg.norm(out.astype(np.float64))
        np.testing.assert_allclose(norm, golden[f'{tag}_out_norm'], rtol=TOLERANCE)
        out = out[:, :, 24:40, 24:40]
    np.testing.assert_allclose(
        out, expected, rtol=TOLERANCE, atol=TOLERANCE * np.abs(expected).max()
    )


def gradient_errors(
    golden: Any, tag: str, grads: Any, rows: list[Entry]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Returns the gradients, and before them the errors of their norms and first values.

    The errors are relative to 1e-4.
    """
    leaves = flatten(grads)
    assert len(rows) == 326
    gradients = [to_file(entry, np.asarray(leaves[entry.path])).ravel() for entry in rows]
    norms = np.array([np.linalg.norm(g.astype(np.float64)) for g in gradients])
    golden_norms, golden_first = golden[f'{tag}_grad_norms'], golden[f'{tag}_grad_first4']
    first = np.array([np.pad(g[:4], (0, max(0, 4 - g.size))) for g in gradients])
    largest = np.array(
        [np.abs(g).max() for g in gradients]
    )  # a single value may be near zero by cancellation
    zero = golden_norms < NOISE * golden_norms.max()
    scale = np.where(zero, NOISE * golden_norms.max() / TOLERANCE, golden_norms)
    first_scale = np.where(zero, scale, largest)
    first_errors = np.abs(first - golden_first).max(axis=1) / first_scale
    return np.abs(norms - golden_norms) / scale / TOLERANCE, first_errors / TOLERANCE, gradients


def check(path: pathlib.Path, golden: Any, channels: int, side: int, precision: str) -> None:
    tag = f'c{channels}_h{side}'
    with jax.enable_x64(precision == 'float64'):
        loss_and_out, params, rows = network(path, channels, side)
        (loss, out), grads = jax.jit(jax.value_and_grad(loss_and_out, has_aux=True))(params)
        check_output(golden, tag, loss, out)
        norm_errors, first_errors, gradients = gradient_errors(golden, tag, grads, rows)
    assert all(np.isfinite(g).all() for g in gradients)
    # (largest error, share of the tensors within 1e-4); single values carry more rounding than
    # norms.
    norm_limit, first_limit, share = (1.25, 2, 0.98) if precision == 'float64' else (10, 20, 0.9)
    for errors, limit in ((norm_errors, norm_limit), (first_errors, first_limit)):
        assert errors.max() < limit, f'tensor {errors.argmax()}'
        assert np.mean(errors < 1) > share


def test_the_output_of_the_smallest(tmp_path: pathlib.Path) -> None:
    loss_and_out, params, _ = network(tmp_path, 32, 16)
    with np.load(FIXTURES / 'unetcu_golden_c32_h16.npz') as golden:
        check_output(golden, 'c32_h16', *jax.jit(loss_and_out)(params))


@pytest.mark.long
@pytest.mark.parametrize('precision', ['float32', 'float64'])
def test_golden_small(tmp_path: pathlib.Path, precision: str) -> None:
    """The smallest case, from a copy that comes with the tests."""
    with np.load(FIXTURES / 'unetcu_golden_c32_h16.npz') as golden:
        check(tmp_path, golden, 32, 16, precision)


@pytest.mark.long
@pytest.mark.parametrize('precision', ['float32', 'float64'])
@pytest.mark.parametrize(('channels', 'side'), [(64, 64), (64, 32)])
def test_golden(
    tmp_path: pathlib.Path, shared_dir: pathlib.Path, channels: int, side: int, precision: str
) -> None:
    with np.load(shared_dir / 'golden' / 'unetcu_golden.npz') as golden:
        check(tmp_path, golden, channels, side, precision)


def test_order_and_shapes() -> None:
    """unet.cu's 326 tensors: names, order and shapes, for 64 channels."""
    expected = [
        (name, tuple(shape))
        for name, shape in json.loads((FIXTURES / 'unetcu_parameters.json').read_text())
    ]
    config = config_of(Header(MAGIC, 32, 3, 64, 3, 64, 64, 1000, 0, 0))
    assert [(entry.name, entry.shape) for entry in table(config)] == expected
    assert len(expected) == 326
    assert sum(int(np.prod(shape)) for _, shape in expected) == 20_494_211


def test_fixtures_are_the_shared_ones(shared_dir: pathlib.Path) -> None:
    theirs = json.loads((shared_dir / 'golden' / 'unetcu_parameters.json').read_text())
    assert [[row['name'], row['shape']] for row in theirs] == json.loads(
        (FIXTURES / 'unetcu_parameters.json').read_text()
    )
    with (
        np.load(shared_dir / 'golden' / 'unetcu_golden.npz') as ours,
        np.load(FIXTURES / 'unetcu_golden_c32_h16.npz') as copy,
    ):
        assert len(copy.files) == 4
        for name in copy.files:
            np.testing.assert_array_equal(copy[name], ours[name])
