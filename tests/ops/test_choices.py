"""The measurements that `auto` follows: a file of --choose."""

import json
import logging

import pytest

from jaxunet.benchmark import choose
from jaxunet.config import OPS
from jaxunet.ops import backends, choices
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError

H200 = 'NVIDIA H200'
OTHERS = dict.fromkeys(OPS, 'xla') | {'conv3x3': 'pallas', 'adamw': 'cuda'}


@pytest.fixture
def hopper(monkeypatch):
    """A machine whose kernels all run."""
    monkeypatch.setattr(backends, '_unavailable', lambda name: None)
    choices.ignore.cache_clear()
    with device.use(device.Target.HOPPER):
        yield


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / 'folder' / 'choices.json'
    monkeypatch.setenv(choices.VARIABLE, str(path))
    return path


def entry(**changes):
    return {
        'device': H200,
        'precision': 'bfloat16',
        'versions': choices.versions(),
        'ops': OTHERS,
        **changes,
    }


def test_the_file_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv(choices.VARIABLE, '~/choices.json')
    assert choices.path() == tmp_path / 'choices.json'


def test_auto_follows_what_was_measured_and_says_so(hopper, file):
    usual = backends.choose('auto', 'bfloat16').names
    choices.write(file, entry())
    choices.write(file, entry(precision='float16', ops=dict.fromkeys(OPS, 'xla')))
    assert backends.choose('auto', 'bfloat16').names == OTHERS
    assert str(backends.choose('auto', 'bfloat16')).endswith(f'adamw=cuda (measured here: {file})')
    assert backends.choose('auto+linear=cuda', 'bfloat16').names == OTHERS | {'linear': 'cuda'}
    assert backends.choose('auto', 'float16').names == dict.fromkeys(OPS, 'xla')
    # Neither another precision, a backend that is named, nor another kind of GPU.
    cuda = dict.fromkeys(OPS, 'cuda')
    assert backends.choose('auto', 'float32').names == cuda | {'linear': 'xla'}
    assert backends.choose('cuda', 'float32').names == cuda
    assert backends.choose('cuda', 'bfloat16').names == dict.fromkeys(OPS, 'cuda')
    assert 'measured' not in str(backends.choose('cuda', 'bfloat16'))
    with device.use(device.Target.HOPPER, 'NVIDIA H100'):
        assert backends.choose('auto', 'bfloat16').names == usual
    choices.write(file, entry(ops=usual))  # replaces
    assert backends.choose('auto', 'bfloat16').names == usual
    assert len(json.loads(file.read_text())['choices']) == 2


@pytest.mark.parametrize(
    ('text', 'why'),
    [
        ('{"choices": [{"devi', 'choices.json: expected a JSON object, found '),
        ('[1]', 'choices.json: expected a JSON object, found '),
        ('{"choices": 1}', 'choices.json: choices: expected a list, found 1; it holds no choices'),
        ('{"choices": [1]}', 'choices.json: entry 1: expected a JSON object, found 1; '),
        ('[' * 100_000, '(nested more than 32 deep)'),
        (entry(device=['x']), "choices.json: entry 1: device: expected text, found ['x']; "),
        (entry(versions={'jax': '0.1', 'jaxlib': '0.1'}), 'was measured with jax 0.1, jaxlib 0.1'),
        (entry(versions=None), 'was measured with unknown versions'),
        (entry(ops={'conv3x3': 'cuda'}), 'its ops are not conv3x3'),
        (entry(ops=OTHERS | {'attention': 'gone'}), 'attention=gone: the gone backend is not'),
        (entry(ops=OTHERS | {'linear': 'pallas'}), 'linear=pallas: the pallas backend has no'),
    ],
)
def test_a_stale_or_damaged_file_is_ignored_with_one_line(
    text, why, hopper, file, caplog, monkeypatch
):
    usual = backends.choose('auto', 'bfloat16').names
    known = backends.backend_names()
    monkeypatch.setattr(
        backends,
        '_unavailable',
        lambda name: None if name in ('xla', *known) else f'the {name} backend is not installed',
    )
    file.parent.mkdir()
    file.write_text(text if isinstance(text, str) else json.dumps({'choices': [text]}))
    with caplog.at_level(logging.WARNING):
        assert [backends.choose('auto', 'bfloat16').names for _ in range(3)] == [usual] * 3
    (line,) = [m for m in caplog.messages if 'backend=auto ignores it' in m]
    assert why in line
    assert line.endswith('measure again with python -m jaxunet.benchmark --choose')


def test_a_damaged_file_is_replaced_with_one_line(hopper, file, caplog):
    file.parent.mkdir()
    file.write_text('{"choices": [')
    choices.write(file, entry())
    assert f'{file}: expected a JSON object, found ' in caplog.text
    assert caplog.text.count('it is replaced') == len(caplog.messages) == 1
    assert backends.choose('auto', 'bfloat16').names == OTHERS


def test_auto_goes_on_without_a_backend_that_does_not_import(monkeypatch, caplog):
    lost = ['pallas']

    def broken(name):
        if name in lost:
            raise UserError(f'backend={name}: cannot be imported')

    monkeypatch.setattr(backends, '_unavailable', broken)
    backends._warn_once.cache_clear()
    with device.use(device.Target.HOPPER), caplog.at_level(logging.WARNING):
        assert backends.choose('auto', 'bfloat16').names == dict.fromkeys(OPS, 'cuda')
        assert 'left out' not in caplog.text
        lost.append('cuda')
        for _ in range(2):
            assert backends.choose('auto', 'bfloat16').names == dict.fromkeys(OPS, 'xla')
        assert caplog.text.count('the Pallas kernels are left out') == 1
        with pytest.raises(UserError, match='cannot be imported'):
            backends.choose('pallas')
    for kernels, name in (('Pallas', 'pallas'), ('CUDA', 'cuda')):
        assert f'the {kernels} kernels are left out: backend={name}: cannot be im' in caplog.text


def test_auto_is_never_asked_without_the_precision(hopper):
    """A command that leaves it out cannot take 16-bit kernels for a float32 network."""
    with pytest.raises(TypeError, match='backend=auto depends on the precision'):
        backends.choose('auto')


NOISE = {'cuda+group_norm=pallas': (0.97, 0.98, 1.03, 1.02)}  # not quicker in most rounds


def timer(milliseconds, asked):
    """Times steps by a table; what is not in it fails."""

    def measure(names):
        asked.append(list(names))
        return {
            name: [
                milliseconds[name] * factor for factor in NOISE.get(name, (1.0, 1.01, 0.99, 1.0))
            ]
            for name in names
            if name in milliseconds
        }

    return measure


def test_choose_takes_the_quickest_backend_and_then_single_ops(hopper, monkeypatch):
    monkeypatch.setattr(choose, 'runnable', backends.installed)
    times = {
        'xla': 12.0,
        'pallas': 8.0,
        'cuda': 6.0,
        'cuda+attention=pallas': 5.5,
        'cuda+group_norm=pallas': 5.99,
        'cuda+attention=pallas+linear=xla': 9.0,
        'cuda+attention=pallas+adamw=xla': 5.2,
    }
    asked = []
    best, found = choose.quickest(timer(times, asked))
    assert best == 'cuda+attention=pallas+adamw=xla'
    assert asked[0] == ['xla', *(b.name for b in backends.installed())]
    assert asked[1][0] == 'cuda'
    assert {'cuda+conv3x3=xla', 'cuda+conv3x3=pallas'} == set(asked[1][1:])
    assert asked[-1] == ['cuda+attention=pallas', best]
    assert found['xla'] == pytest.approx(12.0)
    assert set(found) == set(times)
    with pytest.raises(UserError, match='no backend ran a step'):
        choose.quickest(timer({}, []))
