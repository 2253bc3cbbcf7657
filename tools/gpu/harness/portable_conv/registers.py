"""Prints the registers and spilled bytes of the multistage kernels.

    python3 registers.py LOG...

Each LOG is the output of `ptxas -v`; build.sh runs this. The exit status is 1 if a kernel spills
registers.
"""

from __future__ import annotations

import re
import sys

TILE = re.compile(r'multistage_(forward|weight_gradient)_kernelI\w*?10MultistageI([\w]+?)EE')


def main(logs: list[str]) -> int:
    """Prints a line for each architecture and tile; returns the exit status.

    A line has the most registers that a variant of the kernel uses, and the spilled bytes of all
    variants. A tile is named by its numbers in MULTISTAGE_TILES.
    """
    by_instance: dict[tuple[str, ...], list[int]] = {}
    key: tuple[str, ...] = ()
    for log in logs:
        with open(log, encoding='utf-8') as file:
            for line in file:
                if entry := re.search(r"entry function '(\w+)' for '(\w+)'", line):
                    tile = TILE.search(entry[1])
                    numbers = re.findall(r'Li(\d+)', tile[2] + 'E') if tile else []
                    key = (entry[2], tile[1] if tile else entry[1], ' '.join(numbers))
                if spilled := re.search(r'(\d+) bytes spill stores', line):
                    by_instance.setdefault(key, [0, 0])[1] += int(spilled[1])
                if used := re.search(r'Used (\d+) registers', line):
                    by_instance[key][0] = max(by_instance[key][0], int(used[1]))
    print('architecture, kernel, tile of MULTISTAGE_TILES: registers, spilled bytes')
    for key, (registers, spilled_bytes) in sorted(by_instance.items()):
        print(*key, ':', registers, spilled_bytes)
    return any(spilled_bytes for _, spilled_bytes in by_instance.values())


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
