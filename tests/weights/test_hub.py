"""Models of the Hugging Face hub by name, with a library that is not there or stands in for it."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest
from support.diffusers_folders import SMALL, written
from support.weight_cases import random_params, same

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.newest import config_at
from jaxunet.runtime.errors import UserError
from jaxunet.weights import write_folder
from jaxunet.weights.hub import has_no_order


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[tuple[str, Any]]:
    """A library that has one model; returns what is asked of it."""
    asked: list[tuple[str, Any]] = []
    folder = written(tmp_path)

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert '*.json' in allow_patterns
        asked.append((name, revision))
        if name != 'google/ddpm-cifar10-32':
            raise OSError('404 Client Error: Repository Not Found')
        return str(folder)

    fake = types.ModuleType('huggingface_hub')
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, 'huggingface_hub', fake)
    (tmp_path / 'work').mkdir()
    monkeypatch.chdir(tmp_path / 'work')
    return asked


def test_a_name_of_the_hub(hub: list[tuple[str, Any]]) -> None:
    same(load_model('google/ddpm-cifar10-32').params, random_params(SMALL))
    assert config_at('google/ddpm-cifar10-32') == SMALL
    del hub[0]
    load_model('google/ddpm-cifar10-32@267b167')
    assert hub == [('google/ddpm-cifar10-32', None), ('google/ddpm-cifar10-32', '267b167')]
    with pytest.raises(
        UserError, match=r'a/b: .*cannot be downloaded .*404 Client Error.*; if this machi'
    ):
        load_model('a/b')


def test_such_weights_have_no_order_of_their_own(hub: list[tuple[str, Any]]) -> None:
    """So `jaxunet.export --new_attention_order` names the order to write."""
    assert has_no_order('google/ddpm-cifar10-32')
    assert hub == [('google/ddpm-cifar10-32', None)]


def test_a_local_folder_wins(hub: list[tuple[str, Any]]) -> None:
    write_folder('google/ddpm-cifar10-32', random_params(SMALL, 3), SMALL)
    same(load_model('google/ddpm-cifar10-32').params, random_params(SMALL, 3))
    with pytest.raises(UserError, match='google/ddpm-cifar: no such file or folder; did you mean'):
        load_model('google/ddpm-cifar')  # mistyped, in a folder that is here
    for path in ('nowhere', '/a/b', 'a/b/c', './a/b', 'a/..'):
        with pytest.raises(UserError):
            load_model(path)
    assert not hub


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(UserError, match=r"pip install 'jaxunet\[hub\]'") as error:
        load_model('google/ddpm-cifar10-32')
    assert '\n' not in str(error.value)
