"""Fixtures of the tests of weight files."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from support.weight_cases import torch_bytes


@pytest.fixture
def file(tmp_path: pathlib.Path) -> Any:
    """Writes a state dict as torch does; returns its path."""

    def write(state: dict[str, np.ndarray], name: str = 'a.pt') -> pathlib.Path:
        (tmp_path / name).write_bytes(torch_bytes(state))
        return tmp_path / name

    return write
