"""Builds: what they compile and ask for, and what a wheel holds; CI compiles by installing."""

import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TOOLS = ROOT / 'xla_ffi' / 'build_tools'
pytest.importorskip('scikit_build_core')

HOOKS = ['get_requires_for_build_wheel', 'get_requires_for_build_editable']


@pytest.fixture(scope='module')
def backend():
    """The build backend, which pip finds through `backend-path`."""
    sys.path.insert(0, str(TOOLS))
    import build_backend  # noqa: PLC0415

    yield build_backend
    sys.path.remove(str(TOOLS))


def test_the_docs_list_every_extra():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    rows = re.findall(r'^\| (`.*?`) \| ', (ROOT / 'docs/installing.md').read_text(), re.MULTILINE)
    listed = sorted(name for row in rows for name in re.findall(r'`(\w+)`', row))
    assert listed == sorted(project['optional-dependencies'])


@pytest.fixture
def machine(backend, monkeypatch):
    """Sets the GPUs, the compilers, the system and the variables that the build backend finds."""

    def make(gpus=(), nvcc=None, system='linux', cuda=None, architectures=None, compiler=True):
        monkeypatch.setattr(backend.plan.gpus, 'find', lambda: list(gpus))
        monkeypatch.setattr(backend.nvcc, 'machine', lambda: nvcc)
        if compiler:
            monkeypatch.setattr(backend, '_has_compiler', lambda: True)
        monkeypatch.setattr(sys, 'platform', system)
        for name, value in (
            ('JAXUNET_CUDA', cuda),
            ('JAXUNET_CUDA_ARCHITECTURES', architectures),
        ):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(
    ('found', 'part', 'reason'),
    [
        ({}, 'NOTHING', 'no NVIDIA GPU and JAXUNET_CUDA is not set'),
        ({'nvcc': '/usr/bin/nvcc'}, 'NOTHING', 'no NVIDIA GPU'),  # a compiler alone is no wish
        ({'gpus': ['9.0']}, 'CUDA', 'GPUs of compute capability 9.0'),
        ({'gpus': ['unknown']}, 'CUDA', 'GPUs of compute capability unknown'),
        ({'gpus': ['7.5', '9.0']}, 'CUDA', '7.5, 9.0'),
        ({'gpus': ['7.5']}, 'NOTHING', 'capability 7.5; the kernels need 8.0 or later'),
        ({'gpus': ['9.0'], 'system': 'win32'}, 'NOTHING', 'on win32'),
        ({'gpus': ['9.0'], 'cuda': '0'}, 'NOTHING', 'JAXUNET_CUDA=0'),
        ({'gpus': ['9.0'], 'cuda': 'OFF'}, 'NOTHING', 'JAXUNET_CUDA=off'),
        ({'gpus': ['9.0'], 'cuda': 'cpu'}, 'CPU', 'JAXUNET_CUDA=cpu'),
        ({'cuda': '1'}, 'CUDA', 'JAXUNET_CUDA=1'),
        ({'cuda': 'on'}, 'CUDA', 'JAXUNET_CUDA=on'),
        ({'architectures': 'all'}, 'CUDA', 'JAXUNET_CUDA_ARCHITECTURES=all'),
        ({'architectures': 'all', 'cuda': '0'}, 'NOTHING', 'JAXUNET_CUDA=0'),
    ],
    ids=str,
)
def test_kernels_are_compiled_for_a_gpu_or_on_request(backend, machine, found, part, reason):
    machine(**found)
    decided = backend.plan.decide(None)
    assert decided.part is backend.plan.Part[part]
    assert reason in decided.reason
    line = decided.line('pip install -e .')
    assert '\n' not in line
    assert ('JAXUNET_CUDA=1 pip install -e .' in line) == (part != 'CUDA')
    assert backend.plan.decide({'wheel.cmake': 'false'}).part is backend.plan.Part.NOTHING


@pytest.mark.parametrize(
    ('gpus', 'expected'),
    [
        (['9.0'], '90a-real'),
        (['9.0', '9.0'], '90a-real'),
        (['8.6'], '86-real'),
        (['9.0', '8.0', '8.9'], '80-real;89-real;90a-real'),
        (['12.0'], '80-virtual'),  # PTX
        (['7.5', '8.0'], '80-real'),
        (['unknown'], '80;90a-real'),
        (['8.0', 'unknown'], '80;90a-real'),
        ([], '80;90a-real'),
    ],
    ids=str,
)
def test_kernels_are_compiled_for_the_gpus_found_alone(backend, machine, gpus, expected):
    machine(gpus=gpus, cuda='1')
    assert backend.plan.decide(None).architectures == expected


@pytest.mark.parametrize(
    ('asked', 'expected'),
    [
        ('all', '80;90a-real'),
        ('80;90a-real', '80;90a-real'),
        ('89-real; 80-virtual;', '89-real;80-virtual'),
    ],
)
def test_architectures_on_request_come_before_the_gpus_found(backend, machine, asked, expected):
    machine(gpus=['9.0'], architectures=asked)
    assert backend.plan.decide(None).architectures == expected


@pytest.mark.parametrize(
    ('variables', 'message'),
    [
        ({'cuda': 'yes please'}, 'JAXUNET_CUDA=yes please: expected 1 .* cpu .* 0 .* or unset'),
        ({'architectures': '90'}, r'JAXUNET_CUDA_ARCHITECTURES=90: .*write "90a-real" .* "90"'),
        ({'architectures': '80;90-real'}, 'need 90a; write "90a-real" instead of "90-real"'),
        ({'architectures': '75'}, 'capability 8.0 or later, found "75"'),
        ({'architectures': 'native'}, 'expected "all" or a list such as "80;90a-real", found "nat'),
        ({'architectures': '80,90a'}, 'found "80,90a"'),
    ],
    ids=str,
)
@pytest.mark.parametrize('hook', HOOKS)
def test_an_unknown_value_is_an_error(backend, machine, hook, variables, message):
    machine(cuda=variables.get('cuda', '1'), architectures=variables.get('architectures'))
    with pytest.raises(SystemExit, match=f'^jaxunet: .*{message}'):
        getattr(backend, hook)()


def cmake_asks(argument, **variables):
    """Runs the script as CMake does."""
    command = [sys.executable, str(TOOLS / 'architectures.py'), argument]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_cmake_gets_the_same_architectures_and_errors():
    assert cmake_asks('86-real').stdout == '86-real\n'
    assert cmake_asks('', JAXUNET_CUDA_ARCHITECTURES='all').stdout == '80;90a-real\n'
    assert cmake_asks('86-real', JAXUNET_CUDA_ARCHITECTURES='all').stdout == '86-real\n'
    wrong = cmake_asks('80;90')
    assert (wrong.returncode, wrong.stdout) == (1, '')
    assert wrong.stderr.startswith('CMAKE_CUDA_ARCHITECTURES=80;90: the Hopper kernels')


@pytest.mark.parametrize('hook', HOOKS)
def test_a_build_asks_for_what_it_needs_and_no_more(backend, machine, hook):
    requires = getattr(backend, hook)
    toolkit, headers = backend.TOOLKIT, set(backend.HEADERS)
    machine(gpus=['9.0'])
    assert {toolkit, *headers} <= set(requires())
    assert requires({'wheel.cmake': 'false'}) == []
    machine(gpus=['9.0'], nvcc='/usr/local/cuda/bin/nvcc')
    assert headers <= set(requires())
    assert toolkit not in requires()
    machine(cuda='cpu')
    assert headers <= set(requires())
    assert toolkit not in requires()
    machine()
    assert requires() == []
    machine(system='darwin', cuda='1')
    assert toolkit not in requires()


def test_the_backends_own_requirement_is_small():
    text = (ROOT / 'pyproject.toml').read_text()
    assert 'requires = ["scikit-build-core>=0.11"]\nbuild-backend = "build_backend"' in text


def test_the_settings_of_the_user_reach_the_build(backend, machine, monkeypatch, tmp_path):
    def settings(given=None):
        passed = []
        monkeypatch.setattr(
            backend._build, 'build_wheel', lambda _, found, __: passed.append(found)
        )
        backend.build_wheel(str(tmp_path), given)
        return passed[0]

    machine()
    assert settings() == {'wheel.cmake': 'false'}
    machine(cuda='cpu')
    assert settings({'build.verbose': 'true'}) == {
        'build.verbose': 'true',
        'cmake.define.JAXUNET_CUDA': 'OFF',
    }
    machine(gpus=['8.0'])
    assert settings() == {'cmake.define.JAXUNET_CUDA': 'ON'}


@pytest.mark.parametrize('hook', [*HOOKS, 'build_wheel', 'build_editable'])
def test_a_machine_without_a_compiler_is_told_what_to_do(
    backend, machine, hook, monkeypatch, tmp_path
):
    machine(gpus=['9.0'], compiler=False)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    arguments = [] if hook in HOOKS else [str(tmp_path)]
    with pytest.raises(SystemExit, match=r'no C\+\+ compiler found.*JAXUNET_CUDA=0 pip install'):
        getattr(backend, hook)(*arguments)


@pytest.mark.parametrize(
    ('program', 'listed', 'expected'),
    [
        ('echo 9.0; echo 8.6', 0, ['9.0', '8.6']),
        ('echo "[N/A]"', 1, ['unknown']),
        ('echo No devices were found; exit 6', 0, []),
        ('echo Driver/library version mismatch; exit 18', 2, ['unknown', 'unknown']),
        (None, 1, ['unknown']),
        (None, 0, []),
    ],
    ids=str,
)
def test_gpus_are_found_by_nvidia_smi_else_in_the_drivers_list(
    backend, monkeypatch, tmp_path, program, listed, expected
):
    gpus = backend.plan.gpus
    monkeypatch.setattr(gpus, 'DRIVER', tmp_path / 'gpus')
    for number in range(listed):
        (tmp_path / 'gpus' / f'0000:0{number}:00.0').mkdir(parents=True)
    if program:
        smi = tmp_path / 'nvidia-smi'
        smi.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=compute_cap ] || exit 2\n{program}\n')
        smi.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    assert gpus.find() == expected


def test_the_nvcc_of_the_machine_is_found_first(backend, monkeypatch, tmp_path):
    compiler = tmp_path / 'cuda' / 'bin' / 'nvcc'
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    for name in ('CUDACXX', 'CUDA_HOME', 'CUDA_PATH'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path / 'cuda'))
    assert backend.nvcc.machine() == str(compiler)
    monkeypatch.setenv('CUDACXX', str(tmp_path / 'other'))  # not there: passed over
    assert backend.nvcc.machine() == str(compiler)


def built(folder: pathlib.Path, what: str) -> pathlib.Path:
    """Builds in a process of its own, in the project's folder."""
    call = f"build_backend.build_{what}({str(folder)!r}, {{'wheel.cmake': 'false'}})"
    program = f"import sys; sys.path.insert(0, '{TOOLS}'); import build_backend; {call}"
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


def test_a_wheel_holds_all_that_runs_and_nothing_else(tmp_path):
    path = built(tmp_path, 'wheel')
    assert path.name.endswith('-py3-none-any.whl')
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if '.dist-info/' not in name]
    packages = ('jaxunet', 'pallas_kernels', 'xla_ffi')
    recipes = {f'jaxunet/{path.relative_to(ROOT)}' for path in (ROOT / 'configs').glob('*.py')}
    wanted = recipes | {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob('*')
        if path.suffix in ('.py', '.npz', '.jsonl', '.json', '.html', '.typed')
        and path.parent.name != 'build_tools'
        and path.name != 'parity_test.py'
        and not path.name.startswith('test_')
    }
    assert any(name.endswith('.npz') for name in wanted)
    assert {'pallas_kernels/tiles/nvidia_h200.jsonl', 'jaxunet/py.typed'} <= wanted
    assert wanted == set(names)
    assert {name.split('/')[0] for name in names} == set(packages)
    sources = ('.cu', '.cuh', '.cc', '.h', '.txt')
    assert not [name for name in names if name.endswith(sources) or 'build_tools' in name]


def test_a_source_archive_can_be_built_from(tmp_path):
    path = built(tmp_path, 'sdist')
    assert path.stat().st_size < 3_000_000
    with tarfile.open(path) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    folder = ROOT / 'xla_ffi'
    sources = [p for p in folder.rglob('*') if p.suffix in ('.cu', '.cuh', '.cc', '.h')]
    assert len(sources) > 40
    tools = list(TOOLS.glob('*.py'))
    recipes = (ROOT / 'configs').glob('*.py')
    needed = [*sources, *tools, *recipes, folder / 'CMakeLists.txt', ROOT / 'pyproject.toml']
    assert {str(path.relative_to(ROOT)) for path in needed} <= names
