"""The config of a run, read without its arrays."""

import pathlib
import shutil

from jaxunet.checkpoint.newest import config_at, newest_config
from jaxunet.checkpoint.store import read

RUN = pathlib.Path(__file__).parents[1] / 'fixtures/e54d28d/half'


def test_the_config_of_a_run():
    assert newest_config(RUN) == read(RUN).config


def test_the_config_at_a_path(tmp_path):
    """The path is a workdir, one checkpoint, a file or nothing."""
    (tmp_path / 'file.safetensors').write_bytes(b'weights')
    for path in (RUN, RUN / 'checkpoints', RUN / 'checkpoints/24'):
        assert config_at(str(path)) == read(path).config
    for other in (f'{tmp_path}/file.safetensors', f'{tmp_path}/nowhere', '', None, 3):
        assert config_at(other) is None


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    shutil.copytree(RUN, tmp_path / 'run')
    shutil.copytree(RUN / 'checkpoints/24', tmp_path / 'run/checkpoints/100')
    (tmp_path / 'run/checkpoints/100/meta/metadata').write_text('{"config":')
    assert newest_config(tmp_path / 'run') == newest_config(RUN)


def test_no_run_has_no_config(tmp_path):
    assert newest_config(tmp_path) is None
