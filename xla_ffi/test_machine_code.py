"""The machine code of the CUDA kernels, against the digests recorded for one version of nvcc."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / 'tests' / 'fixtures' / 'kernel_machine_code.json'

spec = importlib.util.spec_from_file_location(
    'machine_code', ROOT / 'xla_ffi' / 'build_tools' / 'machine_code.py'
)
machine_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(machine_code)

LISTING = """
	code for sm_80
		Function : first
        /*0000*/                   MOV R1, c[0x0][0x28] ;  /* 0x00000a00ff017624 */
                                                           /* 0x000fe400078e00ff */
		Function : second
        /*0000*/                   EXIT ;                  /* 0x000000000000794d */
                                                           /* 0x000fea0003800000 */
	code for sm_90a
		Function : first
        /*0000*/                   EXIT ;                  /* 0x000000000000794d */
                                                           /* 0x000fea0003800000 */
"""


def test_a_digest_depends_on_the_instructions_alone():
    first, second, third = machine_code.kernels(LISTING.splitlines())
    assert [(k.architecture, k.name) for k in (first, second, third)] == [
        ('sm_80', 'first'),
        ('sm_80', 'second'),
        ('sm_90a', 'first'),
    ]
    assert second.digest == third.digest != first.digest


def test_a_difference_names_the_kernel():
    found = list(machine_code.kernels(LISTING.splitlines()))
    recorded = machine_code.by_architecture(found)
    assert machine_code.differences(found, recorded) == []
    renamed = [kernel._replace(name='other') for kernel in found]
    assert machine_code.differences(renamed, recorded) == []
    changed = list(machine_code.kernels(LISTING.replace('0x00000a00', '0x00000b00').splitlines()))
    new, gone = machine_code.differences(changed, recorded)
    assert new == f'sm_80: {changed[0].digest} is not in the record: first'
    assert gone == f'sm_80: 1 recorded digests have no kernel: {found[0].digest}'


def test_the_kernels_have_the_recorded_machine_code():
    """Refactoring keeps the code; `machine_code.py --write` records an intended change."""
    modules = list((ROOT / 'xla_ffi').glob('_cuda*.so'))
    if len(modules) != 1:
        pytest.skip(f'expected one built xla_ffi/_cuda*.so, found {len(modules)}')
    if missing := machine_code.missing_tools():
        pytest.skip(f'no {" and no ".join(missing)} on PATH')
    record = json.loads(RECORD.read_text())
    if (version := machine_code.compiler(modules[0])) != record['nvcc']:
        pytest.skip(
            f'recorded for nvcc {record["nvcc"]}; '
            f'{modules[0].name} was built by {version or "an unknown version"}'
        )
    found = machine_code.read(modules[0])
    built = {kernel.architecture for kernel in found}
    recorded = {name: digests for name, digests in record['architectures'].items() if name in built}
    if not recorded:
        pytest.skip(
            f'recorded for {", ".join(record["architectures"])}; '
            f'the module holds {", ".join(sorted(built))}'
        )
    lines = machine_code.differences(
        [kernel for kernel in found if kernel.architecture in recorded], recorded
    )
    assert not lines, '\n'.join(lines)
