"""The parts of the matrix are the whole suite."""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).parents[2]


def test_every_test_file_is_in_one_part():
    parts = runpy.run_path(str(ROOT / 'tools/matrix/run.py'))['PARTS']
    paths = [ROOT / path for part in parts.values() for path in part]
    assert all(path.exists() for path in paths)
    files = [
        file
        for room in ('tests', 'pallas_kernels', 'xla_ffi')
        for pattern in ('test_*.py', 'parity_test.py')
        for file in (ROOT / room).rglob(pattern)
    ]
    assert len(files) > 50
    for file in files:
        assert sum(file.is_relative_to(path) for path in paths) == 1, file
