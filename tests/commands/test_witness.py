"""Files that earlier commits wrote are read, continued and sampled as those commits did it, by the
public commands alone.

The commands of COMMIT wrote the files of tests/fixtures/COMMIT and what is expected of them, with
the flags of `commands.json` beside them. The numbers come from the same programs, but another
processor may round otherwise: hence the tolerances.
"""

from __future__ import annotations

import csv
import json
import lzma
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
from typing import NamedTuple

import jax
import numpy as np
import pytest
from support import witness_state
from support.commands import Fork, environment

from jaxunet.config import identity
from jaxunet.runtime.rows import versions
from jaxunet.weights import read_weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / 'tests' / 'fixtures' / 'e54d28d'
EXPECTED = FIXTURES / 'expected'
FLAGS = json.loads((FIXTURES / 'commands.json').read_text())
COMMIT = 'e54d28d'
# Fields whose default has changed since, as a resumed run tells them.
CHANGED = {
    'e54d28d': 'parallel.concurrent_kernels: False -> True, ',
    'a46f2a2': '',
}

# What reports said of the same rows.
REWORDED = {
    ' ms a step': ' ms per step',
    ' measured. 1 x cpu, ': ' measured. cpu, ',
    # The peak memory of processes is no longer compared.
    '| pairs | peak memory |\n|---|---|---|---|---|---|': '| pairs |\n|---|---|---|---|---|',
    'to ×2.21 | 1 | ×1 |': 'to ×2.21 | 1 |',
    'to ×0.229 | 1 | ×1.04 |': 'to ×0.229 | 1 |',
    'process, compiler included.': (
        'process, with the compiler unless the step was cached, so peaks are not compared.'
    ),
    'constant learning rate;': 'learning rate constant after 2 steps of warm-up;',
}


class Run(NamedTuple):
    """A run of a commit.

    Fields:
      commit: that wrote it.
      name: of its folder.
    """

    commit: str
    name: str

    @property
    def fixtures(self) -> pathlib.Path:
        return FIXTURES.with_name(self.commit)

    @property
    def flags(self):
        return json.loads((self.fixtures / 'commands.json').read_text())

    @property
    def steps(self) -> tuple[int, int]:
        """The steps that it was saved at, and that it is expected to reach."""
        return self.flags['steps']['saved'], self.flags['steps']['resumed']

    @property
    def relative(self) -> float:
        """The tolerance of its numbers."""
        return 2e-2 if self.name == 'half' else 1e-3


RUNS = [Run(commit, name) for commit in CHANGED for name in Run(commit, '').flags['runs']]
SHORT = {'conditional', 'edm'}  # runs whose continuation is no long test
# Second moments below it are of gradients that are 0 but for rounding, such as those of the keys'
# bias, which changes no softmax. Adam makes whole steps of them, which differ between processors.
ROUNDING = 1e-16


def call(folder: pathlib.Path, command: str, *flags: str, **changes: str) -> str:
    """Returns what `python -m jaxunet.COMMAND` prints; paths are relative to `folder`.

    `changes` are environment variables.

    Training with dropout drops the elements that it dropped when the fixtures were written.
    """
    variables = {'PYTHONPATH': str(ROOT), 'JAXUNET_GIT_SHA': COMMIT, **changes}
    arguments = [f'jaxunet.{command}', *flags]
    if command == 'train' and any('model.dropout=' in flag for flag in flags):
        return call_with_earlier_dropout(arguments, environment() | variables, folder)
    process = Fork(arguments, environment() | variables, folder)
    out, error = process.communicate()
    assert process.returncode == 0, out + error
    return out + error


def call_with_earlier_dropout(
    arguments: list[str], variables: dict[str, str], folder: pathlib.Path
) -> str:
    # A kept step is found by the source code, which is not what runs here.
    no_cache = {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'support' / 'earlier_dropout.py'), *arguments],
        env=variables | no_cache,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_flags(run: Run) -> list[str]:
    """The shared flags with those of one run, which replace them."""
    fields = dict(flag.split('=', 1) for flag in [*run.flags['run'], *run.flags['runs'][run.name]])
    return [f'{field}={value}' for field, value in fields.items()]


CONDITIONAL = Run(COMMIT, 'conditional')


def copied(name: str, folder: pathlib.Path, fixtures: pathlib.Path = FIXTURES) -> pathlib.Path:
    """A copy of a fixture, unpacked, that a command may change."""
    source, target = fixtures / name, folder / name
    packed = fixtures / f'{name}.tar.xz'
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy(source, target)
    elif packed.exists():
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter='data')
    else:
        target.write_bytes(lzma.decompress((fixtures / f'{name}.xz').read_bytes()))
    return target


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a folder by name, with the wording that reports have had since."""
    return {
        str(p.relative_to(folder)): reworded(p.read_bytes())
        for p in folder.rglob('*')
        if p.is_file() and p.name != '.lock'
    }


def reworded(text: bytes) -> bytes:
    """Returns a file in the words of today."""
    for before, now in REWORDED.items():
        text = text.replace(before.encode(), now.encode())
    return text


def metrics(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def images(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Pixels as int32, and the labels if there are any."""
    with np.load(path) as arrays:
        return arrays['images'].astype(np.int32), arrays.get('labels')


def assert_images(path: pathlib.Path, expected: pathlib.Path, grey_levels: int) -> None:
    (found, labels), (wanted, wanted_labels) = images(path), images(expected)
    np.testing.assert_array_equal(labels, wanted_labels)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= grey_levels


class Resumed(NamedTuple):
    """A run that went on.

    Fields:
      run: which.
      before: its folder as it was.
      workdir: its folder now.
      printed: by the command.
    """

    run: Run
    before: pathlib.Path
    workdir: pathlib.Path
    printed: str


@pytest.fixture(
    scope='module',
    params=[
        pytest.param(run, marks=[] if run.name in SHORT else pytest.mark.long, id='-'.join(run))
        for run in RUNS
    ],
)
def resumed(request, tmp_path_factory):
    run = request.param
    folder, before = (tmp_path_factory.mktemp(name) for name in ('resumed', 'before'))
    for place in (folder, before):
        copied(run.name, place, run.fixtures)
    printed = call(
        folder,
        'train',
        f'--workdir={run.name}',
        *run_flags(run),
        f'--config.train.steps={run.steps[1]}',
    )
    return Resumed(run, before / run.name, folder / run.name, printed)


def test_a_run_goes_on_at_its_step(resumed):
    run, (saved, last) = resumed.run, resumed.run.steps
    changed = f'{CHANGED[run.commit]}train.steps: {saved} -> {last}'
    assert f'at step {saved}; changed: {changed}' in resumed.printed
    before, rows, wanted = (
        metrics(p)
        for p in (
            resumed.before / 'metrics.csv',
            resumed.workdir / 'metrics.csv',
            run.fixtures / 'expected' / f'{run.name}.csv',
        )
    )
    assert rows[:saved] == before
    assert list(rows[0]) == list(wanted[0])
    assert (
        [row['step'] for row in rows]
        == [row['step'] for row in wanted]
        == [str(i + 1) for i in range(last)]
    )
    measured = {'loss', 'grad_norm', *(name for name in wanted[0] if name.endswith('_loss'))}
    told = {'learning_rate', 'loss_scale', 'skipped_steps', 'spikes', 'rollbacks'} & set(wanted[0])
    for row, other in zip(rows[saved:], wanted[saved:], strict=True):
        for column in measured | told:
            # Versions of JAX round the cosine of a schedule differently.
            relative = run.relative if column in measured else 1e-5
            found, expected = (float(r[column] or 'nan') for r in (row, other))
            assert found == pytest.approx(expected, rel=relative, nan_ok=True), (
                row['step'],
                column,
            )


def test_the_state_after_more_steps(resumed):
    """Also its arrays: names, shapes and types of a checkpoint are a file format."""
    run, (saved, last) = resumed.run, resumed.run.steps
    before = witness_state.read(resumed.before, saved)
    after = witness_state.read(resumed.workdir, last)
    assert {path: (x.shape, x.dtype) for path, x in after.items()} == {
        path: (x.shape, x.dtype) for path, x in before.items()
    }
    with np.load(run.fixtures / 'expected' / f'{run.name}.npz') as arrays:
        wanted = dict(zip(arrays['paths'], arrays['values'], strict=True))
    paths, values = witness_state.summary(after)
    assert set(paths) == set(wanted)
    for path, found in zip(paths, values, strict=True):
        known = wanted[path]
        compared = np.ones(len(known), bool)
        if len(parts := re.split('params/|ema/[^/]*/|opt_state/0/[mn]u/', path)) == 2:
            compared = wanted[f'opt_state/0/nu/{parts[1]}'] > ROUNDING
            compared[0] = compared.all()  # the norm is of all elements
        assert compared.any() or parts[1].endswith('qkv/bias'), path
        absolute = run.relative * np.abs(known).max()
        tolerance = {'rtol': run.relative, 'atol': absolute, 'err_msg': path}
        np.testing.assert_allclose(found[compared], known[compared], **tolerance)


def test_what_a_checkpoint_says_besides(resumed):
    saved, last = resumed.run.steps
    old, new = (
        json.loads((folder / 'checkpoints' / str(step) / 'meta' / 'metadata').read_text())
        for folder, step in ((resumed.before, saved), (resumed.workdir, last))
    )
    assert set(new) == set(old) | {'meta_checksum', 'images'}
    expected = old['config'] | {'train': old['config']['train'] | {'steps': last}}
    assert identity(new['config']) == identity(expected)
    for name in ('class_names', 'rollbacks', 'network'):
        assert new.get(name) == old.get(name)
    assert new['seconds'] > old['seconds']


SAMPLED = [
    *(Run(COMMIT, name) for name in FLAGS['samples']),
    *(run for run in RUNS if run.commit != COMMIT),
]


@pytest.mark.parametrize('run', SAMPLED, ids='-'.join)
def test_samples(run, tmp_path):
    name = run.name
    fixture = copied(name, tmp_path, run.fixtures)
    before = contents(fixture) if fixture.is_dir() else fixture.read_bytes()
    call(tmp_path, 'sample', f'--checkpoint={name}', *run.flags['samples'][name], '--output=x.npz')
    expected = run.fixtures / 'expected' / f'{name}.images.npz'
    assert_images(tmp_path / 'x.npz', expected, grey_levels=8 if name == 'half' else 2)
    assert (contents(fixture) if fixture.is_dir() else fixture.read_bytes()) == before


def test_samples_of_exported_weights(tmp_path):
    copied('conditional.safetensors', tmp_path)
    call(
        tmp_path,
        'sample',
        '--checkpoint=conditional.safetensors',
        *FLAGS['samples']['conditional'],
        '--output=x.npz',
    )
    assert_images(
        tmp_path / 'x.npz', EXPECTED / 'conditional.safetensors.images.npz', grey_levels=2
    )


def test_an_interrupted_command_goes_on(tmp_path):
    """It keeps the batch that it had, which is marked here, and draws one more."""
    copied('conditional', tmp_path)
    part = copied('partial.npz.partial', tmp_path) / '000000-000004.npz'
    with np.load(part) as arrays:
        (key,) = arrays.files
        drawn = arrays[key]
    np.savez(part, **{key: drawn // 2})
    call(tmp_path, 'sample', '--checkpoint=conditional', *FLAGS['partial'], '--output=partial.npz')
    found, _ = images(tmp_path / 'partial.npz')
    wanted, _ = images(EXPECTED / 'partial.images.npz')
    np.testing.assert_array_equal(found[:4], drawn // 2)
    assert np.abs(found[4:] - wanted[4:]).max() <= 2
    assert not part.parent.exists()


@pytest.mark.parametrize(
    ('source', 'target', 'flags'),
    [
        ('unetcu.bin', 'unetcu.bin', ['--with_optimizer']),
        ('guided.pt', 'guided.pt', []),
        ('conditional', 'conditional.safetensors', ['--with_optimizer']),
        ('conditional.safetensors', 'conditional.safetensors', ['--with_optimizer']),
    ],
)
def test_weight_files_are_written_as_before(source, target, flags, tmp_path):
    copied(source, tmp_path)
    call(tmp_path, 'export', f'--checkpoint={source}', f'--output=new/{target}', *flags)
    written, before = tmp_path / 'new' / target, copied(target, tmp_path)
    if target.endswith('.bin'):
        assert written.read_bytes() == before.read_bytes()
        return
    # The file's config may have fields that did not exist before.
    new, old = (read_weights(path) for path in (written, before))
    assert new.config == old.config
    for one, other in ((new.params, old.params), (new.moments, old.moments)):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_weights_to_start_from(tmp_path):
    """AdamW's moments come with them: the first losses are those of e54d28d."""
    copied('conditional.safetensors', tmp_path)
    start = ['--config.init_from=conditional.safetensors', '--config.train.steps=3']
    call(tmp_path, 'train', '--workdir=run', *run_flags(CONDITIONAL), *start)
    for row, other in zip(
        metrics(tmp_path / 'run' / 'metrics.csv'), metrics(EXPECTED / 'init_from.csv'), strict=True
    ):
        for column in ('loss', 'grad_norm', 'learning_rate'):
            assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-3), (
                row['step'],
                column,
            )


def test_a_comparison_of_flags_is_refused(tmp_path):
    """Its rows were others than those of comparison files."""
    folder = copied('compare', tmp_path)
    before = contents(folder)
    again = [*run_flags(CONDITIONAL), *FLAGS['compare']]
    for flags in (again, ['--plot_only', '--noplot']):
        command = ['jaxunet.compare', *flags, '--output=compare']
        process = Fork(command, environment() | {'PYTHONPATH': str(ROOT)}, tmp_path)
        _, error = process.communicate()
        assert process.returncode == 2
        assert error.splitlines()[-1] == (
            'error: --output: compare holds a comparison of an earlier version (compare.json), '
            'which commit 5bac3eb9 reads; choose another --output'
        )
    assert {k: v for k, v in contents(folder).items() if k != '.lock'} == before


def test_a_sweep_is_reported_again(tmp_path):
    folder = copied('sweep', tmp_path)
    before = contents(folder)
    for name in ('results.csv', 'report.md'):
        (folder / name).unlink()
    call(tmp_path, 'sweep', '--output=sweep', '--plot_only', '--noplot')
    assert contents(folder) == before


def test_a_sweep_is_complete(tmp_path):
    """Its rows belong to a machine and to versions, so the same command knows them again only where
    these are the same. Their keys are of a version that did not count XLA_FLAGS.
    """
    folder = copied('sweep', tmp_path)
    before = contents(folder)
    row = json.loads((folder / 'results.jsonl').read_text().splitlines()[0])
    here = versions()  # with PyTorch, where it is installed
    if here != row['versions']:
        pytest.skip(f'the rows were measured with {row["versions"]}, here are {here}')
    if shutil.which('nvidia-smi'):
        pytest.skip('the rows were measured on a machine without an NVIDIA driver')
    flags = [*run_flags(CONDITIONAL), *FLAGS['sweep'], '--output=sweep']
    out = call(tmp_path, 'sweep', *flags, XLA_FLAGS='')
    assert '4 of 4 points are done' in out
    assert contents(folder) == before
