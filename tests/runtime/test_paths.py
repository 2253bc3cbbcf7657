"""Paths that users write: `~` in flags, fields and variables, and accounts without a home."""

import ast
import pathlib
import pwd
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import flags
from support.commands import ROOT, environment, python_path

from jaxunet.checkpoint.load import check_exists, load_model
from jaxunet.checkpoint.store import find
from jaxunet.config.config_file import ConfigFile
from jaxunet.data.images import check_output, save_images
from jaxunet.data.sources import check_path, open_source
from jaxunet.metrics.arrays import read_arrays
from jaxunet.metrics.features import load_features
from jaxunet.ops import choices
from jaxunet.runtime import compiled_cache, paths
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import expanded, of_user
from jaxunet.runtime.whole_files import check_writable, written
from jaxunet.training.workdir import opened
from jaxunet.weights.files import read_classifier, read_weights

PATH_WORDS = re.compile(
    r'(?<!-)\b(files?|folders?|workdir|archive|csv|jsonl|picture|path)\b|\.(npz|png|pt)\b',
    re.IGNORECASE,
)
NOT_PATHS = {'EMA'}  # its help mentions files of weights


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    return tmp_path / 'home'


@pytest.fixture
def homeless(monkeypatch):
    """Takes HOME and the passwd entry away, as in a container with a bare uid."""

    def unknown(*_):
        raise KeyError('uid not found')

    monkeypatch.setattr(pwd, 'getpwuid', unknown)
    for name in ('HOME', 'XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR', choices.VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_home_folder_takes_the_place_of_its_sign(home):
    assert expanded('~') == str(home)
    assert expanded('~/a/') == f'{home}/a/'
    assert expanded('~root/a') == f'{pwd.getpwnam("root").pw_dir}/a'
    for text in ('', 'a', '/a/~/b', './~/b', 'a~', 'digits:'):
        assert expanded(text) == text
    assert expanded(pathlib.Path('./~/b')) == '~/b'


def test_a_home_folder_that_is_unknown_is_refused(homeless):
    with pytest.raises(
        UserError,
        match=r'^~no_user/a: there is no user "no_user" on this machine; give the whole path, '
        r'or \./~no_user/a for a file of that very name$',
    ):
        expanded('~no_user/a')
    with pytest.raises(UserError, match=r'^~/a: this account has no home folder, and HOME is not'):
        expanded('~/a')


def test_flags_expand_their_paths(home):
    path, several = (
        define(name, None, 'Help.')
        for define, name in ((flags.DEFINE_string, 'a_path'), (flags.DEFINE_list, 'many_paths'))
    )
    try:
        of_user(path, several)
        flags.FLAGS['a_path'].parse('~/x.npz')
        flags.FLAGS['many_paths'].parse('~/x,y')
        assert flags.FLAGS['a_path'].value == f'{home}/x.npz'
        assert flags.FLAGS['many_paths'].value == [f'{home}/x', 'y']
        with pytest.raises(flags.IllegalFlagValueError, match='flag --a_path=~no_user: ~no_user: '):
            flags.FLAGS['a_path'].parse('~no_user')
    finally:
        delattr(flags.FLAGS, 'a_path')
        delattr(flags.FLAGS, 'many_paths')


def test_every_flag_of_a_path_expands_it():
    seen = 0
    for file in sorted((ROOT / 'jaxunet').rglob('*.py')):
        tree = ast.parse(file.read_text(encoding='utf-8'))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        expands = {
            name.id
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id == 'of_user'
            for name in call.args
        }
        for node in tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            defines = ast.unparse(node.value.func)
            if defines not in ('flags.DEFINE_string', 'flags.DEFINE_list'):
                continue
            name, text = ast.unparse(node.targets[0]), ast.unparse(node.value.args[2])
            if PATH_WORDS.search(text) and name not in NOT_PATHS:
                seen += 1
                assert name in expands, f'{file}: {name}: {text}'
    assert seen > 35


def test_functions_expand_the_paths_that_they_are_given(home):
    home.mkdir()
    save_images('~/a.npz', np.zeros((2, 8, 8, 1), np.uint8))
    assert (home / 'a.npz').is_file()
    assert len(open_source('~/a.npz', image_shape=(8, 8, 1))) == 2
    check_path('cifar10:~/a.npz')
    (home / 'run' / 'checkpoints').mkdir(parents=True)
    assert find('~/run') == (home / 'run', None)
    (home / 'c.py').write_text('def get_config():\n  return {"seed": 3}')
    assert ConfigFile().parse('~/c.py') == {'seed': 3}
    for reads in (
        lambda: load_model('~/none.pt'),
        lambda: read_weights('~/none.pt'),
        lambda: read_classifier('~/none.pt', None),
        lambda: check_path('~/none'),
    ):
        with pytest.raises(UserError, match=rf'^{home}/none.*: no such file'):
            reads()
    for reads in (check_output, load_model, load_features, ConfigFile().parse, check_path):
        with pytest.raises(UserError, match=r'~no_user/a.*: there is no user "no_user" on this'):
            reads('~no_user/a.npz')


@pytest.mark.parametrize('name', ['XDG_CACHE_HOME', choices.VARIABLE, 'JAX_COMPILATION_CACHE_DIR'])
def test_variables_expand_their_paths(home, cache_settings, name, monkeypatch):
    monkeypatch.setenv(name, '~/mine')
    if name == 'XDG_CACHE_HOME':
        assert paths.cache_dir() == home / 'mine' / 'jaxunet'
    elif name == choices.VARIABLE:
        assert choices.path() == home / 'mine'
    else:
        compiled_cache.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(home / 'mine')


def test_an_account_without_a_home_keeps_no_compiled_programs(homeless, cache_settings, caplog):
    compiled_cache.enable_compilation_cache()
    assert not jax.config.jax_enable_compilation_cache
    assert 'compiled programs are not kept: no cache folder: neither XDG_CACHE' in caplog.text
    assert choices.read('NVIDIA H200', 'float32') is None
    with pytest.raises(UserError, match=r'no cache folder: .*; set XDG_CACHE_HOME to a folder$'):
        load_features('inception')


def test_a_command_runs_for_an_account_without_a_home(tmp_path):
    script = (
        'import os, pwd, runpy, sys\n'
        'def unknown(*_): raise KeyError\n'
        'pwd.getpwuid = unknown\n'
        'sys.argv = sys.argv[1:]\n'
        'runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)\n'
    )
    variables = environment() | {'PYTHONPATH': python_path()}
    for name in ('HOME', 'XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR'):
        variables.pop(name, None)
    np.savez(tmp_path / 'mine.npz', mu=np.zeros(2048), sigma=np.eye(2048))
    done = subprocess.run(
        [
            *(sys.executable, '-c', script, 'jaxunet.evaluate', '--samples=mine.npz'),
            *('--reference=mine.npz', '--features=none.pth'),
        ],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert 'compiled programs are not kept: no cache folder: ' in done.stderr
    assert done.stderr.splitlines()[-1].startswith('error: --features: expected inception')


@pytest.mark.parametrize(
    ('path', 'why'),
    [
        ('{}/data', r'data is a link to nowhere, which is missing or a loop'),
        ('{}/data/deep/x', r'data is a link to nowhere, which is missing or a loop'),
        ('{}/self', r'self is a link to self, which is missing or a loop'),
        ('https:/example.com/x', r'a URL has two slashes, as in s3://bucket/x; give it as text'),
        ('s3:/bucket/x', r'a URL has two slashes, as in s3://bucket/x; give it as text, not as'),
    ],
)
def test_what_is_missing_says_why(path, why, tmp_path):
    (tmp_path / 'data').symlink_to('nowhere')
    (tmp_path / 'self').symlink_to('self')
    path = path.format(tmp_path)
    opens = [
        lambda: open_source(path, image_shape=(8, 8, 1)),
        lambda: check_path(path),
        lambda: check_exists(path),
        lambda: read_weights(f'{path}.safetensors' if ':' in path else f'{path}/x.safetensors'),
        lambda: read_arrays(pathlib.Path(path)),
    ]
    for each in opens:
        with pytest.raises(UserError, match=f'no such file.*{why}|Too many levels of symbolic'):
            each()


@pytest.mark.parametrize('url', ['gs://bucket/run', 's3:/bucket/x.npz', 'file:///tmp/x.png'])
def test_nothing_is_written_to_a_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writes = [
        lambda: opened(pathlib.Path(url)).__enter__(),
        lambda: check_output(pathlib.Path(url)),
        lambda: check_writable(url, '--output'),
        lambda: written(pathlib.Path(url)).__enter__(),
        lambda: written(pathlib.Path(url).resolve()).__enter__(),
    ]
    for each in writes:
        with pytest.raises(UserError, match=': is a URL; here only files and folders of this'):
            each()
    assert [*tmp_path.iterdir()] == []
