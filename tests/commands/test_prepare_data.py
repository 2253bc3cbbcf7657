"""`python -m jaxunet.prepare_data`: what it writes, what it leaves out, and what it refuses."""

from __future__ import annotations

import os
import pathlib
import zipfile

import numpy as np
import pytest
from PIL import Image
from support.commands import Fork, call
from support.data_files import encoded, everything, put, random_pixels, write_folder
from support.full_disk import full_disk

from jaxunet import prepare_data
from jaxunet.data.reading import Reading
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError


def unetcu_bytes(folder: pathlib.Path) -> bytes:
    """Returns the file of unet.cu's prepare_data.py for 64×64 images, by its description."""

    def files(path: pathlib.Path) -> list[pathlib.Path]:
        found = []
        for name in sorted(os.listdir(path)):
            if (path / name).is_dir():
                found += files(path / name)
            elif name.rpartition('.')[2].lower() in ('jpg', 'jpeg', 'png', 'gif'):
                found.append(path / name)
        return found

    listed = files(folder)
    header = np.zeros(256, np.int32)
    header[:5] = 20240620, len(listed), 3, 64, 64
    data = header.tobytes()
    for file in listed:
        with Image.open(file) as image:
            data += (
                (np.array(image.convert('RGB')).astype(np.float32) / 127.5 - 1)
                .transpose(2, 0, 1)
                .astype('float32')
                .tobytes()
            )
    return data


def test_bin_is_unetcus(tmp_path, capsys):
    """Sorting that plain string order would get wrong, every mode, every value of a byte, files
    that are no images.
    """
    ramp = np.arange(64 * 64, dtype=np.int64).astype(np.uint8).reshape(64, 64)
    rgb = Image.fromarray(random_pixels(0, (64, 64, 3)))
    images = {
        'b/2.png': rgb,
        'b.png': Image.fromarray(ramp),
        'b-c/1.jpg': rgb,
        'b/10.JPEG': rgb.convert('L'),
        'a/deep/er/x.gif': rgb.convert('P'),
        'Z.png': Image.fromarray(random_pixels(1, (64, 64, 4))),
    }
    kinds = {'jpg': 'JPEG', 'JPEG': 'JPEG', 'gif': 'GIF', 'png': 'PNG'}
    folder = write_folder(
        tmp_path / 'set',
        {name: encoded(image, kinds[name.rpartition('.')[2]]) for name, image in images.items()},
    )
    (folder / 'readme.txt').write_text('words')
    drop = Reading('drop')
    prepare_data.prepare(str(folder), str(tmp_path / 'out.bin'), (64, 64, 3), reading=drop)
    assert (tmp_path / 'out.bin').read_bytes() == unetcu_bytes(folder)
    assert (
        capsys.readouterr().out
        == f'left out readme.txt: not an image\n{tmp_path}/out.bin: 6 images of 64x64x3; 1 file '
        'left out\n'
    )


def test_real_bin_is_unetcus(tmp_path, shared_dir):
    path = shared_dir / 'data' / 'elephants64.zip'
    flags = ('--input', path, '--output', 'deep/out.bin', '--image_size', '64')
    process = Fork(['jaxunet.prepare_data', *flags], folder=tmp_path)
    out, error = process.communicate()
    assert (process.returncode, out) == (
        0,
        'deep/out.bin: 500 images of 64x64x3; 0 files left out\n',
    )
    assert '500/500' in error  # the progress bar
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / 'set')
    assert (tmp_path / 'deep' / 'out.bin').read_bytes() == unetcu_bytes(tmp_path / 'set')


@pytest.mark.parametrize('form', ['folder', 'deflated.zip', 'tar', 'tar.gz', 'tar.xz'])
def test_npz_keeps_labels_and_names(tmp_path, form):
    names = [f'{name}/{i}.png' for name in ('cat', 'dog', 'owl') for i in range(3)]
    files = {name: encoded(random_pixels(i, (20, 30, 3))) for i, name in enumerate(names)}
    path = put(tmp_path, files, form)
    prepare_data.prepare(str(path), str(tmp_path / 'out.npz'), (10, 12, 3), classes=('owl', 'cat'))
    with np.load(tmp_path / 'out.npz', allow_pickle=False) as arrays:
        assert arrays['images'].shape == (6, 10, 12, 3)
        assert arrays['images'].dtype == np.uint8
        assert arrays['labels'].tolist() == [1, 1, 1, 0, 0, 0]
        assert arrays['class_names'].tolist() == ['owl', 'cat']
        direct = open_source(str(path), image_shape=(10, 12, 3), classes=('owl', 'cat'))
        np.testing.assert_array_equal(arrays['images'], everything(direct))
    again = open_source(str(tmp_path / 'out.npz'), image_shape=(10, 12, 3), classes=('cat',))
    np.testing.assert_array_equal(everything(again), everything(direct)[:3])
    assert {p.name for p in tmp_path.iterdir()} == {path.name, 'out.npz'}


@pytest.mark.parametrize('form', ['folder', 'zip', 'tar.gz'])
@pytest.mark.parametrize('suffix', ['bin', 'npz'])
def test_bad_files_are_left_out_by_name_or_refused(tmp_path, form, suffix, capsys, caplog):
    good = {f'{i}.png': random_pixels(i, (8, 8, 3)) for i in range(4)}
    files = {name: encoded(pixels) for name, pixels in good.items()}
    files |= {'1b.png': files['1.png'][:100], '2b.txt': b'words', '3b.png': b''}
    files['2c.png'] = files['2.png'][:100]
    path = put(tmp_path, files, form)
    output = tmp_path / f'out.{suffix}'
    bad = {
        '2b.txt: not an image',
        '3b.png: empty file',
        '1b.png: cannot be decoded',
        '2c.png: cannot be decoded',
    }
    with pytest.raises(UserError) as error:
        prepare_data.prepare(str(path), str(output), (8, 8, 3), strict=True)
    first, *listed = str(error.value).splitlines()
    assert first == '--strict: 4 files are corrupt or not images; nothing was written:'
    assert {': '.join(line.strip().split(': ')[:2]) for line in listed} == bad
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    prepare_data.prepare(str(path), str(output), (8, 8, 3))
    *listed, last = capsys.readouterr().out.splitlines()
    assert {': '.join(line.split(': ')[:2]) for line in listed} == {f'left out {b}' for b in bad}
    assert last == f'{output}: 4 images of 8x8x3; 4 files left out'
    assert not caplog.records  # they are listed once
    source = open_source(str(output), image_shape=(8, 8, 3))
    np.testing.assert_array_equal(everything(source), np.stack(list(good.values())))


def test_it_tells_what_was_enlarged(tmp_path, capsys):
    turned = Image.Exif()
    turned[0x0112] = 6  # shown as 8 high and 16 wide
    shapes = {'a': (8, 16, 3), 'b': (16, 16, 3), 'c': (9, 12, 3), 'd': (40, 11, 3), 'e': (8, 12, 3)}
    files = {f'{name}.png': encoded(random_pixels(0, shape)) for name, shape in shapes.items()}
    files['turned.jpg'] = encoded(random_pixels(0, (16, 8, 3)), 'JPEG', exif=turned.tobytes())
    prepare_data.prepare(str(put(tmp_path, files, 'zip')), str(tmp_path / 'a.npz'), (8, 12, 3))
    assert 'note: 1 of 6 images had to be enlarged to 8x12' in capsys.readouterr().out
    for source, output, size in (
        (tmp_path / 'a.npz', 'b.bin', 12),
        (tmp_path / 'b.bin', 'c.bin', 13),
        (tmp_path / 'c.bin', 'd.npz', 13),
    ):
        prepare_data.prepare(str(source), str(tmp_path / output), (size, size, 3))
        told = capsys.readouterr().out
        assert (f'note: 6 of 6 images had to be enlarged to {size}x{size}' in told) == (
            output != 'd.npz'
        )
    prepare_data.prepare('digits:', str(tmp_path / 'e.npz'), (16, 16, 1), classes=('7',))
    assert 'note: 179 of 179 images had to be enlarged to 16x16' in capsys.readouterr().out


def test_only_corrupt_images(tmp_path):
    folder = write_folder(tmp_path / 'set', {'a.png': encoded(random_pixels(0))[:100]})
    for suffix in ('bin', 'npz'):
        with pytest.raises(
            UserError, match=r': 1 image, all corrupt, such as .*a.png \(cannot be decoded'
        ):
            prepare_data.prepare(str(folder), str(tmp_path / f'out.{suffix}'), (8, 8, 3))
    with pytest.raises(UserError, match=r'--strict: 1 file is corrupt or not .*\n  a.png: cannot'):
        prepare_data.prepare(str(folder), str(tmp_path / 'out.bin'), (8, 8, 3), strict=True)
    assert [p.name for p in tmp_path.iterdir()] == ['set']


@pytest.mark.parametrize('form', ['folder', 'tar.gz'])
def test_an_image_beside_class_folders_costs_the_labels_aloud(tmp_path, form, capsys):
    files = {
        name: encoded(random_pixels(0)) for name in ('t/bull/1.png', 't/cow/2.png', 't/loose.png')
    }
    path = put(
        tmp_path,
        {name.removeprefix('t/' if form == 'folder' else ''): data for name, data in files.items()},
        form,
    )
    prepare_data.prepare(str(path), str(tmp_path / 'out.npz'), (8, 8, 3))
    assert (
        'loose.png lies beside the sub-folders bull, cow: move such images'
        in capsys.readouterr().out
    )
    with np.load(tmp_path / 'out.npz') as arrays:
        assert list(arrays) == ['images']


def test_one_class_needs_no_labels(tmp_path, capsys):
    prepare_data.prepare('digits:', str(tmp_path / 'a.bin'), (8, 8, 1), classes=('7',))
    assert 'note:' not in capsys.readouterr().out


def test_between_formats(tmp_path, capsys):
    prepare_data.prepare('digits:', str(tmp_path / 'a.bin'), (8, 8, 1), classes=('7', '1'))
    assert (
        'note: .bin has no place for labels; write an .npz to keep the 2 classes'
        in capsys.readouterr().out
    )
    prepare_data.prepare(str(tmp_path / 'a.bin'), str(tmp_path / 'b.npz'), (8, 8, 1))
    digits = open_source('digits:', image_shape=(8, 8, 1), classes=('7', '1'))
    with np.load(tmp_path / 'b.npz') as arrays:
        np.testing.assert_array_equal(arrays['images'], everything(digits))
        assert list(arrays) == ['images']


@pytest.mark.parametrize('output', ['out.bin', 'out.npz'])
def test_a_full_disk_leaves_the_old_file(tmp_path, output):
    (tmp_path / output).write_bytes(b'old')
    flags = ('--input=digits:', f'--output={output}', '--image_size=32', '--channels=1')
    with full_disk(100 * 1024):
        error = call('jaxunet.prepare_data', *flags, code=2, folder=tmp_path, fresh=True)
    assert (
        f'error: --output: {output}: cannot be written: File too large; check the folder, its '
        'permissions and the free space' in error
    )
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [(output, b'old')]


@pytest.mark.parametrize(
    ('output', 'size', 'match'),
    [
        (
            'out.bim',
            '8',
            r'--output: expected a name that ends in .bin \(unet.cu\) or .npz, found "out.bim"; '
            r'did you mean ".bin"\?',
        ),
        ('out', '8', r'found "out"'),
        ('', '8', r'found ""'),
        (
            'out.bin',
            '0',
            r'--image_size: expected SIDE or HEIGHT,WIDTH, each 1 to 65536, such as 64 or 48,64; '
            r"found '0'",
        ),
        ('out.bin', '8x8', r"found '8x8'"),
        ('out.bin', '8,8,8', r"found '8,8,8'"),
        ('out.bin', '-8', r"found '-8'"),
        ('out.bin', '²', r"found '²'"),
        ('out.bin', None, r'found nothing'),
        ('sub.npz', '8', r'^--output: sub.npz: cannot be written: it is a folder; name a file'),
        ('file/out.bin', '8', r'^--output: file/out.bin: cannot be written; check the name'),
    ],
)
def test_mistakes(tmp_path, monkeypatch, output, size, match):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'sub.npz').mkdir()
    (tmp_path / 'file').write_bytes(b'')
    with pytest.raises(UserError, match=match):  # before the set is opened
        prepare_data.prepare('nowhere', output, (*prepare_data.parse_size(size), 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'sub.npz']


def test_the_input_is_not_overwritten(tmp_path):
    prepare_data.prepare('digits:', str(tmp_path / 'a.npz'), (8, 8, 1))
    with pytest.raises(UserError, match=r'a.npz is the input; choose another name'):
        prepare_data.prepare(str(tmp_path / 'a.npz'), str(tmp_path / 'a.npz'), (4, 4, 1))


def test_command_line_errors_are_one_line(tmp_path):
    for flags, message in (
        ((), 'error: --input: missing'),
        (
            ('--input', 'digits:', '--image_size', '8', '--output', 'x.bin', '--channels', '0'),
            'error: --channels: expected 1 (grey) or 3',
        ),
        (
            ('--input', 'nowhere', '--image_size', '8', '--output', 'x.bin'),
            'error: nowhere: no such file or folder',
        ),
        (
            ('--input=digits:', '--image_size=8', '--output=x.bin', '--classes=cat'),
            'error: --classes: digits: has no class "cat"; it has 0, 1, 2',
        ),
    ):
        error = call('jaxunet.prepare_data', *flags, code=2, folder=tmp_path)
        assert error.startswith(message)


@pytest.mark.parametrize('form', ['tar', 'tar.gz'])
def test_wrong_classes_are_told_with_the_flag(form, tmp_path):
    files = {f'{name}/0.png': encoded(random_pixels(0, (8, 8, 3))) for name in ('cat', 'dog')}
    path, output = put(tmp_path, files, form), tmp_path / 'x.bin'
    with pytest.raises(UserError, match=r'^--classes: .* has no class "bird"; it has cat, dog'):
        prepare_data.prepare(str(path), str(output), (8, 8, 3), classes=('bird',))


def test_opacity_and_16_bits_go_into_an_npz(tmp_path):
    """Training reads from the file what it would read from the images."""
    pixels = random_pixels(0, (8, 8, 4))
    pixels[:4, :, 3] = 0
    folder = write_folder(tmp_path / 'set', {'a.png': encoded(pixels)})
    for reading, later in (
        (Reading('keep'), Reading('keep')),
        (Reading('keep', 16), Reading('keep', 16)),
        (Reading(bits=16, range=(0, 300)), Reading(bits=16)),
    ):
        shape = (8, 8, 4 if reading.keeps else 3)
        direct = open_source(str(folder), image_shape=shape, reading=reading).load(np.arange(1))
        prepare_data.prepare(str(folder), str(tmp_path / 'x.npz'), shape, reading=reading)
        found = open_source(str(tmp_path / 'x.npz'), image_shape=shape, reading=later)
        np.testing.assert_array_equal(found.load(np.arange(1)), direct)
    for reading in (Reading('keep'), Reading(bits=16)):
        with pytest.raises(UserError, match=r'x.bin holds opaque pixels of 8 bits; write an .npz'):
            prepare_data.prepare(str(folder), str(tmp_path / 'x.bin'), (8, 8, 3), reading=reading)
