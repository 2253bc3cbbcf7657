"""The files that decide what a kernel's tests run, and their digest."""

import pathlib
import shutil

import pytest

from tools.sanitizer import tested_sources
from tools.sanitizer.sanitizer import OPS

# Files that an op's tests run, however it gets to them, and files that they do not.
USED = {
    'cuda adamw': 'xla_ffi/adamw/kernels.cu xla_ffi/common/launch.cuh jaxunet/ops/adamw/cases.py',
    'cuda attention': 'xla_ffi/binding/cuda_module.cc xla_ffi/common/shared_memory.cc',
    'cuda conv3x3': 'xla_ffi/group_norm/dispatch.cu tests/support/conv3x3.py conftest.py',
    'cuda upsample_conv3x3': 'xla_ffi/conv3x3/upsampled.py xla_ffi/conv3x3/hopper/phases.h',
    'cuda group_norm': 'xla_ffi/CMakeLists.txt xla_ffi/build_tools/nvcc.py xla_ffi/call.py',
    'cuda linear': 'xla_ffi/conv3x3/hopper/tile.h tests/support/parity.py xla_ffi/common/types.cuh',
    'cuda projections': 'xla_ffi/projections/kernels.cu xla_ffi/common/warp_tile.cuh',
    'cuda weight_gradients': 'xla_ffi/weight_gradients/launch.cc xla_ffi/conv3x3/hopper/splits.cc',
    'pallas attention': 'pallas_kernels/attention/hopper_kernels.py tests/support/attention.py',
    'pallas conv3x3': 'pallas_kernels/conv3x3/schedule.py pallas_kernels/tiles/nvidia_h200.jsonl',
    'pallas group_norm': 'pallas_kernels/group_norm/hopper.py jaxunet/runtime/device.py',
}
UNUSED = {
    'cuda adamw': 'xla_ffi/conv3x3/dispatch.cc xla_ffi/conv3x3/vjp.py xla_ffi/common/wgmma.cuh',
    'cuda attention': 'xla_ffi/group_norm/dispatch.cu',
    'cuda conv3x3': 'xla_ffi/attention/dispatch.cu',
    'cuda upsample_conv3x3': 'xla_ffi/attention/dispatch.cu',
    'cuda group_norm': 'xla_ffi/conv3x3/dispatch.cc xla_ffi/common/tensor_map.cc',
    'cuda linear': 'xla_ffi/attention/dispatch.cu',
    'cuda projections': 'xla_ffi/attention/dispatch.cu',
    'cuda weight_gradients': 'xla_ffi/attention/dispatch.cu',
    'pallas attention': 'xla_ffi/attention/dispatch.cu',
    'pallas conv3x3': 'pallas_kernels/attention/hopper.py',
    'pallas group_norm': 'xla_ffi/CMakeLists.txt',
}


@pytest.mark.parametrize('op', list(OPS))
def test_the_files_of_every_op(op):
    found = tested_sources.files(OPS[op].path)
    assert set(USED[op].split()) | {OPS[op].path} <= set(found)
    unused = 'jaxunet/training/step.py docs/cuda.md pyproject.toml'
    assert not set(f'{UNUSED[op]} {unused}'.split()) & set(found)
    suffixes = {pathlib.PurePath(name).suffix for name in found}
    assert suffixes <= {'.py', '.cu', '.cuh', '.cc', '.h', '.txt', '.jsonl'}  # no build's output


def test_no_kernel_test_takes_the_fixture_that_is_left_out():
    for op in OPS.values():
        assert 'shared_steps' not in (tested_sources.ROOT / op.path).read_text()
        for name in set(tested_sources.files(op.path)) - {'conftest.py'}:
            assert 'import shared_steps' not in (tested_sources.ROOT / name).read_text(), name


FILES = {
    'conftest.py': 'import support.settings\n',
    'pyproject.toml': '[build-system]\nrequires = ["a"]\n'
    '[tool.scikit-build]\nwheel.packages = ["a"]\ncmake.build-type = "Release"\n'
    '[tool.ruff]\nline-length = 100\n',
    'tests/support/__init__.py': '',
    'tests/support/settings.py': '',
    'jaxunet/__init__.py': "__version__ = '1'\n",
    'jaxunet/ops.py': 'def op():\n    import jaxunet.inner\n',
    'jaxunet/inner.py': 'import jax\n',
    'jaxunet/other.py': '',
    'xla_ffi/__init__.py': '',
    'xla_ffi/CMakeLists.txt': '',
    'xla_ffi/binding/module.cc': '#include "b/b.h"\n#include "common/bound.h"\n',
    'xla_ffi/binding/cpu_module.cc': '#include "d/d.h"\n',
    'xla_ffi/a/parity_test.py': 'from jaxunet.ops import op\n',
    'xla_ffi/a/cpu.cc': '#include "e/e.h"\n',
    'xla_ffi/a/a_test.cc': '#include "e/e.h"\n',
    'xla_ffi/a/a.cu': '#include "c/c.h"\n#include <vector>\n#include "common/used.h"\n',
    'xla_ffi/b/b.h': '',
    'xla_ffi/c/c.h': '',
    'xla_ffi/c/inner/c.cu': '',
    'xla_ffi/common/bound.h': '',
    'xla_ffi/common/used.h': '# include "inner.h"\n',
    'xla_ffi/common/used.cc': '#include "../d/d.h"\n',
    'xla_ffi/common/inner.h': '',
    'xla_ffi/common/unused.h': '',
    'xla_ffi/common/unused.cc': '',
    'xla_ffi/d/d.h': '',
    'xla_ffi/e/e.h': '',
}
OTHERS = (
    'jaxunet/__init__.py',
    'jaxunet/other.py',
    'xla_ffi/a/cpu.cc',
    'xla_ffi/a/a_test.cc',
    'xla_ffi/e/e.h',
    'xla_ffi/binding/cpu_module.cc',
    'xla_ffi/b/b.h',
    'xla_ffi/common/unused.h',
    'xla_ffi/common/unused.cc',
)
TEST = 'xla_ffi/a/parity_test.py'


@pytest.fixture
def checkout(tmp_path):
    """Returns a function that gives the digest after a file has the given content."""
    copies = iter(range(100))
    for name, text in FILES.items():
        path = tmp_path / '0' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def digest(name: str = TEST, text: str | None = None) -> str:
        root = tmp_path / f'copy{next(copies)}'  # a digest is computed once for each folder
        shutil.copytree(tmp_path / '0', root)
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return tested_sources.digest(TEST, root)

    return digest


def test_the_digest_follows_what_is_imported_and_included(checkout):
    before = checkout()
    assert checkout() == before
    for name in set(FILES) - {*OTHERS, 'pyproject.toml'}:
        assert checkout(name, f'{FILES[name]}x = 1\n') != before, name
    assert checkout('xla_ffi/c/new.cu', '') != before
    for old in ('requires = ["a"]', '"Release"'):
        text = FILES['pyproject.toml'].replace(old, old.replace('a', 'b'))
        assert checkout('pyproject.toml', text) != before, old


def test_the_digest_is_the_same_after_other_changes(checkout):
    before = checkout()
    for name, text in (
        *((name, 'x = 1\n') for name in OTHERS),
        ('pyproject.toml', FILES['pyproject.toml'].replace('packages = ["a"]', 'packages = []')),
        ('jaxunet/ops.py', f'# Other words.\n\n{FILES["jaxunet/ops.py"]}\n'),
        ('xla_ffi/a/a.cu', f'{FILES["xla_ffi/a/a.cu"]}\n// Other words.\n'),
        ('xla_ffi/CMakeLists.txt', '# Other words.\n'),
        ('xla_ffi/common/new.cuh', ''),
        ('xla_ffi/c/not_included.cuh', ''),
        ('xla_ffi/_cuda.so', 'built'),
        ('xla_ffi/c/__pycache__/c.pyc', 'compiled'),
        ('docs/cuda.md', 'words'),
        ('pyproject.toml', FILES['pyproject.toml'].replace('100', '90')),
    ):
        assert checkout(name, text) == before, name


def test_a_relative_import_is_an_error(checkout):
    with pytest.raises(ValueError, match=r'jaxunet/ops.py, line 1: import by its whole name'):
        checkout('jaxunet/ops.py', 'from . import inner\n')
