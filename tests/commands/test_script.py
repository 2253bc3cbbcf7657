"""The console script `jaxunet`: help, version, completion, and the commands it starts."""

import importlib.util
import pathlib
import runpy
import signal
import subprocess
import sys
import time

import pytest
from support.commands import ROOT, python_path

import jaxunet
from jaxunet import __main__ as script
from jaxunet.config import completion
from jaxunet.runtime import interrupt, program

RECIPES = 'cifar10 digits edm_cifar10 elephants64 imagenet64 images'
HEAVY = ('jax', 'flax', 'numpy', 'absl')


def run(*arguments, python=('-m', 'jaxunet')):
    return subprocess.run(
        [sys.executable, *python, *arguments],
        env={'PYTHONPATH': python_path(), 'JAX_PLATFORMS': 'cpu', 'PATH': '/usr/bin:/bin'},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_every_command_has_a_module():
    for name in script.COMMANDS:
        assert importlib.util.find_spec(f'jaxunet.{name}') is not None, name


def test_help_is_one_screen_and_imports_nothing_heavy(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['jaxunet'])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for name in script.COMMANDS:
        assert any(line.startswith(f'  {name} ') for line in lines), name
    loaded = (
        "import sys; sys.argv[1:] = ['--help']; from jaxunet.__main__ import main; main(); "
        f'print([name for name in {HEAVY} if name in sys.modules])'
    )
    start = time.perf_counter()
    out = run(python=('-c', loaded)).stdout
    assert out.splitlines() == [*lines, '[]']
    assert time.perf_counter() - start < 5  # 0.03 s on an idle machine


@pytest.mark.parametrize(
    ('arguments', 'error'),
    [
        (['trian'], 'unknown command \'trian\'; did you mean "train"?; see jaxunet --help'),
        (['--completion', 'fish'], "--completion: expected bash or zsh, found 'fish'"),
        (['--completion'], "--completion: expected bash or zsh, found ''"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['jaxunet', *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f'error: {error}\n'


def test_the_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['jaxunet', '--version'])
    script.main()
    assert capsys.readouterr().out == f'jaxunet {jaxunet.__version__}\n'


def test_a_command_runs_as_its_module_does():
    by_script, by_module = run('prepare_data'), run(python=('-m', 'jaxunet.prepare_data'))
    assert by_script.returncode == by_module.returncode == 2
    assert by_script.stderr == by_module.stderr
    assert 'missing' in by_script.stderr


def test_help_of_a_command_shows_it_as_it_was_started():
    text = run('prepare_data', '--help').stdout
    assert '    jaxunet prepare_data --input X' in text
    assert '--image_size' in text
    assert 'python -m' not in text


@pytest.mark.parametrize(
    ('name', 'texts'),
    [
        ('train', ('--config: Config file', '--workdir', '--restarts')),
        ('view', ('--port',)),
        ('demo', ('--checkpoint',)),
    ],
)
def test_help_starts_without_jax(name, texts):
    """JAX and what builds on it take a second to import, and the flags need none of it."""
    program = (
        'import runpy, sys\n'
        f"sys.argv[:] = [{name!r}, '--help']\n"
        'try:\n'
        f"    runpy.run_module('jaxunet.{name}', run_name='__main__')\n"
        'except SystemExit as end:\n'
        f'    print(end.code, [name for name in {HEAVY[:3]} if name in sys.modules])\n'
    )
    printed = run(python=('-c', program)).stdout
    assert all(text in printed for text in texts)
    assert printed.endswith('\n0 []\n')


def test_ctrl_c_ends_a_command_quietly_while_it_is_imported(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['jaxunet', 'train', '--dry_run'])
    monkeypatch.setattr(program, '_by_script', False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []

    def module(name, **options):
        seen.append((name, signal.getsignal(signal.SIGINT), list(sys.argv), options))

    monkeypatch.setattr(runpy, 'run_module', module)
    try:
        script.main()
        interrupt.raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    options = {'run_name': '__main__', 'alter_sys': True}
    argv = ['jaxunet train', '--dry_run']
    assert seen == [('jaxunet.train', interrupt._end, argv, options)]


COMPLETE = """{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _jaxunet 2> /dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        ("jaxunet ''", ' '.join(script.COMMANDS)),
        ('jaxunet ex', 'export'),
        ("jaxunet train --config ''", RECIPES),
        ('jaxunet train --config i', 'imagenet64 images'),
        ('jaxunet train --config = el', 'elephants64'),  # as bash splits the word
        ('jaxunet train --config =', RECIPES),
        ('jaxunet train --config=el', '--config=elephants64'),  # as zsh leaves it
        ('jaxunet train --config.data.p', '--config.data.path='),
        ('jaxunet train --config.see', '--config.seed='),
        ('jaxunet sample photos', ''),  # files are offered
    ],
)
def test_bash_completes_commands_recipes_and_fields(words, expected, tmp_path):
    text = COMPLETE.format(script=completion.script('bash', script.COMMANDS), words=words)
    done = subprocess.run(
        ['bash', '--norc', '-c', text], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == expected.split(), done.stderr


def test_zsh_reads_the_function_of_bash():
    bash, zsh = (completion.script(shell, script.COMMANDS) for shell in completion.SHELLS)
    assert zsh.startswith('autoload -Uz compinit bashcompinit')
    assert bash.rpartition('\n')[0] in zsh
    assert zsh.endswith('\ncomplete -o nospace -o default -F _jaxunet jaxunet')


def test_pyproject_names_the_script():
    text = pathlib.Path(ROOT / 'pyproject.toml').read_text()
    assert '[project.scripts]\njaxunet = "jaxunet.__main__:main"\n' in text
