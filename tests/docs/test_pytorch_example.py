"""The example that calls a kernel from PyTorch: no copies, and PyTorch's values and gradients."""

from __future__ import annotations

import pathlib
import runpy
import types

import jax
import pytest

torch = pytest.importorskip('torch')
ROOT = pathlib.Path(__file__).parents[2]
# Relative errors: a few roundings of the type.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.fixture(scope='module')
def example() -> types.SimpleNamespace:
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / 'docs/examples/pytorch_kernel.py')))


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == 'cuda' and not torch.cuda.is_available():
        pytest.skip('PyTorch sees no GPU')
    return request.param


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_values_and_gradients_are_pytorchs(example, device: str, dtype) -> None:
    """Several calls in a row, each with gradients from PyTorch, reuse each other's memory."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator=generator):
            return torch.randn(shape, generator=generator).to(device)

        x = draw(2, 64, 16, 16).to(dtype).to(memory_format=torch.channels_last)
        operands = [t.requires_grad_() for t in (x, draw(64), draw(64))]
        dy = draw(2, 64, 16, 16)
        y = example.norm_silu(*operands, groups=32)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        found = (y, *torch.autograd.grad((y.float() * dy).sum(), operands))
        wide = torch.nn.functional.group_norm(x.float(), 32, *operands[1:])
        exact = torch.nn.functional.silu(wide)
        expected = (exact, *torch.autograd.grad((exact * dy).sum(), operands))
        for a, b in zip(found, expected, strict=True):
            off = (a.float() - b.float()).abs().max() / b.float().abs().max()
            assert off.item() < TOLERANCE[dtype]


def test_nothing_is_copied(example, device: str) -> None:
    x = torch.zeros((2, 64, 16, 16), device=device).to(memory_format=torch.channels_last)
    image = example.to_jax(x.permute(0, 2, 3, 1))
    assert image.shape == (2, 16, 16, 64)
    assert image.unsafe_buffer_pointer() == x.data_ptr()
    y = jax.jit(lambda x: x + 1)(image)
    assert torch.from_dlpack(y).data_ptr() == y.unsafe_buffer_pointer()
