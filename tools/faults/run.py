"""Runs cases of faults and appends a row for each to a file of JSON lines.

    PYTHONPATH=.:tests python tools/faults/run.py --seeds 0:1000
    PYTHONPATH=.:tests python tools/faults/run.py --seeds 0:100 --platform cuda --backend cuda \
      --processes 8

Seeds that the file has for this platform and backend are left out, so that the same command goes
on. `--seeds 17` repeats one case; `--kind` names its kind, and is the only way to some kinds. It
needs root for the disks of its own that it mounts; without, their kinds are left out, and it says
so. Kinds of two processes run on CPU devices only, as each would need a GPU of its own. Ends with
status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ['JAX_PLATFORMS'] = 'cpu'  # this process only compares

from support.commands import ROOT

from jaxunet.runtime import rows
from tools.faults.cases import KINDS, MOUNTING, PAIRS, failed, kind_of, run_case
from tools.faults.world import World, can_mount

ROWS = ROOT / 'docs/results/faults/rows.jsonl'


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', required=True, help='FIRST:END, or one')
    parser.add_argument('--kind', choices=KINDS, help='this kind in place of that of the seed')
    parser.add_argument('--platform', default='cpu', help='JAX_PLATFORMS: cpu or cuda')
    parser.add_argument('--backend', default='auto', help='config.backend of the runs')
    parser.add_argument('--minutes', type=float, default=1e6, help='start no case after them')
    parser.add_argument('--output', type=pathlib.Path, default=ROWS)
    parser.add_argument('--processes', type=int, default=1, help='cases at the same time')
    parser.add_argument('--share', type=int, help=argparse.SUPPRESS)  # seeds of one of them
    options = parser.parse_args()
    if options.processes > 1 and options.share is None:
        command = [sys.executable, *sys.argv, '--share']
        shares = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
        return int(any([share.wait() for share in shares]))
    first, _, end = options.seeds.partition(':')
    seeds = range(int(first), int(end or int(first) + 1))[options.share or 0 :: options.processes]
    return cases(seeds, options)


def cases(seeds: range, options: argparse.Namespace) -> int:
    """Runs cases one after the other; returns 1 if one failed."""
    known = rows.read(options.output) if options.output.exists() else []
    done = {
        (row['seed'], row['kind'])
        for row in known
        if (row['platform'], row['backend']) == (options.platform, options.backend)
    }
    left_out = left_out_here(options.platform)
    until, status = time.monotonic() + 60 * options.minutes, 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(pathlib.Path(folder), options.platform, options.backend)
        for seed in seeds:
            kind = options.kind or kind_of(seed)
            if time.monotonic() > until:
                break
            if ((seed, kind) in done and ':' in options.seeds) or kind in left_out:
                continue
            report = run_case(world, seed, kind)
            row = report | {
                'platform': options.platform,
                'backend': options.backend,
                'git': rows.git_sha(),
                'device': world.device,
                'driver': rows.driver(),
                'versions': rows.versions(),
            }
            rows.append(options.output, row)
            status |= failed(report)
            result = 'FAILED ' + '; '.join(report['unexpected'] + report['differences'])
            print(
                f'{seed} {kind} ({", ".join(report["faults"]) or "none"}), '
                f'{report["seconds"]} s: {result if failed(report) else "ok"}',
                flush=True,
            )
    return int(status)


def left_out_here(platform: str) -> list[str]:
    """Returns the kinds that cannot run on this machine and platform, and prints why."""
    left_out = []
    if not can_mount():
        print(f'no right to mount disks here: leaving out {" and ".join(MOUNTING)}', flush=True)
        left_out += MOUNTING
    if platform != 'cpu':
        print(f'two processes run on CPU devices: leaving out {" and ".join(PAIRS)}', flush=True)
        left_out += PAIRS
    return left_out


if __name__ == '__main__':
    sys.exit(main())
