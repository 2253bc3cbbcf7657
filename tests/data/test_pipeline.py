"""From a source to batches: cache modes, workers, processes, errors and interruption."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import synchronize

import numpy as np
import pytest
from support.data_files import encoded, random_pixels, write_folder

from jaxunet.config import Config
from jaxunet.data import pipeline
from jaxunet.data.order import batch_indices
from jaxunet.data.pixels import BadImage
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    files = {f'class{i % 3}/{i:03d}.png': encoded(random_pixels(i, (8, 8, 3))) for i in range(30)}
    return write_folder(tmp_path / 'set', files)


def config(workers: int = 0, steps: int = 12) -> Config:
    return Config(seed=11).replace(
        data={'batch_size': 8, 'num_workers': workers}, train={'steps': steps}
    )


@pytest.mark.parametrize('workers', [0, 2])
def test_batches_do_not_depend_on_cache_workers_or_processes(folder, workers):
    source = open_source(str(folder), image_shape=(8, 8, 3))
    images, labels = pipeline.load_all(source, progress=False)
    assert (images.dtype, images.shape, labels.dtype) == (np.uint8, (30, 8, 8, 3), np.int32)
    rows = [slice(0, 8)] if workers else [slice(0, 8), slice(0, 4), slice(4, 8)]
    for local in rows:
        with pipeline.stream(source, config(workers), 3, local) as batches:
            steps = list(batches)
        assert len(steps) == 9
        for step, batch in enumerate(steps, 3):
            index = batch_indices(step, 8, 30, 11)[local]
            np.testing.assert_array_equal(batch['image'], images[index])
            np.testing.assert_array_equal(batch['label'], labels[index])
            assert batch['label'].dtype == np.int32
    assert multiprocessing.active_children() == []


def test_no_steps_left(folder):
    source = open_source(str(folder), image_shape=(8, 8, 3))
    with pipeline.stream(source, config(), 12, slice(0, 8)) as batches:
        assert list(batches) == []


def test_a_slow_consumer_bounds_what_is_loaded_ahead():
    loaded = []
    with ThreadPoolExecutor(1) as pool:
        batches = pipeline.Stream(loaded.append, itertools.count(3), pool, ahead=5)
        next(batches)
        pool.submit(int).result()
        assert set(loaded) == set(range(3, 8))
        next(batches)
        batches.close()
    assert set(loaded) <= set(range(3, 9))


def test_in_memory_sets_need_no_workers():
    source = ArraySource('array', np.zeros((9, 4, 4, 1), np.uint8), (4, 4, 1))
    with pipeline.stream(source, config(workers=2), 0, slice(0, 8)) as batches:
        assert next(batches)['image'].shape == (8, 4, 4, 1)
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize('workers', [0, 2])
def test_a_corrupt_image_reaches_the_main_process_by_name(folder, workers):
    bad = sorted((folder / 'class1').iterdir())[4]
    bad.write_bytes(bad.read_bytes()[:90])
    source = open_source(str(folder), image_shape=(8, 8, 3))
    batches = pipeline.stream(source, config(workers), 0, slice(0, 8))
    with pytest.raises(UserError, match=rf'{bad.name}: cannot be decoded.*prepare_data'):
        list(batches)
    assert multiprocessing.active_children() == []
    with pytest.raises(UserError, match=bad.name):
        pipeline.load_all(source, progress=False)


def test_bad_image_survives_pickling():
    error = BadImage('x.png', 'broken', 'set')
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.reason, str(again)) == ('x.png', 'broken', str(error))


def test_closing_early_ends_workers_and_threads(folder):
    source = open_source(str(folder), image_shape=(8, 8, 3))
    before = threading.active_count()
    batches = pipeline.stream(source, config(workers=2, steps=10000), 0, slice(0, 8))
    next(batches)
    began = time.monotonic()
    batches.close()
    batches.close()
    assert time.monotonic() - began < 10
    assert multiprocessing.active_children() == []
    with pytest.raises(StopIteration):
        next(batches)
    for _ in range(50):
        if threading.active_count() <= before:
            break
        time.sleep(0.1)
    assert threading.active_count() <= before


def test_a_killed_worker_is_told(folder):
    source = open_source(str(folder), image_shape=(8, 8, 3))
    batches = pipeline.stream(source, config(workers=1, steps=10000), 0, slice(0, 8))
    next(batches)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r'data.num_workers: a worker process died'):
        list(batches)


SCRIPT = """
import sys, time
from jaxunet.config import Config
from jaxunet.data import pipeline
from jaxunet.data.sources import open_source

if __name__ == '__main__':
    source = open_source(sys.argv[1], image_shape=(8, 8, 3))
    config = Config().replace(data={'batch_size': 8, 'num_workers': 2}, train={'steps': 1000000})
    with pipeline.stream(source, config, 0, slice(0, 8)) as batches:
        next(batches)
        import multiprocessing
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        for _ in batches:
            time.sleep(0.01)
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_run(folder, tmp_path, number):
    """Ctrl-C goes to the whole process group; SIGKILL to the main process alone."""
    script = tmp_path / 'run.py'
    script.write_text(SCRIPT)
    root = pathlib.Path(pipeline.__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, 'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'},
    )
    try:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        assert len(children) == 2
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.kill()
        _, errors = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode not in (0, None)
    if number == signal.SIGINT:
        assert 'KeyboardInterrupt' in errors
    for _ in range(100):
        left = [pid for pid in children if _runs(pid)]
        if not left:
            break
        time.sleep(0.1)
    assert left == []


def _runs(pid: int) -> bool:
    stat = pathlib.Path(f'/proc/{pid}/stat')
    try:
        return stat.read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def test_choosing_the_cache(monkeypatch):
    source = ArraySource('array', np.zeros((1000, 32, 32, 3), np.uint8), (32, 32, 3))
    assert pipeline.images_bytes(source) == 3072000
    for asked in ('device', 'stream'):
        assert pipeline.choose_cache(Config().replace(data={'cache': asked}), source) == asked
    auto = Config().replace(data={'cache': 'auto'})

    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    for stats, expected in (
        (None, 'device'),
        ({}, 'device'),
        ({'bytes_limit': 4 * 3072000}, 'device'),
        ({'bytes_limit': 4 * 3072000 - 4}, 'stream'),
    ):
        monkeypatch.setattr(pipeline.jax, 'local_devices', lambda stats=stats: [Device(stats)])
        assert pipeline.choose_cache(auto, source) == expected
    monkeypatch.setattr(pipeline, 'DEVICE_BYTES', 3071999)
    monkeypatch.setattr(pipeline.jax, 'local_devices', lambda: [Device(None)])
    assert pipeline.choose_cache(auto, source) == 'stream'


@pytest.mark.parametrize(
    ('cache', 'in_memory', 'told'),
    [
        ('device', False, 'as the images lie in device memory; data.cache=stream uses them'),
        ('device', True, 'as the images lie in device memory'),
        ('stream', False, ''),
    ],
)
def test_workers_without_work_are_named(cache, in_memory, told, caplog):
    source = ArraySource('array', np.zeros((4, 8, 8, 3), np.uint8), (8, 8, 3))
    source.in_memory = in_memory
    config = Config().replace(data={'cache': cache, 'num_workers': 2})
    with caplog.at_level('INFO'):
        pipeline.choose_cache(config, source)
    text = f'data.num_workers: the 2 workers are not used, {told}' if told else ''
    assert caplog.messages == ([text] if text else [])


@pytest.mark.parametrize(
    'number', [errno.ENOSPC, errno.ENOSYS, errno.EACCES, errno.ENOENT], ids=errno.errorcode.get
)
def test_a_system_without_semaphores(folder, number, monkeypatch):
    """/dev/shm is full, closed or missing, as in some containers."""

    def refused(*_):
        raise OSError(number, os.strerror(number))

    module = types.SimpleNamespace(**{**vars(synchronize._multiprocessing), 'SemLock': refused})
    monkeypatch.setattr(synchronize, '_multiprocessing', module)
    source = open_source(str(folder), image_shape=(8, 8, 3))
    match = rf'^data.num_workers: 2: .*{os.strerror(number)}; check /dev/shm, or set it to 0'
    with pytest.raises(UserError, match=match):
        pipeline.stream(source, config(2), 0, slice(0, 8))
    with pipeline.stream(source, config(0, 2), 0, slice(0, 8)) as batches:
        assert len(list(batches)) == 2
