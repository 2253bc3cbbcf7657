"""Names of a stranger's files: no character of theirs reaches the terminal as a command."""

import itertools
import json
import logging as std_logging
import types
import zipfile

import numpy as np
import pytest
from absl import logging
from support.data_files import encoded, put, random_pixels
from support.weight_cases import safetensors_bytes

from jaxunet.config import Config
from jaxunet.data.classes import Classes, check_classes, keep_classes
from jaxunet.data.sources import open_source
from jaxunet.metrics.sides import statistics_side
from jaxunet.runtime.command import _Printable, fail
from jaxunet.runtime.errors import UserError, listed, near_misses, printable, printable_lines
from jaxunet.runtime.untrusted import one_line, plain, shown
from jaxunet.weights.files import read_weights

# Clears the screen, sets the title, C1's CSI, turns the text around, hides it, and breaks the line.
HOSTILE = 'a\x1b[2J\x1b]0;t\x07\x9b31m\u202egnp\u2066\u200b\u2028\x00\x7f\r\n\tb'
SHOWN = r'a\x1b[2J\x1b]0;t\x07\x9b31m\u202egnp\u2066\u200b\u2028\x00\x7f\r\n\tb'


def test_what_is_not_printable_is_escaped():
    assert printable(HOSTILE) == SHOWN
    assert printable('\udcff\U000e0001') == r'\udcff\U000e0001'
    for name in ('', 'a b', 'é', '日本 語', 'кот', '😀', 'a\\x1b'):
        assert printable(name) == name
    assert printable_lines(f'a\n{HOSTILE}') == 'a\n' + SHOWN.replace(r'\n', '\n')
    for text in (shown(HOSTILE), plain(HOSTILE), one_line(HOSTILE), listed([HOSTILE])):
        assert text.isprintable()
    assert near_misses(HOSTILE, [HOSTILE]).isprintable()


def test_errors_and_the_log_escape_what_is_in_them(capsys):
    error = UserError(f'{HOSTILE}: wrong')
    assert printable_lines(str(error)) == str(error)
    with pytest.raises(SystemExit):
        fail(error)
    record = std_logging.LogRecord('absl', logging.INFO, '', 0, 'read %s', (HOSTILE,), None)
    for text in (capsys.readouterr().err, _Printable('%(message)s').format(record)):
        assert text.replace('\n', '').isprintable()


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar', 'tar.gz'])
def test_names_of_images_and_classes_are_escaped(form, tmp_path, caplog):
    config, numbers = Config(), itertools.count()

    def opened(files, classes=()):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        path = put(folder, {name.replace('\0', ''): data for name, data in files.items()}, form)
        return open_source(str(path), image_shape=(8, 8, 3), classes=classes)

    picture = encoded(random_pixels(0, (8, 8, 3)))
    files = {f'{HOSTILE}/1.png': picture, 'c/2.png': picture, f'c/{HOSTILE}.png': b'no image'}
    source = opened(files)
    names = source.class_names
    assert len(names) == 2
    assert all(name.isprintable() for name, _ in source.skipped)
    for classes in (0, 2, 3):
        check_classes(config.replace(model={'num_classes': classes}), source)
    for refuse in (
        lambda: check_classes(config.replace(model={'num_classes': 1}), source),
        lambda: keep_classes(('c', 'a'), names, config, tmp_path),
        lambda: Classes(2, names).label_of('dog'),
        lambda: opened(files, classes=('dog',)),
        lambda: opened(files | {f'{HOSTILE}/3.png': picture[:100]}).load(np.arange(3)),
        lambda: opened({'b/1.png': picture, f'{HOSTILE}.png': picture}, classes=('dog',)),
    ):
        with pytest.raises(UserError) as found:
            refuse()
        lines = str(found.value).split('\n')
        assert all(line.isprintable() for line in lines)
        assert len(lines) == 1 or 'labels 0, 1, ... of the run' in lines[1]
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_names_in_other_files_are_escaped(tmp_path):
    np.savez(
        tmp_path / 'classes.npz',
        images=np.zeros((2, 8, 8, 1), np.uint8),
        labels=np.arange(2),
        class_names=np.array([HOSTILE, 'b']),
    )
    weights = tmp_path / 'w.safetensors'
    weights.write_bytes(safetensors_bytes({HOSTILE: np.zeros(2, np.float32)}))
    with zipfile.ZipFile(tmp_path / 'members.npz', 'w') as archive:
        archive.writestr(f'{HOSTILE}.npy', b'')
    for refuse in (
        lambda: open_source(str(tmp_path / 'classes.npz'), image_shape=(8, 8, 1), classes=('dog',)),
        lambda: open_source(str(tmp_path / 'members.npz'), image_shape=(8, 8, 1)),
        lambda: read_weights(weights),
    ):
        with pytest.raises(UserError) as found:
            refuse()
        assert str(found.value).isprintable()


def test_the_origin_of_statistics_is_escaped(tmp_path):
    path = str(tmp_path / 'statistics.npz')
    protocol = {'images': HOSTILE, 'count': 9, 'size': '8x8', 'features': 'mine'}
    np.savez(path, mu=np.zeros(2), sigma=np.eye(2), jaxunet_protocol=json.dumps(protocol))
    network = types.SimpleNamespace(name='mine', dimension=2, is_inception=False)
    side = statistics_side(path, ['fid'], network, '--reference')
    assert side.name == f'{path} ({SHOWN})'
