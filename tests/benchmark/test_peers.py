"""PyTorch's side computes, drops and trains what ours does."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.benchmarks import FIELDS, MEASURED
from support.commands import call
from support.tiny import flags, tiny_config

from jaxunet.benchmark.jax_side import model_loss, random_inputs, synthetic_source
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.model.unet import build_unet
from jaxunet.ops.group_norm import reference
from jaxunet.ops.references import XLA
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

# The two sides compute the same: PyTorch's loss and gradients are ours, on our weights and draws.
PEER_CONFIGS = {
    'elephants64': {},
    'cifar10': {
        'time_embedding': 'ddpm', 'conv_resample': True, 'downsample_padding': 'same', 'norm_eps': 1e-6, 'num_heads': 1,  # noqa: E501
        'num_head_channels': 0, 'init': 'ddpm',
    },
    'imagenet64': {'num_classes': 5, 'scale_shift_norm': True, 'resblock_updown': True},
}  # fmt: skip


def peer_config(name: str, prediction: str = 'epsilon', *, learn_sigma: bool = False) -> Config:
    base = {
        'channel_mult': (1, 2),
        'attention_resolutions': (4,),
        'num_classes': 0,
        'label_dropout': 0.0,
        'zero_init': False,
    }
    return tiny_config(
        model=base | PEER_CONFIGS[name],
        diffusion={'objective': prediction, 'learn_sigma': learn_sigma, 'vlb_weight': 0.02},
        data={'batch_size': 4},
    )


@pytest.mark.parametrize(
    ('name', 'prediction', 'learn_sigma'),
    [
        ('elephants64', 'epsilon', False),
        ('cifar10', 'v', False),
        ('imagenet64', 'epsilon', False),
        ('imagenet64', 'x0', True),
    ],
)
def test_peer_computes_the_same(name: str, prediction: str, learn_sigma: bool) -> None:
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415
    from jaxunet.weights.guided_diffusion import from_tree  # noqa: PLC0415

    config = peer_config(name, prediction, learn_sigma=learn_sigma)
    state, inputs = fresh_state(config), random_inputs(config)
    inputs['t'] = inputs['t'].at[0].set(0)  # the decoder's term
    if 'labels' in inputs:
        inputs['labels'] = inputs['labels'].at[0].set(-1)
    model = build_unet(config, XLA)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: model_loss(config, model, p, inputs)))(
        state.params
    )
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), state.params)
    x0, t, noise = (torch.tensor(np.asarray(inputs[key])) for key in ('x0', 't', 'noise'))
    labels = torch.tensor(np.asarray(inputs['labels'])).long() if 'labels' in inputs else None
    found = side.backward(
        (x0.permute(0, 3, 1, 2), t.long(), noise.permute(0, 3, 1, 2), labels)
    ).item()
    np.testing.assert_allclose(found, float(loss), rtol=1e-5)
    expected = from_tree(jax.device_get(grads), config, new_attention_order=False)
    for key, parameter in side.model.named_parameters():
        gradient = parameter.grad.numpy()
        np.testing.assert_allclose(
            gradient, expected[key], atol=2e-4 * np.abs(expected[key]).max() + 1e-6, err_msg=key
        )


def test_peer_drops_what_we_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both networks with the same factors by channel in place of the random ones."""
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415

    class Factors(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.arange(x.shape[1])[:, None, None]

    monkeypatch.setattr(
        reference,
        'drop',
        lambda x, *_: x * jnp.arange(x.shape[-1], dtype=x.dtype).reshape(1, 1, 1, -1),
    )
    config = peer_config('imagenet64', learn_sigma=True).replace(model={'dropout': 0.1})
    state, inputs = fresh_state(config), random_inputs(config)
    model = build_unet(config, XLA)
    loss = jax.jit(lambda p: model_loss(config, model, p, inputs))(state.params)
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), state.params)
    places = [n for n, m in side.model.named_modules() if isinstance(m, torch.nn.Dropout)]
    assert places
    for name in places:
        side.model.set_submodule(name, Factors())
    x0, t, noise, labels = (
        torch.tensor(np.asarray(inputs[key])) for key in ('x0', 't', 'noise', 'labels')
    )
    found = side.loss(x0.permute(0, 3, 1, 2), t.long(), noise.permute(0, 3, 1, 2), labels.long())
    np.testing.assert_allclose(found.item(), float(loss), rtol=1e-5)


def test_peer_trains_what_we_train() -> None:
    """A whole step of each: dropout, clipping, AdamW and the average."""
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415

    config = tiny_config(
        model={'dropout': 0.5, 'zero_init': False},
        ema={'rates': (0.5, 0.9)},
        data={'augment': 'flip'},
        precision='bfloat16',
    )
    side = TorchSide(config, 'pytorch-eager', synthetic_source(config), fresh_state(config).params)
    before = [p.detach().clone() for p in side.parameters]
    assert np.isfinite(side.step().item())
    norm = torch.nn.utils.get_total_norm([p.grad for p in side.parameters])
    assert norm.item() <= config.optimizer.clip_norm * 1.001
    moved = [p.detach() - old for p, old in zip(side.parameters, before, strict=True)]
    assert max(m.abs().max().item() for m in moved) <= config.optimizer.learning_rate * 1.001
    assert all(m.abs().max().item() > 0 for m in moved if m.ndim == 4)
    for rate, average in zip(config.ema.rates, side.averages, strict=True):
        for a, m, old in zip(average, moved, before, strict=True):
            torch.testing.assert_close(a, old + (1 - rate) * m)
    inputs = side.draw()
    assert len({side.loss(*inputs).item() for _ in range(3)}) > 1  # dropout draws anew


def test_peers_on_the_command_line(tmp_path: pathlib.Path) -> None:
    """On a CPU PyTorch runs as written; the modes that need a GPU are rows that say so."""
    pytest.importorskip('torch', reason='PyTorch is not installed')
    output = tmp_path / 'rows.jsonl'
    options = [
        '--peers=pytorch',
        '--rounds=1',
        '--steps=1',
        '--directions=forward,step',
        '--synthetic',
        f'--output={output}',
    ]
    message = call('jaxunet.benchmark', *flags(), *options, code=1)
    assert 'error: pytorch-best, float32, batch 8, all: needs an NVIDIA GPU' in message
    found = {(row['backend'], row['direction']): row for row in rows.read(output)}
    assert {key for key, row in found.items() if row['error'] is None} == {
        (side, direction) for side in ('auto', 'pytorch-eager') for direction in ('forward', 'step')
    }
    peer = found['pytorch-eager', 'step']
    assert set(peer) == (FIELDS | MEASURED) - {'ops', 'bytes_source', 'peak_source'}
    assert (peer['bytes_moved'], peer['peak_bytes'], peer['lower_s'], peer['reference']) == (
        None,
        None,
        None,
        'auto',
    )
    np.testing.assert_allclose(
        peer['ratio'], peer['median_ms'] / found['auto', 'step']['median_ms']
    )
    assert peer['images'] == 'synthetic images'


def test_peers_refuse_what_they_do_not_train() -> None:
    pytest.importorskip('torch', reason='PyTorch is not installed')
    from jaxunet.benchmark.torch_side import check  # noqa: PLC0415

    for changes, message in (
        ({'precision': 'float16'}, 'precision=float16'),
        ({'diffusion': {'objective': 'flow'}}, 'trains epsilon, x0 and v'),
        ({'data': {'cache': 'stream'}}, 'data.cache=device'),
        ({'timesteps': {'sampler': 'policy'}}, 'trains with timesteps.sampler=uniform, found pol'),
        ({'loss': {'weighting': 'min_snr'}}, 'trains with loss.weighting=uniform, found min_snr'),
        ({'model': {'skip_scale': 0.5}}, 'trains with model.skip_scale=1.0, found 0.5'),
        ({'model': {'remat': True}}, 'trains with model.remat=False, found True; set it to'),
        ({'data': {'noise_assignment': 'batch'}}, 'with data.noise_assignment=none, found batch'),
        ({'data': {'bits': 16}}, 'trains with data.bits=8, found 16; set it to that'),
        ({'model': {'low_res_size': (4,)}}, r'trains with model.low_res_size=\(\), found \(4,'),
    ):
        config = tiny_config(**changes)
        with pytest.raises(UserError, match=message):
            check(config, 'pytorch-eager', synthetic_source(config))
