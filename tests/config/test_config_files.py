"""Config files and values that are no config: each ends in one line."""

import pytest

from jaxunet.config import resolve
from jaxunet.config.cli import _Tuples
from jaxunet.config.config_file import ConfigFile
from jaxunet.runtime.errors import UserError


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('fid,kid', ('fid', 'kid')),
        ('big cow, bull,', ('big cow', 'bull')),
        ('cow', ('cow',)),
        ("('a,b', 'c')", ('a,b', 'c')),
        ("'a,b'", ('a,b',)),
        ('32,64', (32, 64)),
        ('32,x,0.5,007,1e3', (32, 'x', 0.5, '007', '1e3')),
        ('', ()),
        ('()', ()),
    ],
)
def test_tuples(text, found):
    assert _Tuples().parse(text) == found


def test_numbers_in_a_field_of_texts_stay_as_written():
    text = '32,x,0.5,-0,007,1e3,True'
    values = {'data': {'classes': _Tuples().parse(text)}}
    assert resolve(values).data.classes == tuple(text.split(','))


def test_files_that_give_no_config(tmp_path):
    reader = ConfigFile()
    for name, text, message in (
        ('empty.py', 'x = 1', r'empty.py: expected get_config\(\), found none'),
        (
            'three.py',
            'def get_config():\n  return 3',
            r'three.py: get_config\(\) must return the ConfigDict of .*, found 3',
        ),
        ('none.py', 'def get_config():\n  pass', 'found None'),
        (
            'photos.npz',
            'PK\0',
            r'expected a Python file with get_config\(\), found .*photos.npz, which is not a '
            r'Python file',
        ),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            reader.parse(str(tmp_path / name))
    with pytest.raises(UserError, match=r'no file .*nne.py; did you mean "none.py"'):
        reader.parse(str(tmp_path / 'nne.py'))


@pytest.mark.parametrize(
    ('lines', 'message'),
    [
        (
            ['config.model.base_chanels = 3'],
            r'AttributeError: .*Did you mean "base_channels".* \(.*mistake.py, line 4\)',
        ),
        (['return 1 / 0'], r'ZeroDivisionError: division by zero \(.*mistake.py, line 4\)'),
        (["config.train.steps = 'many'"], r"TypeError: .*'steps'.*many.*mistake.py, line 4\)"),
        (
            ['raise SystemExit(3)'],
            r'.*mistake.py: ends Python \(SystemExit: 3\) while it is read; return a config from '
            r'get_config\(\), or raise an exception',
        ),
        (['x = ('], r'SyntaxError: .*mistake.py, line 4\)'),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line(lines, message, tmp_path):
    path = tmp_path / 'mistake.py'
    start = ['from jaxunet.config import default_config', 'def get_config():']
    path.write_text('\n  '.join(['\n'.join(start), 'config = default_config()', *lines]))
    with pytest.raises(UserError, match=f'^--config: {message}$') as caught:
        ConfigFile().parse(str(path))
    assert 'Traceback' not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
