"""Writes copies of the GroupNorm kernels for emulate.cc, with calls of emu.h in place of PTX.

    python3 make.py XLA_FFI FOLDER     # emulate.sh runs this

XLA_FFI is the folder xla_ffi of the checkout. Fails if a source no longer has the text to replace.
"""

import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parents[1]  # the harnesses
SEND = """    emu::aligned(slots + slot, 8);
    *emu::of_rank(slots + slot, rank) = value;
    emu::of_rank(full, rank)->complete(8);
"""
STATIC_BARRIER = (
    '__shared__ Barrier full;',
    '\n',
    'Barrier& full = *static_cast<Barrier*>(emu::shared_static());',
)
COPIED = (
    'block_reduction.h tiling.h statistics_tiling.h forward_register_resident_tiling.h '
    'streaming_tiling.h backward_smem_resident_tiling.h moments.cuh packed.cuh vector.cuh plan.h '
    'launch.h dropout.cuh mailbox.cuh statistics.cu forward_register_resident.cu'
)
# File: (beginning of the text to replace, beginning of the text after it, replacement).
EDITS = {
    'moments.cuh': [
        ('  asm volatile("cp.async.ca', '}', '  emu::aligned(to, 4); *to = *from;\n'),
    ],
    'packed.cuh': [
        ('const uint4 four', ' = __ldg', 'emu::aligned(from, 16); const uint4 four'),
    ],
    'statistics.cu': [STATIC_BARRIER],
    'forward_register_resident.cu': [STATIC_BARRIER],
    'mailbox.cuh': [
        ('    const uint64_t bits', '#else', SEND),
        ('    uint32_t done;', '#else', '    full->wait(0);\n'),
    ],
}


def main(source: pathlib.Path, folder: pathlib.Path) -> None:
    for name in ('group_norm', 'common'):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in COPIED.split():
        text = (source / 'group_norm' / name).read_text()
        for start, end, replacement in EDITS.get(name, []):
            first = text.index(start)
            text = text[:first] + replacement + text[text.index(end, first) :]
        (folder / 'group_norm' / name).write_text(text.replace('__CUDA_ARCH__', '900'))
    for name in ('group_norm/instructions.cuh', 'common/mbarrier.cuh'):
        (folder / name).write_text('#pragma once\n#include "emu.h"\n')
    special = 'special_functions.cuh'
    shutil.copy(HERE / 'gnback/emulation' / special, folder / 'common' / special)


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
