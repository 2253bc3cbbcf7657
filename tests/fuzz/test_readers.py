"""Damaged files: every reader reads them, or refuses them in one message, in bounded time and
memory, and writes nothing outside the folder.
"""

import pathlib
import tempfile

import pytest
from support.bounded import outcome
from support.fuzzing import fuzz
from support.mutations import damage, damages
from support.readers import READERS

# A warning is no exception for users.
pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.mark.parametrize('name', READERS)
def test_damaged_files(name, tmp_path):
    reader = READERS[name]
    parts = reader.parts()

    def check(changes):
        # A folder of its own for each, because a reader may have mapped the file before.
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            path = pathlib.Path(folder, reader.file)
            path.write_bytes(damage(parts, reader.pack, changes))
            told = outcome(reader.read, path)
            assert [str(entry) for entry in tmp_path.iterdir()] == [folder]
        return told

    assert check([]) == ''
    fuzz(name, reader.cases, damages(), check)
