"""Labels are checked before training, kept by checkpoints, and known by name when sampling."""

from __future__ import annotations

import json
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
from support.counting_step import count_only
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.newest import newest_classes
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data import classes
from jaxunet.data.source import ArraySource, Subset, with_class_order
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import train
from jaxunet.training.session import Session


@pytest.fixture(scope='module', autouse=True)
def _counting():
    with unittest.mock.patch.object(Session, 'compile', count_only):
        yield


def conditional(steps=6, number=2):
    return tiny_config(
        model={'num_classes': number, 'label_dropout': 0.1},
        data={'path': 'herd'},
        parallel={'devices': 1},
        train={'steps': steps},
    )


def herd(*names):
    rng = np.random.default_rng(0)
    labels = np.arange(16) % len(names) if names else None
    return ArraySource(
        'herd', rng.integers(0, 256, (16, 8, 8, 1), np.uint8), (8, 8, 1), labels, names
    )


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A finished run; training it again makes no step."""
    workdir = tmp_path_factory.mktemp('run')
    train(conditional(), workdir, herd('bull', 'cow'))
    return workdir


def test_a_run_keeps_the_names_of_its_classes(run):
    assert (
        checkpoint.read(run).facts.class_names
        == load_model(str(run)).class_names
        == ('bull', 'cow')
    )
    assert train(conditional(), run, herd('bull', 'cow')) == 6


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (
            ('cow', 'bull'),
            r'holds a run with other classes; label 0 would be cow instead of bull:\n'
            r'  labels 0, 1, ... of the run: bull, cow\n  labels 0, 1, ... of herd: cow, bull\n'
            r'Give it the same names in the same order, here with '
            r'--config.data.classes="\(\'bull\', \'cow\'\)", choose another --workdir',
        ),
        (
            ('bull', 'calf'),
            r'label 1 would be calf instead of cow:\n(.*\n)*.*in the same order, choose another '
            r'.*--config.init_from=',
        ),
    ],
)
def test_other_classes_are_refused(run, names, message):
    with pytest.raises(UserError, match=message):
        train(conditional(), run, herd(*names))


@pytest.mark.long
def test_a_checkpoint_without_names_goes_on_and_gets_them(tmp_path):
    """Earlier versions kept none."""
    config = conditional()
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=3)
    checkpoints.save(6, fresh_state(config).replace(step=np.int32(6)), config)
    checkpoints.wait()
    checkpoints.close()
    meta = tmp_path / 'checkpoints' / '6' / 'meta' / 'metadata'
    saved = json.loads(meta.read_text())
    assert saved.pop('class_names') == []
    del saved['meta_checksum']
    meta.write_text(json.dumps(saved))
    assert checkpoint.read(tmp_path).facts.class_names == ()
    assert train(conditional(steps=7), tmp_path, herd('cow', 'bull')) == 7
    assert checkpoint.read(tmp_path).facts.class_names == ('cow', 'bull')


def test_an_old_run_keeps_its_table(tmp_path, told):
    """Earlier versions sorted numbered folders as text."""
    train(conditional(), tmp_path, herd('10', '2'))
    assert train(conditional(), tmp_path, herd('2', '10')) == 6
    assert checkpoint.read(tmp_path).facts.class_names == ('10', '2')
    assert newest_classes(tmp_path) == ('10', '2')
    assert 'classes of the labels: 0=10, 1=2' in told


def test_the_labels_of_an_old_run():
    now = tuple(map(str, range(12)))
    old = tuple(sorted(now))
    source = herd(*now)
    source.held_out = Subset(source, np.arange(4))
    kept = with_class_order(source, old)
    assert kept.class_names == kept.held_out.class_names == old
    for one, before in ((kept, source), (kept.held_out, source.held_out)):
        assert [old[i] for i in one.labels] == [now[i] for i in before.labels]
    np.testing.assert_array_equal(kept.load(np.arange(16)), source.load(np.arange(16)))
    for names in ((), now, old[::-1], ('a', 'b')):
        assert with_class_order(source, names) is source


def test_the_table_shows_every_label():
    assert classes.label_table(('bull', 'cow\n')) == 'classes of the labels: 0=bull, 1=cow\\n'
    assert classes.label_table([str(i) for i in range(500)]).endswith(', 199=199, ... (500 in all)')


def test_classes_without_images_are_named(warned):
    source = herd(*map(str, range(11)))
    source.labels = 1 + source.labels % 10
    classes.check_classes(conditional(number=11), source)
    assert warned == [
        'herd: no images of the classes 0 (label 0): they will not be trained, but are drawn '
        'unless --class_labels leaves them out'
    ]
    with pytest.raises(UserError, match=r'11 classes; its labels begin at 1, so that label 0 has'):
        classes.check_classes(conditional(number=10), source)


def test_names_that_change_no_label_may_come_and_go(tmp_path):
    def kept(saved, now, number=3):
        return classes.keep_classes(saved, now, conditional(number=number), tmp_path)

    assert (
        kept(('bull', 'cow'), ('bull', 'cow', 'yak'))
        == kept(('bull', 'cow', 'yak'), ('bull',))
        == ('bull', 'cow', 'yak')
    )
    unconditional = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0})
    assert classes.keep_classes((), ('bull', 'cow'), unconditional, tmp_path) == ()


def test_classes_that_the_model_does_not_use_are_named(told):
    unconditional = tiny_config(
        model={'num_classes': 0, 'label_dropout': 0.0}, data={'path': 'herd'}
    )
    for names in ((), ('cow',), ('bull', 'cow')):
        classes.check_classes(unconditional, herd(*names))
    (line,) = told
    assert line.startswith('the 2 classes of herd (bull, cow) are not used; model.num_classes=2, ')


def test_messages_hold_no_password_of_a_url():
    config = conditional().replace(data={'path': 'https://me:secret@host/herd.zip?token=secret'})
    with pytest.raises(UserError, match=r'but https://host/herd\.zip has no class labels') as error:
        classes.check_classes(config, herd())
    assert 'secret' not in str(error.value)


def test_classes_and_the_table_of_the_model(warned):
    source = herd('bull', 'cow')
    classes.check_classes(conditional(number=2), source)
    assert not warned
    classes.check_classes(conditional(number=3), source)
    classes.check_classes(conditional(number=10), source)
    assert (
        'model.num_classes: 3, but herd has 2 classes (bull, cow): label 2 has no images and '
        'will not be trained' in warned[0]
    )
    assert (
        'labels 2 to 9 have no images and will not be trained; for a new run, set it to 2'
        in warned[1]
    )
    with pytest.raises(UserError, match=r'model.num_classes: 2, but herd has 3 classes; raise it'):
        classes.check_classes(conditional(number=2), herd('bull', 'cow', 'yak'))
    source = herd()
    with pytest.raises(
        UserError, match=r'herd has no class labels; set it to 0, use class sub-folders'
    ):
        classes.check_classes(conditional(), source)
    source.unlabelled_by = 'x.png lies beside the sub-folders bull, cow'
    with pytest.raises(
        UserError,
        match=r'no class labels, as x.png lies beside the sub-folders bull, cow; mend that, '
        r'or set model.num_classes to 0',
    ):
        classes.check_classes(conditional(), source)


def test_labels_by_number_or_name():
    names = ('bull', 'cow')
    found = [classes.Classes(3, names).label_of(given) for given in ('0', 'cow', 'bull', '2')]
    assert found == [0, 1, 0, 2]
    with pytest.raises(
        UserError,
        match=r"whole numbers from 0 to 2 or names \(0 bull, 1 cow\), found 'cwo'; did you mean "
        r'\"cow\"\?',
    ):
        classes.Classes(3, names).label_of('cwo')
    with pytest.raises(UserError, match=r"whole numbers from 0 to 2, found 'cow'"):
        classes.Classes(3).label_of('cow')


def test_a_run_cannot_take_other_labels_of_the_same_names():
    def labelled(labels, number=2):
        model = {'num_classes': number, 'label_dropout': 0.1 if number else 0.0}
        base = tiny_config(model=model)
        return base.replace(data={'labels': labels})

    for before, after in [('fine', 'coarse'), ('', 'coarse'), ('coarse', '')]:
        with pytest.raises(UserError, match=r'another config:\n.*data\.labels: '):
            check_resumable(labelled(before), labelled(after), Path('run'))
    assert check_resumable(labelled(''), labelled('folders'), Path('run'))
    assert check_resumable(labelled('fine', 0), labelled('coarse', 0), Path('run'))
