"""`python -m jaxunet.export --output_order` converts between the orders of attention."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from support.commands import ROOT, call
from support.weight_cases import (
    STATED,
    UNETCU_SMALL,
    make,
    moments_of,
    random_params,
    same,
    torch_bytes,
)

from jaxunet.weights import ddpm_torch, guided_diffusion, read_weights, write_weights
from jaxunet.weights.names import from_tree
from jaxunet.weights.torch_file import TorchFile

ORDERS = {'legacy': False, 'new': True}
TWO_HEADS = make(num_heads=2, num_head_channels=0)


def export(source: pathlib.Path, output: pathlib.Path, *flags: str, code: int = 0) -> str:
    return call('jaxunet.export', f'--checkpoint={source}', f'--output={output}', *flags, code=code)


def tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    with path.open('rb') as file, TorchFile(str(path), file) as state:
        return {name: state.read(name) for name in state.shapes}


@pytest.mark.parametrize(('first', 'second'), [('legacy', 'new'), ('new', 'legacy')])
def test_there_and_back(tmp_path: pathlib.Path, first: str, second: str) -> None:
    """A file of guided-diffusion becomes one of the other order, and itself again."""
    params = random_params(TWO_HEADS)
    states = {
        order: guided_diffusion.from_tree(params, TWO_HEADS, new_attention_order=new)
        for order, new in ORDERS.items()
    }
    moved = [n for n in states['new'] if (states['new'][n] != states['legacy'][n]).any()]
    assert moved
    assert all('.qkv.' in name for name in moved)
    theirs, there, back = (tmp_path / name for name in ('a.pt', 'b.pt', 'c.pt'))
    theirs.write_bytes(torch_bytes(states[first]))
    stated = STATED | {'num_heads': 2, 'image_size': '16'}
    del stated['num_head_channels']
    flags = [f'--{name}={value}' for name, value in stated.items()]
    flags.append('--new_attention_order' if first == 'new' else '--nonew_attention_order')
    for source, path, order, more in ((theirs, there, second, flags), (there, back, first, [])):
        out = export(source, path, f'--output_order={order}', *more)
        assert f'--use_new_attention_order {ORDERS[order]}' in out
        same(tensors(path), states[order])
        found = read_weights(path)
        assert found.new_attention_order is ORDERS[order]
        same(found.params, params)


def test_moments_are_converted_too(tmp_path: pathlib.Path) -> None:
    params = random_params(TWO_HEADS)
    moments = moments_of(TWO_HEADS)
    first, second = tmp_path / 'a.safetensors', tmp_path / 'b.safetensors'
    write_weights(first, params, TWO_HEADS, moments, new_attention_order=True)
    export(first, second, '--with_optimizer', '--output_order=legacy')
    found = read_weights(second)
    assert found.new_attention_order is False
    same((found.params, found.moments), (params, moments))


def test_weights_without_an_order(tmp_path: pathlib.Path) -> None:
    """Those of unet.cu and ddpm-torch, and fresh ones, are written in either."""
    unetcu, ddpm = tmp_path / 'a.bin', tmp_path / 'a.pt'
    write_weights(unetcu, random_params(UNETCU_SMALL), UNETCU_SMALL)
    config = make(**ddpm_torch.FIXED, channel_mult=(1,), attention_resolutions=())
    ddpm.write_bytes(torch_bytes(from_tree(random_params(config), ddpm_torch.table(config))))
    stated = [
        f'--{n}={v}' for n, v in STATED.items() if n not in ('num_head_channels', 'image_size')
    ]
    fresh = ('jaxunet.export', '--init', f'--config={ROOT}/configs/digits.py')
    for order, new in ORDERS.items():
        path = tmp_path / f'{order}.safetensors'
        for source, flags in ((unetcu, []), (ddpm, [*stated, '--image_size=16'])):
            export(source, path, f'--output_order={order}', *flags)
            assert read_weights(path).new_attention_order is new
        call(*fresh, f'--output={path}', f'--output_order={order}')
        assert read_weights(path).new_attention_order is new


def test_mistakes(tmp_path: pathlib.Path) -> None:
    source = tmp_path / 'a.bin'
    write_weights(source, random_params(UNETCU_SMALL), UNETCU_SMALL)
    for output, flags, message in (
        ('b.bin', ('--output_order=new',), '--output_order: unet.cu has one order only'),
        ('b.pt', ('--output_order=new', '--names=unet.cu'), 'unet.cu has one order only'),
        (
            'b.safetensors',
            ('--output_order=new', '--nonew_attention_order'),
            '--new_attention_order: these weights have no order by themselves; leave it out',
        ),
        ('b.pt', ('--output_order=new', '--classifier'), '--output_order: no effect with'),
    ):
        assert message in export(source, tmp_path / output, *flags, code=2)
        assert [path.name for path in tmp_path.iterdir()] == ['a.bin']
