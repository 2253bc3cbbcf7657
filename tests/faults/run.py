"""Runs cases of faults and appends a row for each to a file of JSON lines.

    PYTHONPATH=.:tests python tests/faults/run.py --seeds 0:1000
    PYTHONPATH=.:tests python tests/faults/run.py --seeds 0:100 --platform cuda --backend cuda

Seeds that the file has for this platform and backend are left out, so that the same command goes
on. `--seeds 17` repeats one case. It needs root for the disks of its own that it mounts; without,
their kinds are left out, and it says so.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time

os.environ['JAX_PLATFORMS'] = 'cpu'  # of this process, which only compares

from faults.cases import MOUNTING, failed, kind_of, run_case
from faults.world import World, can_mount
from support.commands import ROOT

from jaxunet.runtime import rows

ROWS = ROOT / 'docs/results/faults/rows.jsonl'


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', required=True, help='FIRST:END, or one')
    parser.add_argument('--kind', help='this kind in place of that of the seed')
    parser.add_argument('--platform', default='cpu', help='JAX_PLATFORMS: cpu or cuda')
    parser.add_argument('--backend', default='auto', help='config.backend of the runs')
    parser.add_argument('--minutes', type=float, default=1e6, help='start no case after them')
    parser.add_argument('--output', type=pathlib.Path, default=ROWS)
    options = parser.parse_args()
    first, _, end = options.seeds.partition(':')
    seeds = range(int(first), int(end or int(first) + 1))
    known = rows.read(options.output) if options.output.exists() else []
    done = {
        row['seed']
        for row in known
        if (row['platform'], row['backend']) == (options.platform, options.backend)
    }
    mounts = can_mount()
    if not mounts:
        print(f'no right to mount disks here: leaving out {" and ".join(MOUNTING)}')
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        world = World(pathlib.Path(folder), options.platform, options.backend)
        for seed in seeds:
            kind = options.kind or kind_of(seed)
            if time.monotonic() > until:
                break
            if (seed in done and end) or (kind in MOUNTING and not mounts):
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
            result = 'FAILED ' + '; '.join(report['unexpected'] + report['differences'])
            print(
                f'{seed} {kind} ({", ".join(report["faults"]) or "none"}), '
                f'{report["seconds"]} s: {result if failed(report) else "ok"}',
                flush=True,
            )


if __name__ == '__main__':
    main()
