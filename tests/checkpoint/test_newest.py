"""The config of a run, read without its arrays."""

import gzip
import pathlib
import shutil

import fsspec
from support.diffusers_folders import SMALL, foreign
from support.weight_cases import random_params

from jaxunet.checkpoint.newest import config_at, newest_config
from jaxunet.checkpoint.store import read
from jaxunet.weights import read_weights, write_folder, write_weights

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
RUN = FIXTURES / 'e54d28d/half'


def test_the_config_of_a_run():
    assert newest_config(RUN) == read(RUN).config


def test_the_config_at_a_path(tmp_path):
    """The path is a workdir, one checkpoint, a file or nothing."""
    (tmp_path / 'file.safetensors').write_bytes(b'weights')
    for path in (RUN, RUN / 'checkpoints', RUN / 'checkpoints/24'):
        assert config_at(str(path)) == read(path).config
    for other in (f'{tmp_path}/file.safetensors', f'{tmp_path}/nowhere', '', None, 3):
        assert config_at(other) is None


def test_the_config_that_weights_state(tmp_path, monkeypatch):
    """They are not those of a run, and may lie at a URL."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    pickle = tmp_path / 'edm.pkl'
    pickle.write_bytes(gzip.decompress((FIXTURES / 'edm_network.pkl.gz').read_bytes()))
    flow = SMALL.replace(diffusion={'objective': 'flow'})
    write_weights(tmp_path / 'a.safetensors', random_params(flow), flow)
    write_folder(tmp_path / 'own', random_params(flow), flow)
    paths = [pickle, tmp_path / 'a.safetensors', tmp_path / 'own', foreign(tmp_path, flow)]
    for path in map(str, paths):
        assert config_at(path) == read_weights(path).config
    memory = fsspec.filesystem('memory')
    memory.put_file(str(tmp_path / 'a.safetensors'), '/models/a.safetensors')
    try:
        assert config_at('memory://models/a.safetensors') == flow
    finally:
        memory.rm('/models', recursive=True)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    shutil.copytree(RUN, tmp_path / 'run')
    shutil.copytree(RUN / 'checkpoints/24', tmp_path / 'run/checkpoints/100')
    (tmp_path / 'run/checkpoints/100/meta/metadata').write_text('{"config":')
    assert newest_config(tmp_path / 'run') == newest_config(RUN)


def test_no_run_has_no_config(tmp_path):
    assert newest_config(tmp_path) is None
