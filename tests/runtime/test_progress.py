"""Progress bars: their descriptions."""

import io
import sys

import pytest

from jaxunet.runtime.progress import progress_bar


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
