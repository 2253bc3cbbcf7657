"""configs/images.py: what a config leaves open is chosen from the images."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from PIL import Image
from support.configs import CONFIGS, load
from support.data_files import encoded, put, random_pixels
from support.tiny import tiny_config

from jaxunet.config import Config, resolve, to_dict
from jaxunet.data import automatic
from jaxunet.data.automatic import OPEN, Facts, choose, complete, with_values
from jaxunet.data.sources import open_images
from jaxunet.runtime.errors import UserError

IMAGES = next(path for path in CONFIGS if path.stem == 'images')


def config_for(path, **changes):
    values = load(IMAGES)
    values.data.path = str(path)
    for field, value in changes.items():
        section, _, name = field.partition('__')
        setattr(getattr(values, section), name, value)
    return values


def photos(tmp_path, sizes, form='folder'):
    files = {f'{i}.png': encoded(random_pixels(i, (*s, 3))) for i, s in enumerate(sizes)}
    return put(tmp_path, files, form)


@pytest.mark.parametrize(
    ('sizes', 'size', 'mult', 'attention'),
    [
        ([(64, 64)] * 3, (64,), (1, 2, 3, 4), (16, 8)),
        ([(300, 200), (120, 500), (90, 90)], (64,), (1, 2, 3, 4), (16, 8)),  # photographs
        ([(48, 40), (50, 44), (41, 90)], (40,), (1, 2, 3), (10,)),  # smaller than usual
        ([(48, 64)] * 2, (48, 64), (1, 2, 3), (12,)),
        ([(128, 128)] * 2, (128,), (1, 1, 2, 3, 4), (16, 8)),
        ([(129, 129)] * 2, (64,), (1, 2, 3, 4), (16, 8)),
        ([(100, 100)] * 2, (96,), (1, 2, 3, 4), (24, 12)),
        ([(32, 32)] * 2, (32,), (1, 2, 3), (16, 8)),
        ([(28, 28)] * 2, (28,), (1, 2, 3), (14, 7)),
        ([(8, 8)] * 2, (8,), (1, 2), (8, 4)),
    ],
)
def test_the_size_and_the_network_follow_the_images(sizes, size, mult, attention):
    raw = load(IMAGES).to_dict()
    chosen = choose(raw, Facts(1000, sizes, False))
    assert chosen['data.image_size'] == size
    assert chosen['model.channel_mult'] == mult
    assert chosen['model.attention_resolutions'] == attention
    for path, value in chosen.items():
        section, name = path.split('.')
        raw[section][name] = value
    resolve(raw)  # such a network exists


@pytest.mark.parametrize(
    ('size', 'mult', 'attention', 'batch'),
    [
        ((256,), (1, 1, 2, 2, 4, 4), (16, 8), 16),
        ((512,), (1, 1, 1, 2, 2, 4, 4), (16, 8), 8),
        ((256, 512), (1, 1, 2, 2, 4, 4), (16, 8), 8),
        ((192,), (1, 1, 2, 3, 4), (24, 12), 16),
        ((200,), (1, 2, 3, 4), (25,), 16),  # odd sides end the ladder; 50 pixels are too many
    ],
)
def test_large_images_have_attention_at_the_lowest_two_levels(size, mult, attention, batch):
    raw = load(IMAGES).to_dict()
    raw['data']['image_size'] = size
    chosen = choose(raw, Facts(1000, [(900, 800)], False))
    assert chosen['model.channel_mult'] == mult
    assert chosen['model.attention_resolutions'] == attention
    assert chosen['data.batch_size'] == batch
    resolve(with_values(raw, chosen))  # such a network exists


@pytest.mark.parametrize(
    ('images', 'steps', 'batch'), [(500, 12_000, 32), (9000, 51_000, 32), (5, 4000, 4)]
)
def test_the_length_and_the_batch_follow_the_number_of_images(images, steps, batch):
    chosen = choose(load(IMAGES).to_dict(), Facts(images, [(64, 64)], False))
    assert (chosen['train.steps'], chosen['data.batch_size']) == (steps, batch)
    assert steps % 1000 == 0  # so that 20 steps can run in a call


@pytest.mark.parametrize(
    ('images', 'schedule', 'chosen'),
    [
        (450, 'linear', ('v', 'cosine')),
        (450, None, ('v', 'cosine')),  # a config without the field, whose default is linear
        (9000, 'linear', ('flow', 'linear')),
        (9000, 'cosine', ('v', 'cosine')),  # set by the user, and flow has none
    ],
)
def test_the_objective_follows_the_number_of_images(images, schedule, chosen):
    raw = load(IMAGES).to_dict()
    raw['diffusion']['schedule'] = schedule
    if schedule is None:
        del raw['diffusion']['schedule']
    found = choose(raw, Facts(images, [(64, 64)], False))
    found.setdefault('diffusion.schedule', schedule)
    assert (found['diffusion.objective'], found['diffusion.schedule']) == chosen
    raw['diffusion'] |= {'objective': 'epsilon', 'schedule': 'linear'}
    assert not {'diffusion.objective', 'diffusion.schedule'} & set(
        choose(raw, Facts(images, [(64, 64)], False))
    )


def test_small_images_take_larger_batches_and_rates():
    raw = load(IMAGES).to_dict()
    large, small = (choose(raw, Facts(1000, [(side, side)], False)) for side in (64, 32))
    assert (large['data.batch_size'], small['data.batch_size']) == (32, 128)
    assert (large['optimizer.learning_rate'], small['optimizer.learning_rate']) == (4e-4, 8e-4)
    constant = {**raw, 'optimizer': {**raw['optimizer'], 'schedule': 'constant'}}
    for gentle in (constant, {**raw, 'init_from': 'runs/other'}):
        assert choose(gentle, Facts(1000, [(32, 32)], False))['optimizer.learning_rate'] == 2e-4


@pytest.mark.parametrize(
    ('prefix', 'form'),
    [*(('', form) for form in ('folder', 'zip', 'tar', 'tar.xz')), ('cifar10:', 'tar.xz')],
)
def test_mixed_images_in_every_form(tmp_path, prefix, form):
    path = photos(tmp_path, [(70, 50), (40, 80), (41, 41)], form)
    config = complete(config_for(f'{prefix}{path}'))
    assert config.image_shape == (40, 40, 3)
    assert config.data.batch_size == 2


def test_only_grey_images_give_one_channel(tmp_path):
    grey = encoded(random_pixels(0, (32, 32)))
    colours = encoded(random_pixels(1, (32, 32, 3)))
    transparent = encoded(Image.fromarray(random_pixels(2, (32, 32, 4)), 'RGBA'))
    repeated = encoded(np.repeat(random_pixels(3, (32, 32, 1)), 3, axis=2))
    folders = [
        put(tmp_path / str(i), {f'{j}.png': image for j, image in enumerate(images)}, 'folder')
        for i, images in enumerate([(grey, repeated), (grey, colours), (transparent, grey)])
    ]
    assert [complete(config_for(f)).model.image_channels for f in folders] == [1, 3, 3]


def test_few_images_with_colours_give_three_channels(tmp_path):
    """A scanned album with some colour photographs is not trained in grey."""
    grey, colours = (
        encoded(random_pixels(i, shape)) for i, shape in enumerate([(8, 8), (8, 8, 3)])
    )
    images = {f'{i:03}.png': colours if i % 50 == 7 else grey for i in range(200)}
    assert complete(config_for(put(tmp_path, images, 'folder'))).model.image_channels == 3


def test_arrays_of_other_channels_need_them_set(tmp_path):
    np.savez(tmp_path / 'four.npz', images=random_pixels(0, (4, 16, 16, 4)))
    with pytest.raises(UserError, match=r'images have 4 channels.*so set it to 4'):
        complete(config_for(tmp_path / 'four.npz'))
    values = config_for(tmp_path / 'four.npz', model__image_channels=4, train__sample_every=0)
    assert complete(values).image_shape == (16, 16, 4)


def test_what_is_set_stays(tmp_path):
    path = photos(tmp_path, [(70, 50)] * 3)
    values = config_for(
        path,
        data__image_size=(32,),
        data__batch_size=2,
        model__channel_mult=(1, 2),
        train__steps=60,
    )
    config = complete(values)
    assert config.image_shape == (32, 32, 3)
    assert config.data.batch_size == 2
    assert config.model.channel_mult == (1, 2)
    assert config.model.attention_resolutions == ()
    assert config.train.steps == 60
    assert config.optimizer.learning_rate == 1e-4


def test_a_config_that_leaves_nothing_open_opens_nothing(tmp_path):
    values = to_dict(tiny_config(data={'path': str(tmp_path / 'nothing')}))
    assert complete(values) == resolve(values)


def test_every_other_config_is_complete():
    for path in CONFIGS:
        raw = load(path).to_dict()
        left_open = [field for field in OPEN if automatic.value_at(raw, field) == OPEN[field]]
        of_tunings = {'model.dropout', 'ema.rates'}
        assert left_open == ([f for f in OPEN if f not in of_tunings] if path == IMAGES else [])


def test_a_resumed_run_keeps_what_was_chosen(tmp_path):
    path = photos(tmp_path, [(64, 64)] * 3)
    first = complete(config_for(path))
    photos(tmp_path, [(16, 16)] * 3)  # other images in the same place
    assert complete(config_for(path)) != first
    assert complete(config_for(path), known=first) == first
    longer = complete(config_for(path, train__steps=8000), known=first)
    assert longer == first.replace(train={'steps': 8000})


def test_a_field_that_a_resumed_run_sets_is_not_replaced(tmp_path):
    """The run then refuses it, instead of going on without it."""
    path = photos(tmp_path, [(16, 16)] * 3)
    first = complete(config_for(path))
    found = complete(config_for(path, model__attention_resolutions=(8,)), known=first)
    assert found == first.replace(model={'attention_resolutions': (8,)})
    flow = first.replace(diffusion={'objective': 'flow', 'schedule': 'linear'})
    with pytest.raises(UserError, match=r'diffusion\.schedule: cosine belongs to .*epsilon'):
        complete(config_for(path, diffusion__schedule='cosine'), known=flow)


def test_the_log_names_the_choices_and_the_end(tmp_path, caplog):
    path = photos(tmp_path, [(70, 50), (40, 80)])
    with caplog.at_level(logging.INFO, logger='absl'):
        complete(config_for(path))
    chosen, end = (record.message for record in caplog.records)
    assert chosen.startswith(
        'chosen for 2 images of 40x80 to 70x50 pixels (height x width): data.image_size=40, '
    )
    assert 'train.steps=4000' in chosen
    # Batches of two; one of the images is held out.
    assert 'ends after 4,000 steps, when it has seen each image about 8,000 times' in end


@pytest.mark.parametrize('objective', ['flow', 'v'])
def test_a_run_from_the_weights_of_another_keeps_its_objective(objective, tmp_path):
    few = config_for(photos(tmp_path, [(16, 16)] * 3))
    start = complete(few).replace(diffusion={'objective': objective, 'schedule': 'linear'})
    found = complete(few, start=start).diffusion
    assert (found.objective, found.schedule) == (objective, 'linear')
    chosen = config_for(tmp_path, diffusion__objective='edm')
    assert complete(chosen, start=start).diffusion.objective == 'edm'


def test_images_are_not_opened_for_an_objective_that_is_kept(tmp_path):
    start = tiny_config(diffusion={'objective': 'v', 'schedule': 'cosine'})
    raw = to_dict(tiny_config(data={'path': str(tmp_path / 'nothing')}))
    raw['diffusion']['objective'] = ''
    assert complete(raw, start=start).diffusion == start.diffusion


def test_the_log_counts_one_image(tmp_path, caplog):
    path = photos(tmp_path, [(16, 16)])
    with caplog.at_level(logging.INFO, logger='absl'):
        complete(config_for(path, train__steps=8))
    assert caplog.text.count('chosen for 1 image of 16x16 pixels') == 1


def test_other_files_are_named_once(tmp_path, caplog):
    path = photos(tmp_path, [(16, 16)] * 3)
    (path / 'notes.txt').write_text('no image')
    open_images(complete(config_for(path)))
    assert caplog.text.count(f'{path}: 1 file is left out: notes.txt (not an image)') == 1


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data__path': ''}, 'data.path: expected a folder of images, .* found an empty path'),
        ({'train__log_every': 0}, 'train.log_every: expected more than 0'),
        ({'data__image_size': (30, 'x')}, r"data.image_size\[1\]: expected int, found 'x'"),
        ({'data__batch_size': -4}, 'data.batch_size: expected more than 0, found -4'),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, message):
    values = config_for(tmp_path / 'nothing').to_dict()
    for field, value in changes.items():
        section, _, name = field.partition('__')
        values[section][name] = value
    with pytest.raises(UserError, match=message):
        complete(values)


def test_images_that_are_too_small_are_refused(tmp_path):
    with pytest.raises(UserError, match='the images have 6x6 pixels; expected 8 a side or more'):
        complete(config_for(photos(tmp_path, [(6, 20), (20, 6)])))


def test_a_missing_section_is_reported():
    with pytest.raises(UserError, match='data: expected a section'):
        complete({'data': 3, 'train': {'steps': 0}})


def test_the_defaults_are_complete():
    assert complete({}) == Config()


@pytest.mark.parametrize(
    ('epochs', 'holdout', 'calls', 'steps'),
    [
        (3, 0, 1, 135),  # 3 · 1,797 images in batches of 40: 134.8
        (2.5, 97, 1, 107),  # 2.5 · 1,700 / 40 = 106.25
        (3, 0, 8, 136),  # in calls of 8 steps
        (3, 0, 0, 140),  # calls of up to 20 steps, which divide the other counts
        (0.001, 0, 1, 1),
    ],
)
def test_epochs_become_steps(epochs, holdout, calls, steps, caplog):
    caplog.set_level(logging.INFO)
    values = to_dict(Config())
    values['data'] |= {'batch_size': 40, 'holdout': float(holdout)}
    counts = dict.fromkeys(('log_every', 'sample_every', 'checkpoint_every'), 400)
    values['train'] |= {'epochs': float(epochs), 'steps_per_call': calls, **counts}
    config = complete(values)
    assert (config.train.epochs, config.train.steps) == (epochs, steps)
    assert f'train.epochs={epochs:g}: {steps} steps of 40 from {1797 - holdout:,} im' in caplog.text
    # A resumed run, whose config holds both, keeps its length, and takes another.
    assert complete(to_dict(config)) == config
    longer = to_dict(config.replace(train={'epochs': epochs * 4}))
    least = 4 * epochs * (1797 - holdout) / 40
    assert least <= complete(longer).train.steps < least + max(calls, 20) + 1


def test_epochs_and_open_fields(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = complete(config_for(photos(tmp_path, [(32, 32)] * 5), train__epochs=110.0))
    assert config.train.steps == 120  # 110 · 4 images, as one is held out; in calls of 20
    assert 'train.steps=' not in caplog.text
    assert 'the run ends after' not in caplog.text
    with pytest.raises(UserError, match=r'train.epochs: expected 0 or more, found -1'):
        complete(config_for(tmp_path, train__epochs=-1.0))
