"""Without hypothesis, as on a GPU machine that has no extra `test`, its tests skip."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

DRAWN = ('test_configs.py', 'test_handlers.py', 'test_readers.py')  # what imports hypothesis


class Missing(pytest.Module):
    """A test file that cannot be imported."""

    def collect(self):
        pytest.skip('needs hypothesis: pip install -e ".[test]"', allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: pathlib.Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Skips the files of `DRAWN` where hypothesis is missing."""
    if module_path.name in DRAWN and importlib.util.find_spec('hypothesis') is None:
        return Missing.from_parent(parent, path=module_path)
    return None
