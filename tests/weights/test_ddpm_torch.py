"""ddpm-torch: its networks, and its checkpoints of weights, averages and optimizer.

`fixtures/peers_golden.npz` holds what its code computed, on weights of a formula.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers_golden import T
from support.commands import call
from support.peer_values import DDPM, FIXTURES, LINEAR, QUICK, close, pictures, state_of
from support.weight_cases import nested_torch_bytes, random_params, same

from jaxunet.checkpoint.load import load_initial, load_model
from jaxunet.checkpoint.optimizer import get_moments
from jaxunet.config import resolve, to_dict
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.weights import ddpm_torch, read_weights
from jaxunet.weights.fields import network_fields
from jaxunet.weights.names import from_tree

# The smallest network of ddpm-torch.
TINY = DDPM.replace(
    model={'channel_mult': (1,), 'attention_resolutions': (), 'conv_resample': False},
    data={'image_size': (8,)},
)


def test_a_network(file: Any) -> None:
    weights = read_weights(file(state_of(ddpm_torch.table(DDPM))), **LINEAR)
    assert network_fields(weights.config) == network_fields(DDPM)
    assert weights.new_attention_order is None
    predict = jax.jit(build_unet(weights.config, XLA).predict, compiler_options=QUICK)
    output = predict(weights.params, pictures(0.37), jnp.array(T))
    close(output, np.load(FIXTURES / 'peers_golden.npz')['ddpm_torch'].transpose(0, 2, 3, 1))


def test_the_architecture_is_inferred(file: Any) -> None:
    config = DDPM.replace(
        model={
            'conv_resample': False,
            'channel_mult': (1, 2, 2),
            'num_res_blocks': 2,
            'attention_resolutions': (16, 4),
        }
    )
    weights = read_weights(file(state_of(ddpm_torch.table(config))), **LINEAR)
    assert network_fields(weights.config) == network_fields(config)


@pytest.mark.parametrize(
    ('change', 'options', 'message'),
    [
        ({}, {'num_heads': 4}, 'num_heads: ddpm-torch always has num_heads=1'),
        ({}, {'schedule': 'cosine'}, 'schedule: expected linear for weights of ddpm-torch'),
        ({}, {'diffusion_steps': 500}, 'diffusion_steps: expected 1000 for weights of ddpm-torch'),
        ({'out_conv.2.weight': (6, 32, 3, 3)}, {}, 'learned variance .* is not supported'),
        ({'out_conv.2.weight': (5, 32, 3, 3)}, {}, 'expected 3 output channels, found 5'),
        ({'_model.a': (1,)}, {}, 'block_size above 1'),
        ({'embed.0.weight': (128, 33)}, {}, r'expected shape \(4 base, base\), found \(128, 33\)'),
        ({'extra.weight': (1,)}, {}, 'extra.weight: unexpected'),
        ({'downsamples.level_9999.0.conv1.weight': (1,)}, {}, 'downsamples.level_2.0.conv1.weight'),
    ],
)
def test_mistakes(file: Any, change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    state = state_of(ddpm_torch.table(DDPM))
    state |= {name: np.ones(shape, np.float32) for name, shape in change.items()}
    with pytest.raises(UserError, match=message):
        read_weights(file(state), **LINEAR | options)


# --- checkpoints


def trees(config: Any = DDPM) -> dict[str, Any]:
    """Weights, averages and moments."""
    found = {name: random_params(config, k) for k, name in enumerate(('model', 'ema', 'mu', 'nu'))}
    return found | {'nu': jax.tree.map(np.square, found['nu'])}


def checkpoint(config: Any = DDPM, step: Any = 390_000.0) -> dict[str, Any]:
    """A checkpoint as its trainer saves it on several GPUs."""
    table = ddpm_torch.table(config)
    states = {name: from_tree(tree, table) for name, tree in trees(config).items()}
    moments = zip(states['mu'].values(), states['nu'].values(), strict=True)
    adam = {
        i: {'step': step, 'exp_avg': mu, 'exp_avg_sq': nu} for i, (mu, nu) in enumerate(moments)
    }
    group = {'lr': 2e-4, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0, 'foreach': None}
    return {
        'model': {f'module.{name}': value for name, value in states['model'].items()},
        'optimizer': {'state': adam, 'param_groups': [group | {'params': list(adam)}]},
        'ema': {'decay': 0.9999, 'shadow': states['ema'], 'num_updates': 7},
        'scheduler': {'lr_lambdas': [None], 'verbose': False},
        'epoch': 12,
        'loss': 0.03,
    }


def test_weights_and_averages_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """The averages unless --ema=none, and the note says which; moments with the weights."""
    tree, expected = checkpoint(), trees()
    path = tmp_path / 'a.pt'
    path.write_bytes(nested_torch_bytes(tree))
    for ema, name, note in (
        ('', 'ema', "its averages 'ema' of rate 0.9999 (--ema=none takes 'model')"),
        ('0.9999', 'ema', "its averages 'ema'"),
        ('none', 'model', "with Adam moments, its weights 'model' (not the averages 'ema')"),
    ):
        model = load_model(str(path), ema=ema, **LINEAR)
        assert note in model.note
        same(model.params, expected[name])
        assert (model.moments is not None) == (name == 'model')
    same(model.moments, (expected['mu'], expected['nu']))
    with pytest.raises(UserError, match=r"--ema: .*: expected 0\.9999 or none, found '0.99'"):
        load_model(str(path), ema='0.99', **LINEAR)
    del tree['ema']
    path.write_bytes(nested_torch_bytes(tree))
    with pytest.raises(UserError, match='holds one set of weights'):
        load_model(str(path), ema='0.9999', **LINEAR)


def test_a_run_takes_it_up(tmp_path: pathlib.Path) -> None:
    """The run's config fills in the fields that the file leaves open."""
    path, expected = tmp_path / 'a.pt', trees()
    path.write_bytes(nested_torch_bytes(checkpoint()))
    run = resolve(to_dict(DDPM.replace(init_from=str(path), optimizer={'warmup_steps': 0})))
    assert read_weights(path, like=DDPM).config == DDPM
    for ema, name in (('', 'ema'), ('none', 'model')):
        state = load_initial(run.replace(init_from_ema=ema))
        assert state is not None
        same(state.params, expected[name])
        mu, nu = get_moments(state.opt_state)
        if ema:
            same((mu, nu), (expected['mu'], expected['nu']))
        else:
            assert not any(leaf.any() for leaf in jax.tree.leaves((mu, nu)))
    with pytest.raises(UserError, match=r"^init_from_ema: .*: expected 0\.9999 or none, found '0'"):
        load_initial(run.replace(init_from_ema='0'))
    with pytest.raises(UserError, match='init_from_ema: none needs init_from'):
        resolve(to_dict(DDPM.replace(init_from_ema='none')))


def test_early_moments_are_corrected(tmp_path: pathlib.Path) -> None:
    """PyTorch's own optimizer has moments biased toward 0; what is read has none of the bias."""
    torch = pytest.importorskip(
        'torch', reason="PyTorch, whose optimizer's state is read, is missing"
    )
    state = from_tree(random_params(TINY), ddpm_torch.table(TINY))
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in state.items()}
    adam = torch.optim.Adam(params.values(), lr=1e-3)
    for _ in range(3):
        for k, value in enumerate(params.values()):
            value.grad = torch.full_like(value, 0.5 + k)
        adam.step()
    torch.save({'model': params, 'optimizer': adam.state_dict()}, tmp_path / 'a.pt')
    weights = read_weights(tmp_path / 'a.pt', TINY)
    assert weights.moments is not None
    table = ddpm_torch.table(TINY)
    for tree, power in zip(weights.moments, (1, 2), strict=True):
        for k, value in enumerate(from_tree(tree, table).values()):
            np.testing.assert_allclose(value, (0.5 + k) ** power, rtol=1e-5)


def in_state(i: int, **change: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer['state'][i].update(change)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (in_state(1, exp_avg=None), r'state\[1\]\.exp_avg: expected a tensor of shape \(128,\)'),
        (
            in_state(0, exp_avg_sq=np.ones(3, np.float32)),
            r'state\[0\]\.exp_avg_sq: expected a tensor of shape \(128, 32\), that of '
            r'module\.embed\.0\.weight, found shape \(3,\)',
        ),
        (in_state(2, step=7.0), 'step: expected one number of updates of all parameters'),
        (in_state(2, step='x'), r"state\[2\]\.step: expected a number, found 'x'"),
        (in_state(2, step=np.ones((), np.float32)), 'one number of updates .*, found 1, 390000'),
        (in_state(0, exp_avg_sq=-np.ones((128, 32), np.float32)), 'second moment of .*found -1'),
        (in_state(0, exp_avg=np.full((128, 32), np.nan, np.float32)), 'expected finite numbers'),
        (lambda optimizer: optimizer['state'].pop(3), r'the state of all \d+ parameters, found 1'),
        (lambda optimizer: optimizer['param_groups'].append({}), r'parameters, found 2 with'),
        (lambda optimizer: optimizer.pop('state'), r'with state and param_groups, found'),
        (lambda optimizer: optimizer['param_groups'][0].pop('betas'), 'betas: expected two'),
    ],
)
def test_mistakes_in_an_optimizer(
    tmp_path: pathlib.Path, change: Callable[[Any], None], message: str
) -> None:
    """Weights without them can still be read."""
    tree = copy.deepcopy(checkpoint(TINY))
    change(tree['optimizer'])
    path = tmp_path / 'a.pt'
    path.write_bytes(nested_torch_bytes(tree))
    with pytest.raises(UserError, match=message) as error:
        read_weights(path, TINY, ema='none')
    assert '\n' not in str(error.value)
    read_weights(path, TINY)


def test_the_commands(tmp_path: pathlib.Path) -> None:
    """Its checkpoint is sampled, exported with its moments, and trained on."""
    path, expected = tmp_path / 'a.pt', trees(TINY)
    path.write_bytes(nested_torch_bytes(checkpoint(TINY)))
    stated = ('--image_size=8', '--schedule=linear', '--diffusion_steps=1000')
    stated += ('--objective=epsilon',)
    out = call(
        *('jaxunet.sample', f'--checkpoint={path}', *stated, '--like=ddpm_torch', '--timesteps=0'),
        *('--num_samples=2', f'--output={tmp_path}/samples.npz'),
    )
    assert "its averages 'ema' of rate 0.9999" in out
    copy_of_it = tmp_path / 'b.safetensors'
    out = call(
        *('jaxunet.export', f'--checkpoint={path}', *stated, '--with_optimizer'),
        f'--output={copy_of_it}',
    )
    assert "its weights 'model'" in out
    assert 'with optimizer moments' in out
    weights = read_weights(copy_of_it)
    same(weights.params, expected['model'])
    same(weights.moments, (expected['mu'], expected['nu']))
    np.savez(tmp_path / 'images.npz', images=np.zeros((4, 8, 8, 3), np.uint8))
    fields = {f'model.{name}': value for name, value in to_dict(TINY)['model'].items()}
    fields |= {'data.path': tmp_path / 'images.npz', 'data.image_size': 8, 'data.batch_size': 2}
    fields |= {'train.steps': 1, 'train.sample_every': 0, 'optimizer.learning_rate': 1e-12}
    fields |= {'optimizer.clip_norm': 1.0, 'init_from': path, 'init_from_ema': 'none'}
    flags = [f'--config.{name}={value}' for name, value in fields.items()]
    call('jaxunet.train', *flags, f'--workdir={tmp_path}/run')
    started = load_model(str(tmp_path / 'run'), ema='none')
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-7)
    jax.tree.map(close, started.params, expected['model'])
    # μ ← β1 μ + (1 − β1) g, with a gradient g of norm 1 at most.
    steps = jax.tree.map(lambda new, old: new - 0.9 * old, started.moments[0], expected['mu'])
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(steps)))
    assert 0.05 < norm < 0.11
