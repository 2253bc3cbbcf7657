"""What a wheel holds and what its build asks for; the compiled modules apart, which CI builds by installing the project."""

import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
pytest.importorskip('scikit_build_core')


@pytest.fixture(scope='module')
def backend():
    """The build backend, which pip finds through `backend-path`."""
    sys.path.insert(0, str(ROOT / 'xla_ffi' / 'build_tools'))
    import build_backend

    yield build_backend
    sys.path.remove(str(ROOT / 'xla_ffi' / 'build_tools'))


def built(folder: pathlib.Path, what: str, settings: str) -> pathlib.Path:
    """What the build backend makes in a process of its own, in the project's folder."""
    call = f'build_backend.build_{what}({str(folder)!r}, {settings})'
    program = f"import sys; sys.path.insert(0, 'xla_ffi/build_tools'); import build_backend; {call}"
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


def test_a_wheel_holds_all_that_runs_and_nothing_else(tmp_path):
    with zipfile.ZipFile(built(tmp_path, 'wheel', "{'wheel.cmake': 'false'}")) as wheel:
        names = [name for name in wheel.namelist() if '.dist-info/' not in name]
    packages = ('jaxunet', 'pallas_kernels', 'xla_ffi')
    wanted = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob('*')
        if path.suffix in ('.py', '.npz', '.jsonl', '.json') and path.parent.name != 'build_tools'
    }
    assert any(name.endswith('.npz') for name in wanted)
    assert 'pallas_kernels/tiles/nvidia_h200.jsonl' in wanted
    assert wanted <= set(names)
    assert {name.split('/')[0] for name in names} == set(packages)
    assert not [
        name
        for name in names
        if name.endswith(('.cu', '.cuh', '.cc', '.h', '.txt')) or 'build_tools' in name
    ]


def test_a_source_archive_can_be_built_from(tmp_path):
    with tarfile.open(built(tmp_path, 'sdist', 'None')) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    sources = [
        path
        for path in (ROOT / 'xla_ffi').rglob('*')
        if path.suffix in ('.cu', '.cuh', '.cc', '.h')
    ]
    assert len(sources) > 40
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert {
        'pyproject.toml',
        'xla_ffi/CMakeLists.txt',
        'xla_ffi/build_tools/build_backend.py',
        'xla_ffi/build_tools/nvcc.py',
    } <= names


@pytest.mark.parametrize(
    'hook', ['get_requires_for_build_wheel', 'get_requires_for_build_editable']
)
def test_nvcc_comes_from_pypi_where_there_is_none(backend, hook, monkeypatch, tmp_path):
    requires = getattr(backend, hook)
    monkeypatch.delenv('JAXUNET_CUDA', raising=False)
    monkeypatch.setattr(sys, 'platform', 'linux')
    monkeypatch.setattr(backend.nvcc, 'machine', lambda: None)
    assert backend.TOOLKIT in requires()
    assert backend.TOOLKIT not in requires({'wheel.cmake': 'false'})
    monkeypatch.setenv('JAXUNET_CUDA', 'OFF')
    assert backend.TOOLKIT not in requires()
    monkeypatch.delenv('JAXUNET_CUDA')
    monkeypatch.setattr(sys, 'platform', 'darwin')
    assert backend.TOOLKIT not in requires()


def test_the_compiler_of_the_machine_is_found_first(backend, monkeypatch, tmp_path):
    compiler = tmp_path / 'cuda' / 'bin' / 'nvcc'
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    for name in ('CUDACXX', 'CUDA_HOME', 'CUDA_PATH'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path / 'cuda'))
    assert backend.nvcc.machine() == str(compiler)
    assert backend.TOOLKIT not in backend.get_requires_for_build_wheel()
    monkeypatch.setenv('CUDACXX', str(tmp_path / 'other'))  # not there: passed over
    assert backend.nvcc.machine() == str(compiler)


@pytest.mark.parametrize('hook', ['build_wheel', 'build_editable'])
def test_a_machine_without_a_compiler_is_told_what_to_do(backend, hook, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(SystemExit, match=r'no C\+\+ compiler found.*wheel.cmake=false'):
        getattr(backend, hook)(str(tmp_path))
