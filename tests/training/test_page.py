"""The page of a run: its contents, and what a browser shows of it."""

from __future__ import annotations

import json
import logging
import re

import numpy as np
import pytest
from support.browser import dumped

from jaxunet.config import default_config, resolve
from jaxunet.data.images import grid, save_png
from jaxunet.training.held_out import COLUMNS as HELD_OUT
from jaxunet.training.log_file import FILE as LOG
from jaxunet.training.log_file import LogFile, last_start
from jaxunet.training.logs import COLUMNS, FILE
from jaxunet.training.page import FILE as PAGE
from jaxunet.training.page import write_page

CONFIG = resolve(default_config())


@pytest.fixture
def run(tmp_path):
    """A workdir with 20 logged steps, whose held-out loss rises from step 8 on, and two grids."""
    names = [*COLUMNS, *HELD_OUT]
    lines = [','.join(names)]
    for step in range(1, 21):
        row = dict.fromkeys(names, '1')
        row |= {'step': str(step), 'loss': str(1 / step)}
        row |= {n: str(1 + max(step - 8, 0) / 50) for n in HELD_OUT if n.startswith('held')}
        row |= {n: str(1 - step / 100) for n in HELD_OUT if n.startswith('seen')}
        lines.append(','.join(row[name] for name in names))
    (tmp_path / FILE).write_text('\n'.join(lines) + '\n')
    for step in (10, 20):
        pixels = np.full((4, 8, 8, 1), step, np.uint8)
        save_png(tmp_path / 'samples' / f'step_{step:07d}.png', grid(pixels, None))
    return tmp_path


def data(workdir):
    text = (workdir / PAGE).read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_the_page_has_all_of_a_run(run):
    (run / LOG).write_text(
        '### 2026-01-01 10:00:00 jaxunet train --old\n'
        '### 2026-01-02 11:00:00 jaxunet train --config images\nchosen for 60 images: a=1\n'
    )
    write_page(CONFIG, run)
    found = data(run)
    assert found['pictures'] == [
        [10, 'samples/step_0000010.png'],
        [20, 'samples/step_0000020.png'],
    ]
    assert found['curves']['loss'][:2] == [[1, 1.0], [2, 0.5]]
    assert found['step'] == 20
    assert found['turns'][0][0] == 11  # the third rise in a row
    assert found['said'][1] == 'chosen for 60 images: a=1'
    assert 'jaxunet train --config images' in found['commands'].values()
    for length in ('epochs', 'minutes'):
        write_page(CONFIG.replace(train={length: 3.0}), run)
        assert f'resume, or go on with a larger train.{length}' in data(run)['commands']


def test_the_page_needs_no_network(run):
    write_page(CONFIG, run)
    text = (run / PAGE).read_text()
    assert not re.findall(r'(?:src|href)=|https?://|url\(|@import', text)


def test_a_run_before_its_first_row_has_a_page(tmp_path):
    write_page(CONFIG, tmp_path)
    assert data(tmp_path)['step'] == 0


def test_no_name_ends_the_script(run):
    config = CONFIG.replace(data={'path': '</script><b>'})
    write_page(config, run)
    assert data(run)['data'] == '</script><b>'
    assert (run / PAGE).read_text().count('</script>') == 2


def test_a_browser_shows_the_run(run):
    write_page(CONFIG, run)
    shown = dumped((run / PAGE).as_uri())
    assert '<title>' in shown
    assert 'step 20' in shown
    assert shown.count('<polyline') == 5  # loss, held out, seen, images per second, learning rate
    assert 'src="samples/step_0000020.png"' in shown
    assert 'held-out loss has risen 3 times in a row' in shown
    assert '<span>--checkpoint</span>' in shown  # no line ends after its hyphens


def test_the_log_of_a_run(tmp_path):
    logger, log = logging.getLogger('test_log_of_a_run'), LogFile('jaxunet train')
    logger.addHandler(log)
    logger.warning('before the folder is known: %s', 'a\x1b[31m')
    log.open(tmp_path)
    moved = tmp_path / 'moved'
    (tmp_path / LOG).rename(moved)  # the file goes with its folder
    logger.warning('after')
    log.close()
    logger.warning('closed')
    assert not (tmp_path / LOG).exists()
    moved.rename(tmp_path / LOG)
    first, *lines = last_start(tmp_path)
    assert first.endswith('jaxunet train')
    assert lines == ['before the folder is known: a\\x1b[31m', 'after']
