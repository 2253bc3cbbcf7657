"""Damaged files: every reader reads them, or refuses them in one message, in bounded time and
memory, and writes nothing outside the folder.
"""

import itertools
import shutil

import pytest
from support.bounded import outcome
from support.fuzzing import fuzz
from support.mutations import damage, damages
from support.readers import READERS

# A warning is no exception for users.
pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.mark.parametrize('name', READERS)
def test_damaged_files(name, tmp_path):
    reader, numbers = READERS[name], itertools.count()
    parts = reader.parts()

    def check(changes):
        # A folder of its own for each, because a reader may have mapped the file before.
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        path = folder / reader.file
        path.write_bytes(damage(parts, reader.pack, changes))
        told = outcome(reader.read, path)
        assert list(tmp_path.iterdir()) == [folder]
        shutil.rmtree(folder)
        return told

    assert check([]) == ''
    fuzz(name, 7, damages(), check)
