"""Samples and weights are written to URLs whole, and what cannot be written is told before."""

from __future__ import annotations

import io
import sys

import fsspec
import jax
import numpy as np
import pytest
from PIL import Image
from support.commands import ROOT, call_each
from support.tiny import flags, tiny_config

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.images import check_output, save_images
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.upload import check_uploadable, uploaded
from jaxunet.sampling.partial_output import Parts
from jaxunet.weights import write_weights


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """An empty storage; nothing is left in the current folder, such as one named memory:."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem('memory')
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = ['']
    assert not [path for path in tmp_path.iterdir() if path.name != 'cache']


CONFIG = f'--config={ROOT}/configs/digits.py'
IMAGES = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((8, 8, 1), np.uint8)


def test_samples_in_every_form(memory):
    save_images('memory://a/x.npz', IMAGES, np.array([2, 0, 1]))
    arrays = np.load(io.BytesIO(memory.cat('/a/x.npz')))
    np.testing.assert_array_equal(arrays['images'], IMAGES)
    assert arrays['labels'].tolist() == [2, 0, 1]
    save_images('memory://a/x.png', IMAGES)
    assert Image.open(io.BytesIO(memory.cat('/a/x.png'))).mode == 'L'
    for folder in ('plain', 'w_0.15/'):  # the slash says that it is one
        save_images(f'memory://a/{folder}', IMAGES)
        found = memory.find(f'/a/{folder}')
        assert [name.rpartition('/')[2] for name in found] == [f'{i:06d}.png' for i in range(3)]
    assert np.array(Image.open(io.BytesIO(memory.cat(found[2]))))[0, 0] == 2
    with pytest.raises(UserError, match=r"expected a name that ends in \.png .* found '\.gif'"):
        check_output('memory://a/x.gif')


def test_weights(memory):
    config = tiny_config()
    params = jax.device_get(fresh_state(config).params)
    write_weights('memory://w/x.safetensors', params, config)
    found = load_model('memory://w/x.safetensors').params
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_fails_writes_nothing(memory, monkeypatch):
    def failing():
        with uploaded('memory://x') as copy:
            copy.write_bytes(b'1')
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not memory.exists('/x')
    monkeypatch.setattr(type(memory), 'put_file', lambda *_, **__: 1 / 0)
    message = r'^--o: memory://x: cannot be written: ZeroDivisionError: division by zero$'
    with pytest.raises(UserError, match=message), uploaded('memory://x?key=1', '--o') as copy:
        copy.write_bytes(b'1')


def test_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setitem(sys.modules, 'dask', None)  # as if it were not installed
    for url, why in {
        'https://user:word@a/x.npz': r'https://a/x\.npz: cannot be written: the web is only read',
        'mammoth://x.npz': r'mammoth://x\.npz: cannot be written: Protocol not known',
        'dask://x.npz': r'dask://x\.npz: cannot be written: .*dask',
    }.items():
        with pytest.raises(UserError, match=f'^--output: {why}'):
            check_uploadable(url, '--output')
        with pytest.raises(UserError, match=f'^{why}'):
            check_output(url)


def test_finished_samples_wait_in_the_cache(tmp_path):
    parts = Parts('memory://a/x.npz', {'seed': 1})
    parts.save(0, IMAGES)
    assert parts.folder.is_relative_to(tmp_path / 'cache')
    assert Parts('memory://a/x.npz', {'seed': 1}).finished() == [(0, 3)]
    assert Parts('memory://b/x.npz', {'seed': 2}).finished() == []
    parts.remove()


def test_commands_write_or_refuse_before_they_work(tmp_path_factory):
    folder, output = tmp_path_factory.mktemp('commands'), tmp_path_factory.mktemp('output')
    calls = [
        ['jaxunet.export', '--init', CONFIG, *flags(), f'--output=local://{output}/x.safetensors'],
        ['jaxunet.sample', '--checkpoint=none', '--output=https://a/x.npz'],
    ]
    (code, text, error), refused = call_each(calls, folder)
    assert code == 0, error
    assert text.endswith(f' -> local://{output}/x.safetensors\n')
    assert load_model(f'{output}/x.safetensors').config.model.base_channels == 8
    assert refused[0] == 2
    told = 'error: https://a/x.npz: cannot be written: the web is only read; name a file'
    assert refused[2].splitlines()[-1] == told
    assert not [path for path in folder.rglob('*') if path.name.startswith(('https', 'local'))]
