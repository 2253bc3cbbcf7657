"""TorchScript archives, read without torch: torch's own, Inception's weights in one, and those that
are damaged or hostile.
"""

from __future__ import annotations

import pathlib
import zipfile

import numpy as np
import pytest
from support.inception_case import random_state

from jaxunet.metrics.inception_weights import from_state, read_state
from jaxunet.metrics.torch_script import is_torch_script, read_torch_script
from jaxunet.runtime.errors import UserError
from jaxunet.weights.torch_file import write_torch
from jaxunet.weights.torch_pickle import dump

FIXTURE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'torch_jit_save.pt'
SMALL = {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.ones(1, np.float32)}
STATE_DICT_START, OBJECT_START = (
    b'\x80\x02ccollections\nOrderedDict\n)R(',
    b'\x80\x02c__torch__\nNet\n)\x81}(',
)


def script(
    path: pathlib.Path,
    state: dict[str, np.ndarray],
    pickle: bytes | None = None,
    compress: bool = False,
) -> pathlib.Path:
    """An archive as torch.jit.save writes it, of one module with these tensors."""
    data = dump({name: value.shape for name, value in state.items()})
    assert data.startswith(STATE_DICT_START)
    data = OBJECT_START + data[len(STATE_DICT_START) : -1] + b'b.'
    with zipfile.ZipFile(
        path, 'w', zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    ) as archive:
        for i, value in enumerate(state.values()):
            archive.writestr(f'net/data/{i}', value.tobytes())
        archive.writestr('net/data.pkl', data if pickle is None else pickle)
        archive.writestr('net/code/__torch__.py', b'import os', zipfile.ZIP_DEFLATED)
        archive.writestr('net/constants.pkl', b'\x80\x02).')
    return path


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    with path.open('rb') as file:
        assert is_torch_script(file)
        return read_torch_script(path.name, file)


def test_an_archive_of_torch_itself():
    """Its i-th tensor of floats counts up from 10 i; fc.weight is stored transposed."""
    found = read(FIXTURE)
    names = [
        'a.conv.weight',
        'a.bn.weight',
        'a.bn.bias',
        'a.bn.running_mean',
        'a.bn.running_var',
        'a.bn.num_batches_tracked',
        'fc.weight',
    ]
    assert list(found) == [*names, 'fc.bias']
    for i, (name, value) in enumerate(found.items()):
        expected = np.zeros(1) if 'tracked' in name else 10 * i + np.arange(value.size)
        np.testing.assert_array_equal(value.reshape(-1), expected)
    assert (found['a.conv.weight'].shape, found['fc.weight'].shape) == ((3, 2, 1, 1), (2, 3))


def test_inceptions_weights_in_one(tmp_path):
    state = random_state()
    expected = from_state(state, 'random')
    found = from_state(read_state(script(tmp_path / 'w.pt', state)), 'w')
    assert found.keys() == expected.keys()
    for key in ('Conv2d_1a_3x3.conv.weight', 'Mixed_7c.branch_pool.bn.running_var', 'fc.weight'):
        np.testing.assert_array_equal(found[key], expected[key])
    with pytest.raises(UserError, match='expected the 472 tensors'):
        from_state(read_state(script(tmp_path / 'other.pt', SMALL)), 'other.pt')


def test_a_state_dict_is_none(tmp_path):
    with (tmp_path / 'w.pth').open('wb') as file:
        write_torch(file, SMALL, {})
    for path in (tmp_path / 'w.pth', pathlib.Path(__file__)):
        with path.open('rb') as file:
            assert not is_torch_script(file)
            assert file.tell() == 0


GOOD = OBJECT_START + dump({'a': (2, 3), 'b': (1,)})[len(STATE_DICT_START) : -1] + b'b.'


@pytest.mark.parametrize(
    ('pickle', 'message'),
    [
        (b'\x80\x02cos\nsystem\n)R.', 'the global "os.system" is not allowed'),
        (
            b'\x80\x02ccollections\nOrderedDict\n)\x81.',
            'an object of a class that is not in the archive',
        ),
        (b'\x80\x02c__torch__\nNet\n)\x81]b.', 'expected the attributes of a module, found list'),
        (
            b'\x80\x02c__torch__\nNet\n)\x81}(K\x01K\x02ub.',
            'expected the attributes of a module, found dict',
        ),
        (b'\x80\x02}.', 'expected a module, found dict'),
        (GOOD[:60], 'data.pkl, byte .*: '),
        (GOOD.replace(b'X\x01\x00\x00\x000', b'X\x01\x00\x00\x009'), 'entry data/9 is missing'),
        (
            OBJECT_START + dump({'a': (2, 4), 'b': (1,)})[len(STATE_DICT_START) : -1] + b'b.',
            'expected 32 bytes of plain numbers, found 24',
        ),
        (
            OBJECT_START[:-1]
            + b'(X\x01\x00\x00\x00x'
            + b'c__torch__\nM\n)\x81}(X\x01\x00\x00\x00x' * 40
            + b'N'
            + b'ub' * 41
            + b'.',
            'more than 32 deep',
        ),
    ],
)
def test_archives_that_are_damaged_or_hostile(pickle, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(script(tmp_path / 'x.pt', SMALL, pickle))


def test_compressed_tensors_are_refused(tmp_path):
    with pytest.raises(UserError, match='not compressed'):
        read(script(tmp_path / 'x.pt', SMALL, compress=True))


@pytest.mark.filterwarnings('ignore:.torch.jit.*deprecated:DeprecationWarning')
def test_what_torch_writes_now(tmp_path):
    torch = pytest.importorskip('torch')
    linear = torch.nn.Linear(3, 2)
    torch.jit.save(torch.jit.trace(linear, torch.zeros(1, 3)), tmp_path / 'w.pt')
    found = read(tmp_path / 'w.pt')
    for name, value in linear.state_dict().items():
        np.testing.assert_array_equal(found[name], value.numpy())


def test_a_damaged_archive_gives_a_short_message(tmp_path):
    """zipfile's own error quotes both names of an entry."""
    path = tmp_path / 'long.pt'
    name = f'{"x" * 5000}/data.pkl'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr(name, b'\x80\x02}.')
        archive.writestr('code/', b'')
        archive.writestr(f'{"x" * 5000}/constants.pkl', b'')
    content = path.read_bytes()
    path.write_bytes(content.replace(name.encode(), name.replace('x', 'y', 1).encode(), 1))
    with path.open('rb') as file, pytest.raises(UserError, match='File name in directory') as error:
        read_torch_script(path.name, file)
    assert len(str(error.value)) < 600
