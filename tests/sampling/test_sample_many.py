"""Thousands of samples in one command: what an interrupted one keeps, what goes on, and what is
refused.
"""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from support.commands import NO_LAUNCHER, Fork, free_port
from support.settings import QUICK
from support.tiny import tiny_config
from support.weight_cases import random_params

from jaxunet.runtime import archives
from jaxunet.runtime.command import interrupted
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.partial_output import Parts
from jaxunet.sampling.progress import counted
from jaxunet.weights import write_weights

IDENTITY = {'seed': 0, 'sampler.name': 'ddpm', 'image_shape': (2, 2, 1)}


def pictures(first, end):
    return np.arange(first, end, dtype=np.uint8)[:, None, None, None] * np.ones(
        (1, 2, 2, 1), np.uint8
    )


@pytest.fixture
def parts(tmp_path):
    return Parts(tmp_path / 'x.npz', IDENTITY)


def test_parts_remember_what_is_done(parts, tmp_path):
    assert parts.missing(0, 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert parts.load(1) is None
    assert not list(tmp_path.iterdir())  # asking makes no folder
    parts.save(4, pictures(4, 6))
    assert parts.folder == tmp_path / 'x.npz.partial'
    assert parts.missing(0, 10, 3) == [(0, 3), (3, 4), (6, 9), (9, 10)]
    assert parts.missing(5, 8, 3) == [(6, 8)]
    assert parts.missing(4, 6, 3) == []
    assert parts.load(6) is None
    for first, end in ((0, 4), (6, 9)):
        parts.save(first, pictures(first, end))
    again = Parts(tmp_path / 'x.npz', IDENTITY)
    assert again.missing(0, 12, 5) == [(9, 12)]
    np.testing.assert_array_equal(again.load(7), pictures(0, 7))
    np.testing.assert_array_equal(again.load(9), pictures(0, 9))
    again.remove()
    assert not list(tmp_path.iterdir())


def test_half_written_and_damaged_parts_do_not_count(parts):
    parts.save(0, pictures(0, 4))
    parts.save(4, pictures(4, 8))
    (parts.folder / '.000008-000012.npz.77.partial').write_bytes(b'PK')
    assert parts.missing(0, 12, 4) == [(8, 12)]
    path = parts.folder / '000004-000008.npz'
    path.write_bytes(path.read_bytes()[:-30])
    assert parts.load(8) is None
    assert parts.missing(0, 8, 8) == [(4, 8)]
    np.savez(path, images=pictures(4, 7))  # fewer than the name says
    assert parts.load(8) is None
    assert parts.missing(0, 8, 8) == [(4, 8)]
    parts.save(4, pictures(4, 8))
    np.testing.assert_array_equal(parts.load(8), pictures(0, 8))


def test_all_damaged_parts_are_found_at_once(parts):
    for first in (0, 4, 8):
        parts.save(first, pictures(first, first + 4))
    for name in ('000000-000004', '000008-000012'):
        path = parts.folder / f'{name}.npz'
        path.write_bytes(path.read_bytes()[:-30])
    assert parts.load(12) is None
    assert parts.finished() == [(4, 8)]


def refuse(number):
    def refused(*_, **__):
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize('number', [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize('when', ['opened', 'read'])
def test_parts_that_the_system_refuses_to_read_are_kept(number, when, parts, monkeypatch):
    parts.save(0, pictures(0, 4))
    where = {'opened': (archives.zipfile, 'ZipFile'), 'read': (archives, 'read_npy')}[when]
    with monkeypatch.context() as patch:
        patch.setattr(*where, refuse(number))
        with pytest.raises(UserError, match=rf'000000-000004\.npz: .*{os.strerror(number)}\. The '):
            parts.load(4)
    np.testing.assert_array_equal(parts.load(4), pictures(0, 4))


@pytest.mark.parametrize('given', ['1e-9', '4 GiB'])
def test_a_limit_that_is_mistyped_deletes_nothing(given, parts, tmp_path, monkeypatch):
    parts.save(0, pictures(0, 4))
    monkeypatch.setenv(archives.LIMIT, given)
    with pytest.raises(UserError, match=archives.LIMIT):
        parts.load(4)
    if given == '4 GiB':
        with pytest.raises(UserError, match='expected a number of GiB'):
            Parts(tmp_path / 'x.npz', IDENTITY)  # before anything is drawn
    monkeypatch.delenv(archives.LIMIT)
    np.testing.assert_array_equal(parts.load(4), pictures(0, 4))


def test_a_part_of_a_wrong_size_is_damaged(parts):
    """Not one that the limit of its expanded size refuses."""
    parts.save(0, pictures(0, 4))
    path = parts.folder / '000000-000004.npz'
    data = bytearray(path.read_bytes())
    data[data.index(b'PK\x01\x02') + 27] ^= 0x40  # the uncompressed size: 1 GiB more
    path.write_bytes(data)
    assert parts.load(4) is None
    assert parts.finished() == []


def test_the_bar_counts_the_samples_of_all_processes(parts, monkeypatch):
    """Those that others store count at once, those of a batch in hand as they are drawn."""

    def shown():
        return re.findall(r'(\d+)/12 ', sys.stderr.getvalue())[-1]

    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    monkeypatch.setattr('jaxunet.runtime.progress.LOG_SECONDS', 0.0)
    monkeypatch.setattr('jaxunet.sampling.progress.LOOK_SECONDS', 0.0)
    parts.save(0, pictures(0, 2))
    with counted(parts, 12) as update:
        assert shown() == '2'
        update(1.0)
        assert shown() == '3'
        parts.save(6, pictures(6, 10))  # by another process
        update(2.0)
        assert shown() == '8'
        parts.save(2, pictures(2, 4))
        update(0.0)
        assert shown() == '8'


def test_samples_of_another_run_are_refused_and_named(parts, tmp_path):
    parts.save(0, pictures(0, 4))
    with pytest.raises(
        UserError,
        match=r'x\.npz\.partial: holds the samples of another run \(sampler.name: \'ddpm\' there, '
        r'\'ddim\' now; seed: 0 there, 1 now\)',
    ):
        Parts(tmp_path / 'x.npz', IDENTITY | {'seed': 1, 'sampler.name': 'ddim'})
    assert parts.finished() == [(0, 4)]
    (parts.folder / 'run.json').write_text('[1]')
    with pytest.raises(
        UserError, match=r'run\.json: expected a JSON object, found .*\[1\].*; repeat'
    ):
        Parts(tmp_path / 'x.npz', IDENTITY)
    (parts.folder / 'run.json').write_text('{')
    with pytest.raises(UserError, match=r'run\.json: expected a JSON object'):
        Parts(tmp_path / 'x.npz', IDENTITY)
    (parts.folder / 'run.json').unlink()
    with pytest.raises(
        UserError, match=r'expected the samples of an interrupted run, found no run\.json'
    ):
        Parts(tmp_path / 'x.npz', IDENTITY)
    parts.remove()
    parts.folder.mkdir()
    (parts.folder / 'run.json.0.partial').write_text('{')  # killed while describing the folder
    Parts(tmp_path / 'x.npz', IDENTITY).save(0, pictures(0, 4))
    (tmp_path / '.x.npz.71.partial').touch()  # killed while writing the output, or a folder of it
    (tmp_path / '.x.npz.72.partial').mkdir()
    (tmp_path / '.y.npz.71.partial').touch()
    parts.remove()
    assert [path.name for path in tmp_path.iterdir()] == ['.y.npz.71.partial']
    parts.folder.write_text('a file')
    with pytest.raises(UserError, match=r'run\.json: cannot be read: .*Not a directory'):
        Parts(tmp_path / 'x.npz', IDENTITY)


def test_samples_made_from_something_else_are_refused(tmp_path, caplog):
    """A command of fewer or more samples compares those that it shares with the one before."""

    def opened(*made_from):
        return Parts(tmp_path / 'x.npz', IDENTITY, np.array(made_from, np.uint32))

    opened(7, 8, 9, 10).save(0, pictures(0, 2))
    opened(7, 8, 9, 10).save(2, pictures(2, 4))
    for same in ((7, 8, 9, 10), (7, 8, 9), (7,), (7, 8, 9, 10, 11)):
        assert opened(*same).finished() == [(0, 2), (2, 4)]
    for other, first in (((7, 0, 9, 0), 1), ((7, 8, 9, 0, 11), 3), ((7, 8, 0), 2)):
        with pytest.raises(UserError, match=f'made from other pictures, such as sample {first}; '):
            opened(*other)
    # A batch that does not say what it was made from is drawn again.
    path = tmp_path / 'x.npz.partial' / '000002-000004.npz'
    np.savez(path, images=pictures(2, 4))
    assert opened(7, 8, 9, 10).finished() == [(0, 2)]
    assert 'damaged (it holds no made_from); its samples are drawn again' in caplog.text


ENVIRONMENT = NO_LAUNCHER | {'JAX_PLATFORMS': 'cpu'}


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    """A model whose every image differs."""
    config = tiny_config(model={'num_classes': 10, 'label_dropout': 0.1})
    path = tmp_path_factory.mktemp('weights') / 'model.safetensors'
    write_weights(path, random_params(config), config)
    return path


def begin(weights, output, *extra, count=20, batch=4, devices=1, sampler='ddpm', prefix=()):
    command = [
        'jaxunet.sample',
        f'--checkpoint={weights}',
        f'--output={output}',
        f'--num_samples={count}',
        f'--batch_size={batch}',
        f'--sampler={sampler}',
        *extra,
    ]
    environment = ENVIRONMENT | {
        'XLA_FLAGS': f'{QUICK} --xla_force_host_platform_device_count={devices}'
    }
    if not prefix:
        return Fork(command, environment)
    return subprocess.Popen(
        [*prefix, sys.executable, '-m', *command],
        env=environment | {'JAX_ENABLE_COMPILATION_CACHE': 'false'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, err
    assert 'Traceback' not in err
    return out if code == 0 else err


def interrupt(process, folder, how, batches=2):
    """Sends the signal once so many batches are stored."""
    for _ in range(10000):
        if len(list(folder.glob('*.npz'))) >= batches:
            break
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    return err


def test_an_interruption_of_c_code_is_one():
    with pytest.raises(SystemError) as raised:
        raise SystemError('returned a result with an exception set') from KeyboardInterrupt()
    assert interrupted(raised.value)
    assert interrupted(KeyboardInterrupt())
    assert not interrupted(SystemError('unknown opcode'))


def test_a_killed_command_goes_on(weights, tmp_path):
    """It goes on with another batch size and more devices, draws nothing again that was finished,
    and the images are those of an uninterrupted command.
    """
    options = {'count': 300, 'batch': 2, 'sampler': 'dpmpp_2m'}
    folder = tmp_path / 'many.partial'
    interrupt(begin(weights, tmp_path / 'many', **options), folder, signal.SIGKILL)
    assert not (tmp_path / 'many').exists()
    before = Parts(tmp_path / 'many', json.loads((folder / 'run.json').read_text())).finished()
    assert 2 <= len(before) < 300
    # A mark on a finished batch shows that it is kept.
    with np.load(folder / '000000-000002.npz') as arrays:
        images = arrays['images']
    first = images.copy()
    np.savez(folder / '000000-000002.npz', images=255 - images)
    # Ctrl-C this time.
    process = begin(weights, tmp_path / 'many', **options)
    assert 'interrupted; the same command resumes' in interrupt(
        process, folder, signal.SIGINT, batches=len(before) + 1
    )
    assert process.returncode == 130
    # Another seed does not mix with these.
    error = finish(begin(weights, tmp_path / 'many', '--seed=1', **options), code=2)
    assert 'seed: 0 there, 1 now' in error
    out = finish(begin(weights, tmp_path / 'many', **options | {'batch': 31}, devices=3))
    assert '300 images in' in out
    assert not folder.exists()
    names = sorted(p.name for p in (tmp_path / 'many').iterdir())
    assert names == [f'{i:06d}_class{i % 10}.png' for i in range(300)]
    got = np.stack([np.asarray(Image.open(tmp_path / 'many' / name)) for name in names])[..., None]
    np.testing.assert_array_equal(got[:2], 255 - first)
    got[:2] = first
    finish(begin(weights, tmp_path / 'once.npz', **options | {'batch': 64}))
    assert not (tmp_path / 'once.npz.partial').exists()
    with np.load(tmp_path / 'once.npz') as arrays:
        assert (
            np.abs(arrays['images'].astype(int) - got).max() <= 1
        )  # float rounding of other batch shapes
        np.testing.assert_array_equal(arrays['labels'], np.arange(300) % 10)
        assert len(np.unique(arrays['images'].reshape(300, -1), axis=0)) == 300


@pytest.mark.parametrize(
    ('sampler', 'extra', 'evaluations'),
    [('heun', ['--steps=3', '--churn=2'], 5), ('ddpm', ['--respacing=3,2'], 5)],
)
def test_options_reach_the_sampler(sampler, extra, evaluations, weights, tmp_path):
    out = finish(begin(weights, tmp_path / 'x.npz', *extra, sampler=sampler, count=3))
    assert f'{sampler}, {evaluations} evaluations of the network' in out


@pytest.mark.parametrize(
    ('extra', 'message'),
    [
        (['--churn=1'], 'churn: only sampler=heun has it'),
        (
            ['--sampler=heun', '--churn=1', '--churn_range=1'],
            '--churn_range: expected two numbers such as 0.05,50',
        ),
        (['--respacing=3', '--steps=4'], 'respacing: '),
        (
            ['--timesteps=0,half'],
            '--timesteps: expected whole numbers such as 0,250,500,999, found',
        ),
        (['--respacing=ddim3x'], 'respacing: expected numbers of steps'),
        (['--levels=3,1'], 'levels: only sampler=consistency has it, found levels=(3.0, 1.0)'),
        (['--levels=3,low'], "--levels: expected numbers such as 5,1, found '3,low'"),
    ],
)
def test_mistakes(extra, message, weights, tmp_path):
    assert message in finish(begin(weights, tmp_path / 'x.npz', *extra), code=2)
    assert not list(tmp_path.iterdir())


def test_two_processes_share_the_work(weights, tmp_path):
    options = {'count': 10, 'batch': 2, 'sampler': 'dpmpp_2m', 'devices': 2}
    port = free_port()
    by_hand = [
        [f'--coordinator=localhost:{port}', '--num_processes=2', f'--process_id={rank}']
        for rank in range(2)
    ]
    processes = [begin(weights, tmp_path / 'two.npz', *flags, **options) for flags in by_hand]
    out = [finish(process) for process in processes]
    assert '10 images in' in out[0]
    assert 'images in' not in out[1]  # process 0 has the last word
    shown = [re.findall(r'(\d+/\d+) \[', process.stderr.read_text()) for process in processes]
    assert shown[0][-1] == '10/10', shown
    assert shown[1] == []
    assert [p.name for p in tmp_path.iterdir()] == ['two.npz']
    finish(begin(weights, tmp_path / 'one.npz', **options))
    with np.load(tmp_path / 'two.npz') as two, np.load(tmp_path / 'one.npz') as one:
        assert np.abs(two['images'].astype(int) - one['images']).max() <= 1


def test_a_failed_write_is_an_error_without_a_traceback_and_what_was_drawn_stays(weights, tmp_path):
    """Files may grow to 3,000 bytes: enough for the description and a small batch, too little for
    one of 64 images.
    """
    options = {'batch': 64, 'sampler': 'dpmpp_2m'}
    limit = ['/bin/sh', '-c', 'ulimit -f 6; exec "$@"', 'sh']
    before = begin(weights, tmp_path / 'x.npz', count=200, **options | {'batch': 2})
    interrupt(before, tmp_path / 'x.npz.partial', signal.SIGKILL)
    kept = len(list((tmp_path / 'x.npz.partial').glob('0*.npz')))
    process = begin(weights, tmp_path / 'x.npz', count=200, prefix=limit, **options)
    error = finish(process, code=2)
    assert (
        'cannot be written: File too large; check the folder, its permissions and the free space'
        in error
    )
    assert f'The same command resumes after the {kept} batches stored before.' in error
    assert len(list((tmp_path / 'x.npz.partial').glob('0*.npz'))) == kept
