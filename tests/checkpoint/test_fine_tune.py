"""Runs that start from weights of another number of classes, channels or pixels."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest
from support.commands import call
from support.tiny import tiny_config
from support.weight_cases import random_params, torch_bytes

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.fine_tune import Fitted, Network, fit
from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.optimizer import get_moments
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.runtime.errors import UserError
from jaxunet.weights import guided_diffusion, read_weights, write_weights
from jaxunet.weights.fields import needed_fields
from jaxunet.weights.names import check_tree, flatten

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures' / 'e54d28d'
ANIMALS = ('cat', 'cow', 'dog')
THERE = tiny_config(
    model={'num_classes': 3, 'image_channels': 3, 'attention_resolutions': (8,)},
    diffusion={'learn_sigma': True},
)
OUTER = {('conv_in', 'kernel'), ('conv_in', 'bias'), ('conv_out', 'kernel'), ('conv_out', 'bias')}
TABLE = ('label_embed', 'embedding')


@pytest.fixture(scope='module')
def params():
    return random_params(THERE)


def fitted(params, here: Config, our_names=(), their_names=(), there: Config = THERE) -> Fitted:
    result = fit(params, Network(there, their_names), Network(here, our_names), 'model.pt')
    check_tree(result.params, here)
    return result


def changed(params, result: Fitted) -> set[tuple[str, ...]]:
    """Paths of the leaves that are not exactly the given ones."""
    before, after = flatten(params), flatten(result.params)
    return {
        path
        for path in before.keys() | after.keys()
        if path not in before
        or path not in after
        or before[path].shape != after[path].shape
        or (before[path] != after[path]).any()
    }


@functools.cache
def fresh_leaves(config: Config) -> dict[tuple[str, ...], np.ndarray]:
    return flatten(fresh_state(config).params)


def fresh(config: Config, path: tuple[str, ...]) -> np.ndarray:
    return fresh_leaves(config)[path]


def test_the_same_network_keeps_everything(params):
    result = fitted(params, THERE, ANIMALS, ANIMALS)
    total = sum(leaf.size for leaf in flatten(params).values())
    assert result.report == (f'kept: {total:,} of {total:,} parameters',)
    assert result.complete
    assert not changed(params, result)


def test_another_image_size_keeps_every_weight(params):
    here = THERE.replace(data={'image_size': (16, 32)}, model={'attention_resolutions': (16,)})
    result = fitted(params, here, ANIMALS, ANIMALS)
    assert result.complete
    assert result.report[1:] == (
        'image size: 8x8 pixels there, 16x32 here; no weights depend on it',
    )


def test_other_image_channels_start_the_outer_convolutions_fresh(params):
    here = THERE.replace(model={'image_channels': 1})
    result = fitted(params, here, ANIMALS, ANIMALS)
    assert changed(params, result) == OUTER
    for path in OUTER:
        np.testing.assert_array_equal(flatten(result.params)[path], fresh(here, path))
    first, second = result.report[1:]
    assert first.startswith('fresh: conv_in, the first convolution: 3 image channels there, 1 here')
    assert second.startswith('fresh: conv_out, the last convolution')
    counted = result.report[0].split()
    total, new = (
        sum(leaf.size for path, leaf in flatten(result.params).items() if path in paths)
        for paths in (flatten(result.params), OUTER)
    )
    assert counted == ['kept:', f'{total - new:,}', 'of', f'{total:,}', 'parameters']
    assert not result.complete


def test_the_learned_variance_comes_and_goes(params):
    without = THERE.replace(diffusion={'learn_sigma': False})
    less = fitted(params, without, ANIMALS, ANIMALS)
    kernel = params['conv_out']['kernel']
    np.testing.assert_array_equal(less.params['conv_out']['kernel'], kernel[..., :3])
    assert any('left out: the outputs of conv_out for the variance' in line for line in less.report)
    more = fitted(less.params, THERE, ANIMALS, ANIMALS, there=without)
    again = more.params['conv_out']['kernel']
    np.testing.assert_array_equal(again[..., :3], kernel[..., :3])
    np.testing.assert_array_equal(again[..., 3:], fresh(THERE, ('conv_out', 'kernel'))[..., 3:])
    assert any('fresh: the outputs of conv_out for the variance' in line for line in more.report)


def test_rows_of_classes_follow_their_names(params):
    here = THERE.replace(model={'num_classes': 4})
    result = fitted(params, here, ('dog', 'emu', 'cat'), ANIMALS)
    assert changed(params, result) == {TABLE}
    before, after = flatten(params)[TABLE], flatten(result.params)[TABLE]
    np.testing.assert_array_equal(after[[0, 2]], before[[2, 0]])
    np.testing.assert_array_equal(after[[1, 3]], fresh(here, TABLE)[[1, 3]])
    assert result.report[1:] == (
        'label table: kept by name: dog, cat; fresh: emu, label 3; left out: cow',
    )


def test_numbers_in_another_order_are_names(params):
    """Earlier versions sorted numbered folders as text."""
    result = fitted(params, THERE, ('0', '1', '2'), ('0', '2', '1'))
    before, after = flatten(params)[TABLE], flatten(result.params)[TABLE]
    np.testing.assert_array_equal(after, before[[0, 2, 1]])
    assert result.report[1] == 'label table: kept by name: 0, 1, 2'


@pytest.mark.parametrize(
    ('classes', 'their_names', 'our_names', 'kept', 'line'),
    [
        (3, (), ANIMALS, True, 'label table: kept by number'),
        (3, ('0', '1', '2'), ('0', '1', '2'), True, 'label table: kept by number'),
        (3, ANIMALS, ('emu', 'fox', 'gnu'), False, 'label table: fresh: emu, fox, gnu; left out: '),
        (2, (), ('cat', 'dog'), False, 'fresh: the label table: 3 classes there'),
        (2, ('0', '1', '2'), ('0', '1'), False, 'fresh: the label table: 3 classes there'),
        (0, ANIMALS, (), False, 'left out: the label table'),
    ],
)
def test_label_tables_without_common_names(params, classes, their_names, our_names, kept, line):
    here = THERE.replace(model={'num_classes': classes, 'label_dropout': 0.0})
    result = fitted(params, here, our_names, their_names)
    assert changed(params, result) == (set() if kept else {TABLE})
    assert result.complete == kept
    assert result.report[1].startswith(line)


def test_an_unconditional_network_gets_a_fresh_label_table(params):
    there = THERE.replace(model={'num_classes': 0, 'label_dropout': 0.0})
    given = {name: module for name, module in params.items() if name != 'label_embed'}
    result = fitted(given, THERE, ANIMALS, there=there)
    np.testing.assert_array_equal(flatten(result.params)[TABLE], fresh(THERE, TABLE))
    assert result.report[1] == 'fresh: the label table: unconditional there, 3 classes here'


def test_another_meaning_of_the_output_is_listed(params):
    here = THERE.replace(diffusion={'schedule': 'cosine', 'steps': 50})
    result = fitted(params, here, ANIMALS, ANIMALS)
    assert result.report[1:] == (
        'changed: diffusion.steps: 40 there, 50 here; timesteps stand for other noise levels',
        'changed: diffusion.schedule: linear there, cosine here; '
        'timesteps stand for other noise levels',
    )
    here = THERE.replace(diffusion={'objective': 'edm'})
    assert fitted(params, here, ANIMALS, ANIMALS).report[1:] == (
        'changed: diffusion.objective: epsilon there, edm here; '
        'the output of the last layer means something else',
        'changed: the time that the network reads stands for other noise levels',
    )
    assert fitted(params, here, ANIMALS, ANIMALS).complete


def test_another_network_names_the_fields_to_set(params):
    changes = {
        'base_channels': 16,
        'channel_mult': (1, 2),
        'num_res_blocks': 2,
        'attention_resolutions': (),
        'norm_groups': 8,
        'scale_shift_norm': True,
    }
    other = THERE.replace(model=changes, data={'image_size': (32,)})
    with pytest.raises(UserError) as error:
        fitted(params, other)
    first, *lines = str(error.value).splitlines()
    assert first.startswith('model.pt: cannot start this run: only classes, image size, ')
    values = {line.split('.', 1)[1].split('=')[0]: line for line in lines}
    assert values.keys() == changes.keys()
    assert 'model.base_channels=8 (now 16)' in values['base_channels']
    # At 32 pixels, attention at full resolution has another name than at 8.
    assert 'model.attention_resolutions=(32,) (now ())' in values['attention_resolutions']
    # With the fields of the message it starts.
    wanted = {name: getattr(THERE.model, name) for name in changes}
    fitted(params, other.replace(model=wanted | {'attention_resolutions': (32,)}))


def test_fields_that_are_equal_are_not_to_be_set():
    """The heads of the decoder follow those of the encoder."""
    heads = tiny_config(model={'num_heads': 1, 'num_head_channels': 0})
    widths = tiny_config(model={'num_heads': 0, 'num_head_channels': 8})
    assert needed_fields(heads, widths) == [
        'model.num_head_channels=0 (now 8)',
        'model.num_heads=1 (now 0)',
    ]


@pytest.mark.parametrize('own', [True, False])
def test_an_exported_pt_starts_other_images(own, params, tmp_path, caplog):
    """The .pt may have the config that `jaxunet.export` writes, or none, as guided-diffusion's."""
    there = THERE.replace(model={'norm_groups': 32, 'base_channels': 32, 'num_head_channels': 8})
    params, path = random_params(there), tmp_path / 'model.pt'
    if own:
        write_weights(path, params, there, class_names=ANIMALS)
    else:
        state = guided_diffusion.from_tree(params, there, new_attention_order=True)
        path.write_bytes(torch_bytes(state))
    here = there.replace(
        init_from=str(path),
        init_from_order='' if own else 'new',
        model={'num_classes': 2, 'image_channels': 1, 'attention_resolutions': (16,)},
        diffusion={'learn_sigma': False, 'objective': 'v'},
        data={'image_size': (16,)},
    )
    with caplog.at_level('INFO'):
        state = load_initial(here, ('dog', 'cow'))
    check_tree(state.params, here)
    before, after = flatten(params), flatten(state.params)
    kept = before.keys() - OUTER - {TABLE}
    assert len(kept) > 20
    for leaf in kept:
        np.testing.assert_array_equal(before[leaf], after[leaf])
    assert (after[TABLE] == before[TABLE][[2, 1]]).all() == own
    assert 'fresh: conv_in' in caplog.text
    assert 'changed: diffusion.objective: epsilon there, v here' in caplog.text
    assert ('kept by name: dog, cow' if own else 'fresh: the label table') in caplog.text
    # A foreign file cannot say how its heads are divided; its widths it shows.
    with pytest.raises(UserError, match=r'(?s)only classes.*model.base_channels=32 \(now 64\)'):
        load_initial(here.replace(model={'base_channels': 64}))


def test_moments_stay_with_complete_weights_only(params, tmp_path):
    path = tmp_path / 'model.safetensors'
    moments = random_params(THERE, 1), random_params(THERE, 2)
    second = {k: {n: _squared(v) for n, v in m.items()} for k, m in moments[1].items()}
    write_weights(path, params, THERE, (moments[0], second), class_names=ANIMALS)
    same = THERE.replace(init_from=str(path))
    mu, _ = get_moments(load_initial(same, ANIMALS).opt_state)
    assert checkpoint.checksum(mu) == checkpoint.checksum(moments[0])
    other = same.replace(model={'image_channels': 1})
    mu, nu = get_moments(load_initial(other, ANIMALS).opt_state)
    assert not any(np.any(leaf) for tree in (mu, nu) for leaf in flatten(tree).values())


def _squared(value):
    return {n: np.square(v) for n, v in value.items()} if isinstance(value, dict) else value**2


@pytest.mark.parametrize('name', ['conditional', 'half'])
def test_old_checkpoints_start_other_images(name):
    folder = FIXTURES / name
    there = checkpoint.read(folder)
    side = min(there.config.image_shape[:2])
    here = there.config.replace(
        init_from=str(folder),
        model={
            'image_channels': 3,
            'num_classes': 5,
            'attention_resolutions': tuple(2 * side >> n for n in there.config.attention_levels),
        },
        data={'image_size': (2 * side,)},
        ema={'rates': (0.9,)},
    )
    state = load_initial(here, ('a', 'b', 'c', 'd', 'e'))
    average = flatten(there.state.ema[str(there.config.ema.rates[0])])
    for path, leaf in flatten(state.params).items():
        if path in OUTER | {TABLE}:
            np.testing.assert_array_equal(leaf, fresh(here, path))
        else:
            np.testing.assert_array_equal(leaf, average[path])


@pytest.mark.long
def test_the_command_starts_with_other_classes(tmp_path):
    """`jaxunet.export` writes a file; `jaxunet.train` goes on from it with two of its classes."""
    model = checkpoint.read(FIXTURES / 'conditional').config.model
    path = tmp_path / 'model.safetensors'
    call('jaxunet.export', f'--checkpoint={FIXTURES / "conditional"}', f'--output={path}')
    names = ('channel_mult', 'attention_resolutions', 'norm_groups', 'num_head_channels')
    arguments = [
        *(f'--config.model.{name}={getattr(model, name)}' for name in names),
        *('--config.model.num_classes=2', '--config.data.classes=3,7', '--config.train.steps=1'),
        *('--config.train.sample_every=0', '--config.data.batch_size=4'),
        *(f'--config.init_from={path}', '--config.optimizer.learning_rate=1e-12'),
        f'--workdir={tmp_path / "run"}',
    ]
    refused = call('jaxunet.train', *arguments, code=2)
    assert f'model.base_channels={model.base_channels} (now 32)' in refused
    call('jaxunet.train', *arguments, f'--config.model.base_channels={model.base_channels}')
    started = checkpoint.read(tmp_path / 'run')
    assert started.facts.class_names == ('3', '7')
    assert started.state.params['label_embed']['embedding'].shape[0] == 2
    before, after = flatten(read_weights(path).params), flatten(started.state.params)
    for leaf in before.keys() - {TABLE}:
        np.testing.assert_allclose(before[leaf], after[leaf], atol=1e-9)
