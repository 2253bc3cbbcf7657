"""The grid of a sweep: its axes, the points that can run, the presets."""

import os

import pytest
from support.sweeps import CPU, GPU, grid
from support.tiny import tiny_config

from jaxunet.config import Config, resolve
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import runner
from jaxunet.sweep.config_file import config_file
from jaxunet.sweep.points import Axis, expand, merge, parse_axes, show
from jaxunet.sweep.presets import PRESETS


def test_values_are_read_as_the_type_of_their_field():
    axes = parse_axes(
        [
            'data.batch_size=8,16',
            'precision=float32,bfloat16',
            'optimizer.learning_rate=1e-3,2',
            'ema.warmup=true,False',
            'jit=on,off',
            'model.channel_mult=(1,2),(1,),(1, 2, 2)',
            'batch_per_device=4',
        ]
    )
    assert [axis.values for axis in axes] == [
        (8, 16),
        ('float32', 'bfloat16'),
        (1e-3, 2),
        (True, False),
        ('on', 'off'),
        ((1, 2), (1,), (1, 2, 2)),
        (4,),
    ]
    assert show((1,)) == '(1,)'
    assert show([1, 2]) == '(1,2)'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            'data.batch_sise=8',
            '--vary data.batch_sise: unknown field; did you mean data.batch_size?',
        ),
        ('num_workers=8', '--vary num_workers: unknown field; did you mean data.num_workers?'),
        ('num_workrs=8', '--vary num_workrs: unknown field; did you mean data.num_workers?'),
        ('ema.zzz=8', '--vary ema.zzz: unknown field; ema has rates, warmup, '),
        (
            'zzz=8',
            '--vary zzz: unknown field; expected a field of the config, or jit or batch_per_device',
        ),
        ('data=8', '--vary data: is a section; vary one of its fields, e.g. data.path'),
        ('data.batch_size', '--vary data.batch_size: expected NAME=VALUE,VALUE'),
        ('data.batch_size=', 'expected NAME=VALUE,VALUE'),
        ('data.batch_size=8,many', "--vary data.batch_size: expected int, found 'many'"),
        ('data.batch_size=8,,16', "--vary data.batch_size: expected int, found ''"),
        ('data.batch_size=8.5', "--vary data.batch_size: expected int, found '8.5'"),
        ('data.batch_size=True', "--vary data.batch_size: expected int, found 'True'"),
        ('ema.warmup=maybe', "--vary ema.warmup: expected true or false, found 'maybe'"),
        ('jit=yes', "--vary jit: expected on or off, found 'yes'"),
        (
            'model.channel_mult=1,2',
            "--vary model.channel_mult: expected a tuple such as (1,2) or (8,), found '1'",
        ),
        ('precision=float32,float32', '--vary precision: float32 is given twice'),
    ],
)
def test_mistakes_in_an_axis(text, message):
    with pytest.raises(UserError) as error:
        parse_axes([text])
    assert message in str(error.value)


def test_an_axis_given_twice():
    with pytest.raises(UserError, match='--vary jit: given twice'):
        parse_axes(['jit=on', 'jit=off'])


@pytest.mark.parametrize(
    ('axes', 'message'),
    [
        ([], 'nothing to vary'),
        (
            ['precision=float32,bfloat61'],
            'no point with bfloat61 can run: precision: expected one of float32, bfloat16, float16',
        ),
        (
            ['parallel.devices=1,8'],
            'no point with 8 can run: parallel.devices: 8 asked for, but this machine has 4',
        ),
        (
            ['data.batch_size=8,9', 'parallel.devices=2,4'],
            'no point with 9 can run: data.batch_size: 9 images at a time do not divide',
        ),
        (
            ['jit=on,off', 'parallel.devices=2,4'],
            'no point with off can run: jit=off: runs on one device',
        ),
        (
            ['jit=on,off', 'train.steps_per_call=2', 'train.log_every=2', 'parallel.devices=1'],
            'no point with off can run: jit=off: runs steps one by one, found '
            'train.steps_per_call=2; set it to 0 or 1',
        ),
        (
            ['batch_per_device=4', 'data.batch_size=8'],
            'data.batch_size and batch_per_device set the same field',
        ),
        (
            ['data.num_workers=0,2', 'data.cache=device'],
            'data.num_workers: 2 has no effect, as data.cache=device',
        ),
    ],
)
def test_a_value_with_which_nothing_can_run_is_a_mistake(axes, message):
    with pytest.raises(UserError) as error:
        grid(*axes)
    assert message in str(error.value)


def test_one_impossible_point_is_a_point():
    points, _ = grid('data.batch_size=2,8', 'parallel.devices=1,4')
    assert [p.values for p in points][:2] == [
        {'data.batch_size': 2, 'parallel.devices': n} for n in (1, 4)
    ]
    assert [p.problem for p in points] == [
        '',
        'data.batch_size: 2 images at a time do not divide among 4 devices',
        '',
        '',
    ]
    assert resolve(points[3].raw) == tiny_config(data={'batch_size': 8}, parallel={'devices': 4})


def test_cpu_machines_play_devices_and_others_cannot():
    points, _ = grid('parallel.devices=1,4', machine=CPU)
    assert [p.problem for p in points] == ['', '']
    assert (
        '--xla_force_host_platform_device_count=4'
        in runner.environment(points[1], CPU)['XLA_FLAGS']
    )
    assert runner.environment(points[0], CPU) == dict(os.environ)
    assert runner.environment(points[1], GPU) == dict(os.environ)


def test_batch_per_device():
    points, _ = grid('parallel.devices=1,4,0', 'batch_per_device=8')
    assert [p.raw['data']['batch_size'] for p in points] == [8, 32, 32]


def test_workers_are_varied_where_they_work():
    points, notes = grid('data.num_workers=0,2')
    assert [p.raw['data']['cache'] for p in points] == ['stream', 'stream']
    assert 'stream instead of auto' in notes[0]
    points, notes = grid('data.cache=stream,device', 'data.num_workers=0,2,4')
    assert [p.label for p in points] == [
        *(f'cache=stream num_workers={n}' for n in (0, 2, 4)),
        'cache=device num_workers=0',
    ]
    assert notes == ['2 points left out: data.num_workers changes nothing while data.cache=device']
    _, notes = grid('data.cache=stream,device', 'data.num_workers=0,2')
    assert notes == ['1 point left out: data.num_workers changes nothing while data.cache=device']


@pytest.mark.parametrize('name', PRESETS)
def test_presets_are_grids(name):
    points, _ = expand(
        Config().replace(parallel={'devices': 1}), parse_axes(PRESETS[name].axes), GPU
    )
    assert len(points) >= 2
    assert not any(point.problem for point in points)


def test_vary_replaces_the_axes_of_a_preset():
    given = parse_axes(['parallel.devices=1,2', 'backend=xla'])
    assert [
        (a.name, len(a.values)) for a in merge(parse_axes(PRESETS['devices_batch'].axes), given)
    ] == [('parallel.devices', 2), ('batch_per_device', 3), ('backend', 1)]


def test_a_point_as_a_config_file(tmp_path):
    (point,), _ = grid('model.channel_mult=(1,)', machine=CPU)
    namespace: dict = {}
    exec(config_file(point.label, point.raw), namespace)
    assert resolve(namespace['get_config']()) == point.config
    (same,), _ = expand(Config(), [Axis('seed', (0,))], CPU)
    exec(config_file(same.label, same.raw), namespace)
    assert resolve(namespace['get_config']()) == Config()
