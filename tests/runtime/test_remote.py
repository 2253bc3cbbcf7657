"""Sets, weights, runs and references at URLs, on a local server and in fsspec's memory."""

from __future__ import annotations

import contextlib
import http.server
import io
import pathlib
import sys
import threading
import time

import fsspec
import jax
import numpy as np
import pytest
from support.data_files import encoded, write_zip
from support.tiny import tiny_config

import jaxunet
from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.config import to_dict
from jaxunet.data.automatic import complete
from jaxunet.data.picture import read_picture
from jaxunet.data.sources import check_path, is_downloaded, open_source
from jaxunet.metrics.features import load_features
from jaxunet.metrics.image_sets import open_images
from jaxunet.runtime import remote
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import shown_url
from jaxunet.runtime.remote import on_disk
from jaxunet.training.start import check_workdir
from jaxunet.weights import write_weights


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; each request takes one of `faults`, if any are left."""

    files: dict[str, bytes]
    etag = '"1"'

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.files, self.faults, self.requests = {}, [], 0

    def url(self, name: str) -> str:
        return f'http://127.0.0.1:{self.server_port}/{name}'


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.requests += 1
        fault = self.server.faults.pop(0) if self.server.faults else ''
        name = self.path.lstrip('/').partition('?')[0]
        if isinstance(fault, int) or name not in self.server.files:
            self.send_error(fault or 404)
            return
        data = self.server.files[name]
        self.send_response(200)
        if fault != 'no length':
            self.send_header('Content-Length', str(len(data)))
        if self.server.etag:
            self.send_header('ETag', self.server.etag)
        self.end_headers()
        if fault == 'change':  # before the body, whose end the client may follow by a request
            self.server.etag = '"2"'
        with contextlib.suppress(ConnectionError):  # a look at the headers only
            self.wfile.write(data[: len(data) // 2] if fault == 'drop' else data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder; every call asks for the version again."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(remote, 'FRESH_SECONDS', -1)
    yield tmp_path / 'cache' / 'jaxunet' / 'remote'
    remote._recent.clear()


@pytest.fixture
def memory():
    system = fsspec.filesystem('memory')
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = ['']


def left(cache):
    """The whole files in the cache, and what was left half-written."""
    return sorted(p.name for p in cache.rglob('*') if p.is_file() and p.name != '.lock')


def png(value):
    return encoded(np.full((8, 8), value, np.uint8))


def test_a_file_is_copied_once_and_again_when_it_has_changed(server, cache, caplog):
    caplog.set_level('INFO')
    server.files['a%20b.zip'] = b'1' * 3000
    path = pathlib.Path(on_disk(server.url('a%20b.zip?token=secret')))
    assert path.read_bytes() == b'1' * 3000
    assert path.name == 'a_b.zip'
    assert path.is_relative_to(cache)
    assert f'copying {server.url("a%20b.zip")} (0.0 MiB) to {path}' in caplog.text
    assert 'secret' not in caplog.text
    before = server.requests
    assert on_disk(server.url('a%20b.zip?token=secret')) == str(path)
    assert server.requests == before + 1  # its version, not the file
    server.files['a%20b.zip'], server.etag = b'2' * 3000, '"2"'
    again = pathlib.Path(on_disk(server.url('a%20b.zip?token=secret')))
    assert (again.read_bytes(), path.read_bytes()) == (b'2' * 3000, b'1' * 3000)


def test_what_has_no_version_is_copied_every_time(server):
    server.files['x'], server.etag = b'1', ''
    server.faults = ['no length'] * 3
    assert pathlib.Path(on_disk(server.url('x'))).read_bytes() == b'1'
    for data in (b'2', b'3'):
        server.files['x'] = data
        assert pathlib.Path(on_disk(server.url('x'))).read_bytes() == data


def test_a_run_asks_once(server, monkeypatch):
    monkeypatch.setattr(remote, 'FRESH_SECONDS', 60)
    server.files['x'] = b'1'
    assert len({on_disk(server.url('x')) for _ in range(3)}) == 1
    assert server.requests == 3  # version, file, version


def test_a_connection_that_drops_is_tried_again(server, cache, caplog):
    server.files['x.npz'] = bytes(range(256)) * 100
    server.faults = ['', 'drop', 'drop']
    assert pathlib.Path(on_disk(server.url('x.npz'))).read_bytes() == server.files['x.npz']
    assert caplog.text.count('ended after 12800 of 25600 bytes; trying again') == 2


def test_a_partial_copy_never_counts(server, cache):
    server.files['x.npz'] = bytes(range(256)) * 100
    server.faults = ['', 'drop', 'drop', 'drop']
    with pytest.raises(
        UserError, match=r'x\.npz: cannot be read: ended after 12800 of 25600 bytes$'
    ):
        on_disk(server.url('x.npz'))
    assert left(cache) == []


def test_a_file_that_changes_meanwhile(server, cache):
    server.files['x'] = b'1'
    server.faults = ['', 'change']
    with pytest.raises(UserError, match=r'/x: changed while it was copied; try again$'):
        on_disk(server.url('x'))
    assert left(cache) == []
    assert pathlib.Path(on_disk(server.url('x'))).read_bytes() == b'1'


@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (404, r'no such file \(HTTP 404, Not Found\); check the address'),
        (403, r'refused \(HTTP 403, Forbidden\)'),
        (503, r'refused \(HTTP 503, Service Unavailable\)'),
    ],
)
def test_what_a_server_refuses(fault, message, server, cache):
    server.files['x.zip'] = b'1'
    server.faults = [fault]
    with pytest.raises(UserError, match=rf'^data.path: http://.*/x\.zip: {message}'):
        jaxunet.train(server.url('x.zip'), workdir='run', progress=False)
    assert left(cache) == []


def test_the_last_copy_serves_without_a_network(server, caplog):
    server.files['x'] = b'1'
    url = server.url('x')
    path = on_disk(url)
    server.faults = [503]
    assert on_disk(url) == path
    server.shutdown()
    server.server_close()
    assert on_disk(url) == path
    assert caplog.text.count(f'; using the last copy, {path}') == 2
    with pytest.raises(UserError, match=r'/y: cannot be read: .*Connection refused; if this mach'):
        on_disk(url.replace('/x', '/y'))


@pytest.mark.parametrize('at', ['info', '_strip_protocol'])
def test_the_last_copy_serves_without_a_storage(at, memory, monkeypatch):
    """Libraries have their own errors of connections, which may come from reading the address."""
    memory.pipe('/x', b'1')
    path = on_disk('memory://x')

    class ConnectError(Exception):
        pass

    def fail(*_, **__):
        raise ConnectError('Name or service not known')

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, at, fail)
    assert on_disk('memory://x') == path
    with pytest.raises(
        UserError, match=r'memory://y: ConnectError: .* fetch it elsewhere and give'
    ):
        on_disk('memory://y')


def test_a_full_cache_is_told_before_the_copy(server, cache, monkeypatch):
    server.files['x'] = b'1' * 2**20
    used = remote.shutil.disk_usage(cache.parents[2])._replace(free=2**19)
    monkeypatch.setattr(remote.shutil, 'disk_usage', lambda _: used)
    with pytest.raises(
        UserError, match=r'/x: has 1\.0 MiB, but .* has 0\.5 MiB free; set XDG_CACHE_HOME'
    ):
        on_disk(server.url('x'))


@pytest.mark.parametrize(
    ('url', 'message'),
    [
        ('memory://none/x.zip', r'^memory://none/x\.zip: no such file or folder; check the addre'),
        ('mammoth://x', r'^mammoth://x: mammoth:// is unknown: Protocol not known: mammoth'),
        (
            'https://u:p@h/x-{0..9}.tar?k',
            r'^https://h/x-\{0\.\.9\}\.tar: braces and \* name several',
        ),
        ('dask://x', r'^dask://x: needs a package that is not installed: '),
    ],
)
def test_urls_that_lead_nowhere(url, message, monkeypatch):
    monkeypatch.setitem(sys.modules, 'dask', None)  # as if it were not installed
    with pytest.raises(UserError, match=message):
        on_disk(url)


def test_the_channels_of_an_array_at_a_url_are_chosen(server):
    file = io.BytesIO()
    np.save(file, np.zeros((8, 8, 8, 5), np.uint8))
    server.files['x.npy'] = file.getvalue()
    open_fields = {'path': server.url('x.npy?key=1'), 'image_size': (8,)}
    config = tiny_config(train={'sample_every': 0}, data=open_fields)
    values = to_dict(config)
    values['model']['image_channels'] = 0
    assert complete(values).model.image_channels == 5


def test_paths_of_this_machine_stay(tmp_path):
    for path in ('a/b', 'digits:', 'cifar10:x', '/a://b', ''):
        assert on_disk(path) == path
    assert on_disk(pathlib.Path('~/x')) == '~/x'
    assert on_disk('file:///a%20b/c') == '/a b/c'
    assert shown_url('https://user:word@host/x?key=1') == 'https://host/x'


def test_names_stay_below_the_copy(memory, cache):
    memory.store['/set/../../x'] = fsspec.implementations.memory.MemoryFile(memory, '/x', b'1')
    memory.pipe('/set/a.png', png(1))
    with pytest.raises(UserError, match=r"^memory://set: '../../x' is no name of a file in it"):
        on_disk('memory://set')
    assert left(cache) == []


def test_a_name_that_is_too_long_for_a_file_is_cut(memory):
    memory.pipe(f'/{"日" * 200}.png', png(1))
    assert pathlib.Path(on_disk(f'memory://{"日" * 200}.png')).read_bytes() == png(1)


def test_an_empty_file_in_place_of_a_folder_is_left_out(memory):
    memory.pipe('/set/a.png', png(1))
    memory.store['/set/b/'] = fsspec.implementations.memory.MemoryFile(memory, '/set/b/', b'')
    assert [p.name for p in pathlib.Path(on_disk('memory://set')).rglob('*')] == ['a.png']


def test_sets_and_pictures_are_read(server, memory, cache, tmp_path):
    zipped = write_zip(tmp_path / 'set.zip', {f'{i}.png': png(i) for i in range(3)})
    server.files['set.zip'] = zipped.read_bytes()
    memory.pipe({f'/photos/{c}/{i}.png': png(9 * i) for i, c in enumerate(('ant', 'bee', 'cat'))})
    images = open_source(server.url('set.zip'), image_shape=(8, 8, 1)).load(np.arange(3))
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2]
    check_path('memory://nowhere')  # downloads nothing
    assert is_downloaded('memory://photos')
    folder = open_source('memory://photos', image_shape=(8, 8, 1))
    assert folder.class_names == ('ant', 'bee', 'cat')
    assert folder.load(np.arange(3))[:, 0, 0, 0].tolist() == [0, 9, 18]
    with open_images('memory://photos') as source:
        assert source.image_shape == (8, 8, 3)
    assert read_picture('memory://photos/cat/2.png', (8, 8, 1))[0, 0, 0] == 18
    memory.pipe('/photos/ant/0.png', png(77))  # a new version of the folder
    folder = open_source('memory://photos', image_shape=(8, 8, 1))
    assert folder.load(np.arange(1))[0, 0, 0, 0] == 77


def test_an_error_does_not_wait_for_the_rest(memory, cache, monkeypatch):
    memory.pipe({'/set/a': b'1', '/set/b': b'2'})
    reads = []

    def read(stream):
        if stream.path == '/set/a':
            while len(reads) < 5:
                time.sleep(0.001)
            raise KeyboardInterrupt
        time.sleep(0.001)
        reads.append(1)
        return b'2' * (len(reads) < 3000)

    monkeypatch.setattr(remote, '_read', read)
    with pytest.raises(KeyboardInterrupt):
        on_disk('memory://set')
    assert len(reads) < 2000
    assert left(cache) == []


def test_weights_and_runs_are_read(memory, tmp_path):
    config = tiny_config()
    state = jax.device_get(fresh_state(config))
    write_weights(tmp_path / 'w.safetensors', state.params, config)
    memory.put(str(tmp_path / 'w.safetensors'), '/w.safetensors')
    checkpoints = Checkpoints(tmp_path / 'run', keep=1)
    checkpoints.save(4, state, config, RunFacts())
    checkpoints.wait()
    checkpoints.close()
    memory.put(f'{tmp_path}/run/', '/bucket/run', recursive=True)
    expected = jax.tree.leaves(state.params)
    for url in ('w.safetensors', 'bucket/run', 'bucket/run/checkpoints/4'):
        found = load_model(f'memory://{url}', ema='none' if 'run' in url else '').params
        for one, other in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(UserError, match=r'^memory://none\.pth: no such file'):
        load_features('memory://none.pth')


def test_a_run_is_not_written_to_a_url():
    with pytest.raises(UserError, match=r'^--workdir: gs:/b/run: is a URL; here only files'):
        check_workdir(tiny_config(), pathlib.Path('gs://b/run'))
