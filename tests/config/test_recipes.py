"""Recipes have names, also where there is no checkout."""

import pathlib

import pytest
from support.configs import CONFIGS

from jaxunet.config import recipes
from jaxunet.runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_of_configs_is_a_recipe():
    assert recipes.names() == sorted(path.stem for path in CONFIGS)
    assert len(recipes.names()) >= 5


@pytest.mark.parametrize('named', ['images', 'configs/images.py', './configs/images.py'])
def test_a_recipe_is_found_without_a_checkout(elsewhere, named):
    assert recipes.located(named) == str(ROOT / 'configs/images.py')
    assert recipes.located(f'{named}:small') == f'{ROOT}/configs/images.py:small'


def test_a_file_is_itself(elsewhere):
    file = elsewhere / 'configs/images.py'
    file.parent.mkdir()
    file.write_text('')
    assert recipes.located('configs/images.py') == 'configs/images.py'
    assert recipes.located(str(file)) == str(file)
    assert recipes.located('images') == str(ROOT / 'configs/images.py')


def test_a_wheel_has_its_own_folder(tmp_path, monkeypatch):
    for file in ('jaxunet/config/recipes.py', 'jaxunet/configs/mine.py', 'configs/other.py'):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('')
    monkeypatch.setattr(recipes, '__file__', str(tmp_path / 'jaxunet/config/recipes.py'))
    assert recipes.names() == ['mine']
    assert recipes.located('mine') == str(tmp_path / 'jaxunet/configs/mine.py')


@pytest.mark.parametrize('named', ['imges', 'imges.py', 'configs/imges.py', 'elsewhere/images.py'])
def test_an_unknown_name_lists_the_recipes(elsewhere, named):
    with pytest.raises(UserError) as error:
        recipes.located(named)
    text = str(error.value)
    assert text.startswith(f'--config: no file or recipe {named}; did you mean "images')
    assert text.endswith('; recipes: cifar10, digits, edm_cifar10, elephants64, imagenet64, images')
