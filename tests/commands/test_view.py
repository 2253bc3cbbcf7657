"""The overview of runs, as a browser and a stranger ask for it."""

from __future__ import annotations

import http.client
import threading

import pytest
from support.browser import dumped

from jaxunet.training.overview import make_server, overview, runs


@pytest.fixture
def folder(tmp_path):
    """Two runs, one of which has a page and a grid, and files that are none of the server's."""
    first, second = tmp_path / 'a', tmp_path / 'group' / 'b <i>'
    for run in (first, second):
        (run / 'samples').mkdir(parents=True)
        (run / 'metrics.csv').write_text('step,loss\n7,0.512345678\n')
    (first / 'index.html').write_text('<title>a</title>')
    (first / 'samples' / 'step_0000007.png').write_bytes(b'png')
    (first / 'secret.txt').write_text('secret')
    (tmp_path.parent / 'index.html').write_text('outside')
    (first / 'samples' / 'step_1.png').symlink_to(first / 'secret.txt')
    return tmp_path


@pytest.fixture
def ask(folder):
    """Asks a server of the folder for a path; returns the status and the answer."""
    with make_server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def asked(path, host='localhost:8000'):
            connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=20)
            connection.putrequest('GET', path, skip_host=True)
            connection.putheader('Host', host)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        asked.port = server.server_port
        yield asked
        server.shutdown()


def test_all_runs_are_found(folder):
    assert {run.name for run in runs(folder)} == {'a', 'b <i>'}
    assert [run.name for run in runs(folder / 'a')] == ['a']
    page = overview(folder)
    assert '2 runs' in page
    assert 'b &lt;i&gt;' in page
    assert 'step 7, loss 0.5123<' in page


@pytest.mark.parametrize(
    ('path', 'status'),
    [
        ('/', 200),
        ('/a/index.html', 200),
        ('/a/samples/step_0000007.png', 200),
        ('/a/secret.txt', 404),
        ('/a/metrics.csv', 404),
        ('/../index.html', 404),
        ('/%2e%2e/index.html', 404),
        ('//index.html', 404),
        ('/nothing/index.html', 404),
    ],
)
def test_only_pages_and_grids_are_served(ask, path, status):
    assert ask(path)[0] == status


def test_a_link_out_of_the_names_is_not_served(ask):
    assert 'secret' not in ask('/a/samples/step_1.png')[1]


def test_another_name_of_this_machine_is_refused(ask):
    assert ask('/', host='evil.example:80')[0] == 403
    assert ask('/', host='')[0] == 403


def test_a_browser_shows_the_overview(ask):
    shown = dumped(f'http://127.0.0.1:{ask.port}/')
    assert '2 runs' in shown
    assert 'href="/a/index.html"' in shown
