"""Progress bars: their descriptions, and log messages beside them."""

import io
import logging
import sys
import types

import pytest

from jaxunet.runtime import progress
from jaxunet.runtime.progress import hidden, progress_bar, write_above_bars


@pytest.mark.parametrize('total', [40, None])
@pytest.mark.parametrize('text', ['training', 'digits:', 'cifar10_test: '])
@pytest.mark.parametrize('later', [True, False])
def test_one_colon_after_the_description(monkeypatch, total, text, later):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    with progress_bar(total=total, unit='step', **({} if later else {'desc': text})) as bar:
        if later:
            bar.set_description(text)
        bar.update(40)
    last = sys.stderr.getvalue().split('\r')[-1]
    rest = '100%|' if total else '40step ['
    assert last.startswith(f'{text.rstrip(": ")}: {rest}')


def test_a_bar_without_a_description_has_no_colon(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    with progress_bar(total=1) as bar:
        bar.update()
    assert sys.stderr.getvalue().split('\r')[-1].startswith('100%|')


def test_a_bar_that_is_off_prints_nothing(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    with progress_bar(total=1, disable=True) as bar:
        bar.set_description('training')
        bar.update()
    assert sys.stderr.getvalue() == ''


def test_a_message_begins_on_a_line_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    handler = logging.StreamHandler(sys.stderr)
    write_above_bars(handler)
    record = logging.makeLogRecord({'msg': 'the sampler was ready'})
    with progress_bar(total=40, desc='training') as bar:
        handler.handle(record)
        bar.update(40)
    bar, *lines = sys.stderr.getvalue().split('\r')
    assert 'the sampler was ready\n' in lines
    assert lines[-1].startswith('training: 100%|')  # the bar is drawn again below it


def test_hidden_bars_print_nothing(capfd):
    with hidden():
        bar = progress_bar(total=2, desc='training')
    with bar:
        bar.write('a line above it')
        bar.update(2)
    assert capfd.readouterr() == ('', '')
    with progress_bar(total=2) as shown:
        shown.write('a line above it')
    assert 'a line above it' in capfd.readouterr().out


class ZMQInteractiveShell:
    """Stands for the shell of a notebook's kernel."""


def test_a_notebook_has_a_bar_that_moves(monkeypatch, capfd):
    """Not one that prints every 30 s, as for a log file."""
    ipython = types.ModuleType('IPython')
    ipython.get_ipython = ZMQInteractiveShell
    monkeypatch.setitem(sys.modules, 'IPython', ipython)
    monkeypatch.setattr(progress, '_notebook_bar', lambda: progress._Bar)  # without ipywidgets
    with progress_bar(total=2, desc='training') as bar:
        assert bar.mininterval == progress.NOTEBOOK_SECONDS
        bar.update(2)
    assert '100%' in capfd.readouterr().err
