"""Runs the small cases of every kernel under compute-sanitizer: this GPU's and portable kernels.

    python3 tools/sanitizer/sanitize.py [--tools memcheck,racecheck,synccheck,initcheck]
      [--ops 'cuda conv3x3,pallas attention'] [--kernels fastest,portable] [--seconds 3600]
      [--limit 600] [--stall 90] [--start 120] [--size 20] [--processes 1]
      [--output sanitizer.jsonl] [--times OTHER_ROWS] [--again]
    python3 tools/sanitizer/sanitize.py --table docs/results/sanitizer/rows.jsonl
    python3 tools/sanitizer/sanitize.py --check docs/results/sanitizer/rows.jsonl

A piece is at most `--size` tests that run in one process. Each piece appends a row to `--output`,
and the table of all its rows is printed at the end. No piece begins after `--seconds`, and none
takes longer than `--limit`. The same command continues where an earlier one ended: it skips cases
that have a row of the same code, unless `--again` is given. The code is a digest of the sources
that the op's tests run, of the device and of the versions, so rows stay valid after a commit that
changes none of these.

Pieces without an earlier row run first. The others follow in the order of the seconds that they
took in the rows of `--output` and `--times`, longest first. Pieces that took too long, crashed or
stalled run last. If the GPU's memory was too small for a piece, the next run tries it again; use
fewer `--processes` then. For a piece with errors, the tool's reports are printed before its line.
Simultaneous pieces use different ports, also those of another run on the same machine. The exit
status is 1 if the newest row of a case says that a tool found an error, that a test failed, or that
its piece did not end by itself.

A piece stalls if a test takes longer than `--stall`, if the first test has not begun after
`--start`, or if the process goes on for `--stall` after the last test. Its Python stacks and its
busiest threads are printed, and it is stopped. The test gets a row with the status `stalled`, and
the tests before and after it run again as separate pieces. The stalled test is tried again only in
the next run, and last.

A piece crashes if the tool or pytest ends without its summary, and the tool counted no errors. The
end of its output and its exit status are printed. The test that was running gets a row with the
status `crashed`, and the tests before and after it run again, as above. After all other pieces, the
crashed test is tried once more, alone; its newest row counts. If no test was running, all of this
holds for the whole piece.

`--check` prints which cases have no row for the current sources, or a row with errors; the exit
status is 1 if there are any. `--tools`, `--ops` and `--kernels` limit what it looks at.

Needs compute-sanitizer of the CUDA toolkit on PATH, and a checkout built from its current sources
(tools/gpu/build.sh). `--table` and `--check` need neither, and no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from support.origin import origin  # noqa: E402

from jaxunet.runtime import rows  # noqa: E402
from jaxunet.runtime.errors import UserError  # noqa: E402
from tools.sanitizer import sanitizer, sanitizer_output, sanitizer_rows, sanitizer_run  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pieces that the flags ask for; returns the exit status."""
    options = parse_flags(argv)
    if options.table is not None:
        print(sanitizer_rows.table(options.table))
        return 0
    if options.check is not None:
        return check(options)
    if shutil.which(sanitizer.SANITIZER) is None:
        print(
            f'error: {sanitizer.SANITIZER} is not on PATH; it is in the bin folder of the CUDA '
            'toolkit',
            file=sys.stderr,
        )
        return 2
    stop = time.monotonic() + options.seconds
    known = rows.read(options.output) if options.output.exists() else []
    origin = provenance()
    codes = {op: sanitizer.code(op, origin) for op in options.ops}
    command = shlex.join(['python3', 'tools/sanitizer/sanitize.py', *(argv or sys.argv[1:])])
    wanted = sanitizer.pieces(options.tools, options.ops, options.kernels, options.size)
    left = sanitizer_rows.left(wanted, known, {} if options.again else codes, options.times)
    waiting = sanitizer_rows.in_order(left, options.times + known)
    states: dict[tuple[str, str, str, int], str] = {}  # newest status of each case
    for piece, report, seconds in run_all(waiting, options, stop):
        row = {
            'kind': 'sanitizer',
            **origin,
            'code': codes[piece.op],
            **piece.row(),
            **report._asdict(),
            'seconds': seconds,
            'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            'command': command,
        }
        rows.append(options.output, row)
        cases = [(piece.tool, piece.op, piece.kernels, case) for case in piece.cases()]
        states |= dict.fromkeys(cases, report.status)
        tell(piece, report, seconds)
    if options.output.exists():
        print(sanitizer_rows.table(rows.read(options.output)))
    if waiting:
        print(f'{len(waiting)} pieces were not begun; the same command runs them')
    return 1 if any(state != 'clean' for state in states.values()) else 0


Result = tuple[sanitizer.Piece, sanitizer_output.RunResult, float]


def run_all(
    waiting: list[sanitizer.Piece], options: argparse.Namespace, stop: float
) -> Iterator[Result]:
    """Runs pieces, and the parts of those that stall or crash; yields each result as it comes.

    Removes the pieces that begin from `waiting`; pieces for which there is no time stay there. The
    tests before and after one that stalled or crashed are the next pieces. If a test in the second
    of these pieces stalls or crashes, too, the tests after it come last, because all tests of the
    op may do so. A crashed test is tried once more when no other piece waits.
    """
    running: set[concurrent.futures.Future[Result]] = set()
    after_another: set[sanitizer.Piece] = set()
    crashed: list[sanitizer.Piece] = []  # wait to be tried again
    tried_again: set[sanitizer.Piece] = set()

    def work(piece: sanitizer.Piece, seconds: float) -> Result:
        limits = sanitizer_run.Limits(min(options.limit, seconds), options.stall, options.start)
        return piece, *sanitizer_run.run(piece, limits)

    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        while True:
            while (waiting or crashed) and len(running) < options.processes:
                seconds = stop - time.monotonic()
                if seconds <= 0:
                    break
                running.add(pool.submit(work, (waiting or crashed).pop(0), seconds))
            if not running:
                waiting += crashed
                return
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                piece, report, seconds = future.result()
                part, before, after = sanitizer_run.divide(piece, report)
                if after is not None:
                    waiting.insert(len(waiting) if piece in after_another else 0, after)
                    after_another.add(after)
                if before is not None:
                    waiting.insert(0, before)
                if report.status == 'crashed' and part not in tried_again:
                    crashed.append(part)
                    tried_again.add(part)
                yield part, report, seconds


def check(options: argparse.Namespace) -> int:
    """Prints the gaps in rows for the current sources; returns the exit status."""
    # A piece for each tool, op and set of kernels, with all cases.
    wanted = list(sanitizer.pieces(options.tools, options.ops, options.kernels, sys.maxsize))
    if missing := sanitizer_rows.gaps(wanted, options.check):
        print(*missing, sep='\n')
        return 1
    runs = sum(len(piece.tests) for piece in wanted)
    print(f'all {runs} runs of a case under a tool have rows for these sources, without errors')
    return 0


def tell(piece: sanitizer.Piece, report: sanitizer_output.RunResult, seconds: float) -> None:
    """Prints the line of a piece that has ended, and its reports."""
    print(
        f'{piece.title()}: {report.ending()}, {report.passed} passed, {seconds:.0f} s',
        *report.reports,
        sep='\n  ',
        flush=True,
    )


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; ends the program with a message if one has an unknown value."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n\n', maxsplit=1)[0])

    def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            names = [name.strip() for name in text.split(',')]
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f'expected some of {", ".join(known)}, found {name!r}'
                    )
            return names

        return read

    def rows_of(path: str) -> list[rows.Row]:
        try:
            return rows.read(path)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    for flag, known in (
        ('tools', sanitizer.TOOLS),
        ('ops', tuple(sanitizer.OPS)),
        ('kernels', sanitizer.KERNELS),
    ):
        parser.add_argument(f'--{flag}', type=some_of(known), default=list(known))
    parser.add_argument('--seconds', type=float, default=3600, help='no piece begins after this')
    parser.add_argument('--limit', type=float, default=600, help='of a piece, in seconds')
    parser.add_argument(
        '--stall', type=float, default=90, help='of a test, in seconds; then its piece is stopped'
    )
    parser.add_argument(
        '--start', type=float, default=120, help='until the first test of a piece, in seconds'
    )
    parser.add_argument('--size', type=int, default=20, help='tests of a piece')
    parser.add_argument('--processes', type=int, default=1, help='pieces at the same time')
    parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('sanitizer.jsonl'))
    parser.add_argument('--again', action='store_true', help='run pieces that have rows, too')
    for flag, default, told in (
        ('times', [], 'more rows that say how long pieces take'),
        ('table', None, 'print the table of these rows, and end'),
        ('check', None, 'print what these rows lack, and end'),
    ):
        parser.add_argument(f'--{flag}', type=rows_of, metavar='FILE', default=default, help=told)
    return parser.parse_args(argv)


def provenance() -> rows.Row:
    """Returns the fields that describe the origin of rows."""
    version = subprocess.run(
        [sanitizer.SANITIZER, '--version'], capture_output=True, text=True, check=False
    )
    numbers = [line for line in version.stdout.splitlines() if line.startswith('Version')]
    told = numbers[0].removeprefix('Version').strip() if numbers else 'of unknown version'
    return origin(ROOT, JAXUNET_KERNELS='') | {
        'nvcc': nvcc(),
        'sanitizer': f'compute-sanitizer {told}',
    }


def nvcc() -> str | None:
    """Returns the version of the nvcc that the build finds on this machine; None without one."""
    script = ROOT / 'xla_ffi/build_tools/nvcc.py'
    printed = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not printed:
        return None
    told = subprocess.run([printed, '--version'], capture_output=True, text=True, check=True).stdout
    version = re.search(r'\bV([\d.]+)', told)
    return version[1] if version else None


if __name__ == '__main__':
    sys.exit(main())
