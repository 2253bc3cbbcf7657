"""Pipes in the place of files, and files that shrink while they are read."""

from __future__ import annotations

import os
import pickle
import signal

import numpy as np
import pytest
from support.data_errors import cut, fails
from support.data_files import everything, random_pixels

from jaxunet.data.classes import Classes
from jaxunet.data.picture import read_mask, read_picture
from jaxunet.data.sources import open_source
from jaxunet.metrics import image_sets
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.low_res import read_low_res


@pytest.fixture(autouse=True)
def _limit():
    """Ends a test that waits for a pipe."""

    def late(*_):
        raise TimeoutError('waited for a pipe')

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / 'x.png')
    path = str(tmp_path / 'x.png')
    for read in (lambda: read_picture(path, (8, 8, 3)), lambda: read_mask(path, path, (8, 8, 3))):
        with pytest.raises(UserError, match=r'x.png: expected a file, found a pipe; give an image'):
            read()
    with pytest.raises(UserError, match=r'x.png: expected a file or folder, found something else'):
        read_low_res(path, (8, 8, 3), None, Classes(0))


@pytest.mark.parametrize('name', ['x.npz', 'x.zip', 'x.tar', 'x.tar.gz', 'x.bin', 'x.bin.gz'])
def test_a_pipe_is_no_set(name, tmp_path):
    os.mkfifo(tmp_path / name)
    match = rf'{name}: expected a file or folder, found something else'
    for prefix in ('', 'cifar10:'):
        fails(f'{prefix}{tmp_path / name}', match)
    with pytest.raises(UserError, match=match), image_sets.open_images(str(tmp_path / name)):
        pass


@pytest.mark.parametrize('order', ['C', 'F'])
def test_an_npz_that_is_cut_while_it_is_read(order, tmp_path):
    """A memory map would end the process (SIGBUS)."""
    images = np.asarray(random_pixels(0, (64, 16, 16, 3)), order=order)
    path = tmp_path / 'x.npz'
    np.savez(path, images=images)
    source = open_source(str(path), image_shape=(16, 16, 3))
    np.testing.assert_array_equal(source.load(np.array([63, 0])), images[[63, 0]])
    copy = pickle.loads(pickle.dumps(source))
    cut(path, 5000)
    if order == 'F':  # in memory
        np.testing.assert_array_equal(everything(source), images)
        return
    for each in (source, copy):
        with pytest.raises(UserError, match=r'x.npz: ends at byte 5000, .* it was changed since'):
            everything(each)
