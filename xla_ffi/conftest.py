"""The settings of all tests, for those that live beside their kernels; without the extension they skip."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'tests'))

from settings import *

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(
    specname='pytest_collection_modifyitems'
)  # beside that of the settings, which skips what needs a GPU
def skip_without_the_extension(items: list[pytest.Item]) -> None:
    import xla_ffi  # after the settings

    if xla_ffi._cpu is None:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason='the extension is not built'))
