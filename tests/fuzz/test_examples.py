"""Files that once hung a reader, filled the memory or ended in a traceback: each is refused in one
message that says why, in bounded time and memory.
"""

import re

import pytest
from PIL import EpsImagePlugin
from support.bounded import outcome
from support.hostile_files import EXPANDING, HOSTILE
from support.readers import READERS, read_images
from support.weight_cases import archive

from jaxunet.data import containers, picture
from jaxunet.runtime import archives, rows, untrusted

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_files(name, tmp_path):
    reader, make, message = HOSTILE[name]
    path = tmp_path / READERS[reader].file
    path.write_bytes(make())
    told = outcome(READERS[reader].read, path)
    assert re.search(message, told), told
    assert str(tmp_path) in told or 'rows' in reader  # their check sees no file


@pytest.mark.parametrize('name', EXPANDING)
def test_archives_expand_to_a_limit(name, tmp_path, monkeypatch):
    reader, make = EXPANDING[name]
    path = tmp_path / READERS[reader].file
    path.write_bytes(make())
    monkeypatch.setattr(archives, 'ALWAYS', 2**20)
    told = outcome(READERS[reader].read, path)
    size = path.stat().st_size
    assert f'{size:,} bytes that expand to ' in told
    assert f'expected at most {max(2**20, 32 * size):,}; if you trust it, set ' in told
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    monkeypatch.setenv('JAXUNET_MAX_EXPANDED_GIB', '1')
    assert 'expand to' not in outcome(READERS[reader].read, path)


@pytest.mark.parametrize(
    ('module', 'limit', 'reader'),
    [
        (rows, 'MAX_BYTES', 'rows'),
        (picture, 'MAX_FILE_BYTES', 'png'),
        (untrusted, 'MAX_JSON', 'choices'),
        (untrusted, 'MAX_JSON', 'step configs'),
    ],
)
def test_endless_files_have_a_limit(module, limit, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(module, limit, 5000)
    path = tmp_path / READERS[reader].file
    path.symlink_to('/dev/zero')
    assert 'expected at most 5,000 bytes, found more; ' in outcome(READERS[reader].read, path)


def test_links_that_form_a_graph_end(tmp_path, monkeypatch):
    """30 folders with two links each to the next one: 2^30 paths."""
    for level in range(30):
        folder = tmp_path / str(level)
        folder.mkdir()
        for name in 'ab':
            (folder / name).symlink_to(tmp_path / str(level + 1), target_is_directory=True)
    (tmp_path / '30').mkdir()
    monkeypatch.setattr(containers, 'MAX_AGAIN', 500)
    told = outcome(read_images, tmp_path)
    assert 'links lead to the same folders by more than 500 paths' in told


@pytest.mark.parametrize('reader', ['png', 'mask', 'grid', 'zip'])
def test_an_image_never_starts_a_program(reader, tmp_path, monkeypatch):
    """A file that Pillow by itself would take for PostScript, and other programs for WebP."""
    data = b'%!PS\n%%xWEBP\n%!PS-Adobe\n%%BoundingBox: 0 0 8 8\n%%EndComments\n\nshowpage\n'

    def run(*_args, **_options):
        pytest.fail('Ghostscript was started')

    monkeypatch.setattr(EpsImagePlugin, 'Ghostscript', run)
    path = tmp_path / READERS[reader].file
    path.write_bytes(archive({'a.webp': data}) if reader == 'zip' else data)
    assert outcome(READERS[reader].read, path)
