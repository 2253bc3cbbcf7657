"""Runs the tests on several versions of JAX, each in a virtual environment of its own.

    python tools/matrix/run.py 0.10.2 0.11.2@python3.13 0.12.0.1@python3.13
    JAXUNET_CUDA=cpu python tools/matrix/run.py 0.12.0.1@python3.13 --parts network,pallas

VERSION@PYTHON names the interpreter, default this one: JAX 0.11 needs Python 3.12 or later. An
environment is made in `--venvs` if it is missing, by `pip install -e ".[test]" jax==VERSION`, so it
has what JAXUNET_CUDA says. `PARTS` are the parts of the suite, by default all; `--short` leaves the
tests marked `long` out. A row for each version and part is appended to `--output` as soon as it is
measured. Append that file to docs/results/matrix/rows.jsonl when all is done: a test compares these
rows with the table of docs/results.md, which `python tools/docs/write.py` makes. The exit
status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from jaxunet.runtime import rows  # noqa: E402

PARTS = {
    'network': ('tests/ops', 'tests/model', 'tests/diffusion', 'tests/sampling'),
    'pallas': ('pallas_kernels',),
    'cuda': ('xla_ffi',),
    'training': (
        'tests/training',
        'tests/golden',
        'tests/checkpoint',
        'tests/runtime',
        'tests/faults',
        'tests/soak',
    ),
    'files': ('tests/config', 'tests/data', 'tests/weights', 'tests/metrics', 'tests/fuzz'),
    'commands': (
        'tests/commands',
        'tests/benchmark',
        'tests/profile',
        'tests/sweep',
        'tests/compare',
        'tests/docs',
        'tests/gpu',
        'tests/matrix',
        'tests/sanitizer',
        'tests/support',
        'tests/test_packaging.py',
        'tests/test_prose.py',
        'tests/test_source_length.py',
    ),
}
VERSIONS = 'from jaxunet.runtime import rows; import json; print(json.dumps(rows.versions()))'


def main() -> int:
    """Runs the tests on every version; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('versions', nargs='+', metavar='VERSION[@PYTHON]')
    parser.add_argument('--venvs', type=pathlib.Path, default=ROOT / 'build/matrix')
    parser.add_argument('--parts', default=','.join(PARTS), help='default: %(default)s')
    parser.add_argument('--short', action='store_true', help='without the long tests')
    parser.add_argument('--workers', default='2', help="pytest's -n")
    parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'build/matrix/rows.jsonl')
    options = parser.parse_args()
    parts = options.parts.split(',')
    if unknown := set(parts) - set(PARTS):
        parser.error(f'--parts: expected some of {", ".join(PARTS)}, found {", ".join(unknown)}')
    commit = rows.git_sha()  # before the rows make the checkout dirty
    failed = False
    for version in options.versions:
        python = environment(version, options.venvs)
        for part in parts:
            row = run(python, part, options.workers, 'not long' if options.short else '')
            rows.append(options.output, row | {'git': commit})
            failed |= row['failed'] > 0
            print(f'{version}, {part}: {row["failures"] or "all passed"}', flush=True)
    return int(failed)


def environment(version: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the interpreter of the environment of `VERSION[@PYTHON]`; makes it if necessary."""
    jax, _, interpreter = version.partition('@')
    python = folder.absolute() / f'jax-{jax}' / 'bin/python'
    if not python.exists():
        subprocess.run(
            [interpreter or sys.executable, '-m', 'venv', str(python.parents[1])], check=True
        )
    # Also for an environment that exists: its copy of jaxunet may be of another checkout.
    subprocess.run(
        [python, '-m', 'pip', 'install', '-q', '-e', f'{ROOT}[test]', f'jax=={jax}'], check=True
    )
    return python


def run(python: pathlib.Path, part: str, workers: str, marks: str) -> rows.Row:
    """Returns the row of one part of the tests, run with this interpreter, without its commit.

    Args:
      marks: pytest's -m.
    """
    variables = {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    printed = subprocess.run(
        [python, '-c', VERSIONS],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    arguments = ['-q', '-n', workers, '-m', marks, *PARTS[part]]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / 'report.xml'
        began = time.perf_counter()
        done = subprocess.run(
            [python, '-m', 'pytest', *arguments, f'--junitxml={report}'],
            cwd=ROOT,
            env=os.environ | variables,
            check=False,
        )
        seconds = time.perf_counter() - began
        if not report.exists():
            raise SystemExit(f'pytest ended with exit status {done.returncode} and no report')
        suites = list(ElementTree.parse(report).iter('testsuite'))
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ('tests', 'failures', 'errors', 'skipped')
    }
    failures = [
        f'{case.get("classname")}::{case.get("name")}'
        for suite in suites
        for case in suite.iter('testcase')
        if case.find('failure') is not None or case.find('error') is not None
    ]
    failed = count['failures'] + count['errors']
    return {
        'kind': 'matrix',
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'device': 'cpu',
        'versions': json.loads(printed.stdout),
        'command': f'python -m pytest {shlex.join(arguments)}',
        'part': part,
        'long_tests': not marks,
        'passed': count['tests'] - failed - count['skipped'],
        'skipped': count['skipped'],
        'failed': failed,
        'failures': failures,
        'seconds': round(seconds, 1),
    }


if __name__ == '__main__':
    sys.exit(main())
