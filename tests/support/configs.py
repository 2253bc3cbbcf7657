"""The configuration files of the repository."""

import pathlib

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / 'configs').glob('*.py'))


def load(path):
    """Returns what `get_config` of a configuration file returns."""
    namespace = {}
    exec(compile(path.read_text(), path, 'exec'), namespace)
    return namespace['get_config']()
