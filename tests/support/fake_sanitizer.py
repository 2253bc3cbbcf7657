"""A program in place of compute-sanitizer, for tests of what runs it without a GPU."""

from __future__ import annotations

import json
import pathlib
import runpy
import stat
import sys

import pytest

from jaxunet.runtime.rows import Row
from tools.sanitizer import sanitizer, sanitizer_run
from tools.sanitizer.sanitizer import Piece

LINEAR = 'xla_ffi/linear/parity_test.py'
# Runs no tests, but reports them as pytest_progress does. It reports them all at once, so that a
# slow machine does not make it look like a program that hangs. It holds its ports while it runs.
FAKE = """\
#!{python}
import os, pathlib, signal, socket, sys, time
flags = sys.argv[1:]
if flags == ['--version']:
    print('NVIDIA (R) Compute Sanitizer', 'Version 2025.3.0', sep='\\n')
    raise SystemExit
tool = flags[flags.index('--tool') + 1]
tests = [flag for flag in flags if '::' in flag]
kernels = os.environ['JAXUNET_KERNELS']
assert '--xla_gpu_autotune_level=0' in os.environ['XLA_FLAGS']
with open({log!r}, 'a') as log:
    log.write(f'{{tool}} {{kernels}} {{len(tests)}}\\n')
first, most = (int(flags[flags.index(name) + 1]) for name in ('--port', '--max-connections'))
taken = [socket.socket() for _ in range(most)]
for number, one in enumerate(taken):
    one.bind(('127.0.0.1', first + number))
with open({ports!r}, 'a') as log:
    log.write(f'{{first}} {{most}}\\n')
together = pathlib.Path({together!r})
stop = time.monotonic() + 60
while together.exists() and time.monotonic() < stop:
    if len(pathlib.Path({ports!r}).read_text().splitlines()) >= int(together.read_text()):
        break
    time.sleep(0.05)
hangs = pathlib.Path({hangs!r})
hangs = hangs.read_text().split() if hangs.exists() else []
crashes = pathlib.Path({crashes!r})
crashing = crashes.read_text().split() if crashes.exists() else []
begun = [name for test in tests if (name := test.rpartition('::')[2]) in crashing]
crash = next(iter(begun), 'end' if 'end' in crashing else None)
events = []
for test in tests if 'start' not in hangs else ():
    events.append(f'begin {{test}}\\n')
    if test.rpartition('::')[2] in (*hangs, crash):
        break
    events.append(f'end {{test}}\\n')
if events:
    (pathlib.Path(os.environ['SANITIZER_PROGRESS']) / 'tests').write_text(''.join(events))
print('========= COMPUTE-SANITIZER', flush=True)
if crash:
    crashing.remove(crash)
    crashes.write_text(' '.join(crashing))
    print('the last words', flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if len(events) < 2 * len(tests) or 'end' in hangs or tool in hangs:
    time.sleep(60)
errors = int(tool == 'initcheck' and kernels == 'fastest')
if errors:
    print('========= Uninitialized __global__ memory read of size 2 bytes')
print(f'{{len(tests)}} passed in 1.00s')
if tool == 'racecheck':
    print('========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)')
else:
    print(f'========= ERROR SUMMARY: {{errors}} errors')
raise SystemExit(9 * errors)
"""


class World:
    """A folder with a sanitizer, and the script that runs it on five tests, t0 to t4."""

    def __init__(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = tmp_path, monkeypatch
        self.log, self.hangs = tmp_path / 'log.txt', tmp_path / 'hangs.txt'
        self.crashes = tmp_path / 'crashes.txt'
        self.ports_log, self.wanted = tmp_path / 'ports.txt', tmp_path / 'together.txt'
        self.program = tmp_path / 'bin' / sanitizer.SANITIZER
        self.program.parent.mkdir()
        self.program.write_text(
            FAKE.format(
                python=sys.executable,
                log=str(self.log),
                hangs=str(self.hangs),
                crashes=str(self.crashes),
                ports=str(self.ports_log),
                together=str(self.wanted),
            )
        )
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv('PATH', str(self.program.parent), prepend=':')
        monkeypatch.setattr(sanitizer, 'OPS', {'cuda linear': sanitizer.Op(LINEAR, 'x')})
        self.tests = [f'{LINEAR}::t{i}' for i in range(5)]
        monkeypatch.setattr(sanitizer.pieces, '__defaults__', (lambda op: self.tests,))
        self.script = runpy.run_path(str(sanitizer.ROOT / 'tools/sanitizer/sanitize.py'))
        self.origin = {'git': 'abc', 'device': 'some GPU', 'driver': '1', 'sanitizer': 'tool 1'}
        monkeypatch.setitem(self.script['main'].__globals__, 'provenance', lambda: self.origin)
        self.output = tmp_path / 'rows.jsonl'

    def with_pytest(self, program: str, tests: str, *names: str) -> Piece:
        """Makes `program` the sanitizer, which runs pytest; returns a piece of these tests."""
        self.program.write_text(program.format(python=sys.executable))
        self._monkeypatch.setattr(sanitizer_run, 'ROOT', self._folder)
        (self._folder / 'test_some.py').write_text(tests)
        (self._folder / 'pytest.ini').write_text('[pytest]')
        found = tuple(f'test_some.py::{name}' for name in names)
        return Piece('memcheck', 'cuda linear', 'portable', 0, found, len(found), 'digest')

    def run(self, *flags: str) -> int:
        """Runs the script in pieces of two tests; returns its exit status."""
        return self.script['main'](['--output', str(self.output), '--size', '2', *flags])

    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def calls(self) -> list[str]:
        """Returns the sanitizer's calls since the last time: tool, kernels and number of tests."""
        found = self.log.read_text().split('\n')[:-1] if self.log.exists() else []
        self.log.write_text('')
        return found

    def ports(self) -> list[range]:
        """Returns the ports of each call."""
        calls = [map(int, line.split()) for line in self.ports_log.read_text().splitlines()]
        return [range(first, first + most) for first, most in calls]

    def wait_for(self, calls: int) -> None:
        """Makes calls wait until this number of them have begun, or for a minute."""
        self.wanted.write_text(str(calls))

    def hang(self, *where: str) -> None:
        """Makes these tests hang; 'start' or 'end' hang a piece there, a tool's name at its end.

        Without arguments, nothing hangs any more.
        """
        self.hangs.write_text(' '.join(where))

    def crash(self, *where: str) -> None:
        """Makes a signal end the program in these tests, or at its 'end'.

        Each crashes as often as it is named. Only for one piece at a time.
        """
        self.crashes.write_text(' '.join(where))
