"""Files that commit e54d28d wrote are read, continued and sampled as that commit did it, by the
public commands alone.

`tests/fixtures/e54d28d/make.py` wrote the files and what is expected of them; `commands.json` there
has the flags. The numbers come from the same programs, but another processor may round otherwise:
hence the tolerances.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import lzma
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from support import witness_state
from support.commands import Fork, environment

from jaxunet.config import identity
from jaxunet.weights import read_weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / 'tests' / 'fixtures' / 'e54d28d'
EXPECTED = FIXTURES / 'expected'
FLAGS = json.loads((FIXTURES / 'commands.json').read_text())
SAVED, RESUMED = FLAGS['steps']['saved'], FLAGS['steps']['resumed']
RUNS = list(FLAGS['runs'])
COMMIT = 'e54d28d'
# Second moments below it are of gradients that are 0 but for rounding, such as those of the keys'
# bias, which changes no softmax. Adam makes whole steps of them, which differ between processors.
ROUNDING = 1e-16


def call(folder: pathlib.Path, command: str, *flags: str) -> str:
    """Returns what `python -m jaxunet.COMMAND` prints; paths are relative to `folder`."""
    variables = {'PYTHONPATH': str(ROOT), 'JAXUNET_GIT_SHA': COMMIT}
    process = Fork([f'jaxunet.{command}', *flags], environment() | variables, folder)
    out, error = process.communicate()
    assert process.returncode == 0, out + error
    return out + error


def run_flags(name: str) -> list[str]:
    """The shared flags with those of one run, which replace them."""
    fields = dict(flag.split('=', 1) for flag in [*FLAGS['run'], *FLAGS['runs'][name]])
    return [f'{field}={value}' for field, value in fields.items()]


def copied(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A copy of a fixture, unpacked, that a command may change."""
    source, target = FIXTURES / name, folder / name
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy(source, target)
    else:
        target.write_bytes(lzma.decompress((FIXTURES / f'{name}.xz').read_bytes()))
    return target


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a folder by name, with one wording that reports have had since."""
    return {
        str(p.relative_to(folder)): p.read_bytes().replace(b' ms a step', b' ms per step')
        for p in folder.rglob('*')
        if p.is_file() and p.name != '.lock'
    }


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


@pytest.fixture(
    scope='module',
    params=[RUNS[0], *(pytest.param(name, marks=pytest.mark.long) for name in RUNS[1:])],
)
def resumed(request, tmp_path_factory):
    """A run that went on, its name, and what the command printed."""
    folder = tmp_path_factory.mktemp('resumed')
    copied(request.param, folder)
    out = call(
        folder,
        'train',
        f'--workdir={request.param}',
        *run_flags(request.param),
        f'--config.train.steps={RESUMED}',
    )
    return folder / request.param, request.param, out


def test_a_run_goes_on_at_its_step(resumed):
    workdir, name, out = resumed
    changed = f'parallel.concurrent_kernels: False -> True, train.steps: {SAVED} -> {RESUMED}'
    assert f'at step {SAVED}; changed: {changed}' in out
    before, rows, wanted = (
        metrics(p)
        for p in (
            FIXTURES / name / 'metrics.csv',
            workdir / 'metrics.csv',
            EXPECTED / f'{name}.csv',
        )
    )
    assert rows[:SAVED] == before
    assert list(rows[0]) == list(wanted[0])
    assert (
        [row['step'] for row in rows]
        == [row['step'] for row in wanted]
        == [str(i + 1) for i in range(RESUMED)]
    )
    relative = 2e-2 if name == 'half' else 1e-3
    for row, other in zip(rows[SAVED:], wanted[SAVED:], strict=True):
        for column in ('loss', 'grad_norm'):
            assert float(row[column]) == pytest.approx(float(other[column]), rel=relative), (
                row['step'],
                column,
            )
        for column in ('learning_rate', 'loss_scale', 'skipped_steps'):
            assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-6), (
                row['step'],
                column,
            )


def test_the_state_after_more_steps(resumed):
    """Also its arrays: names, shapes and types of a checkpoint are a file format."""
    workdir, name, _ = resumed
    before, after = witness_state.read(FIXTURES / name, SAVED), witness_state.read(workdir, RESUMED)
    assert {path: (x.shape, x.dtype) for path, x in after.items()} == {
        path: (x.shape, x.dtype) for path, x in before.items()
    }
    with np.load(EXPECTED / f'{name}.npz') as arrays:
        wanted = dict(zip(arrays['paths'], arrays['values'], strict=True))
    paths, values = witness_state.summary(after)
    assert set(paths) == set(wanted)
    relative = 2e-2 if name == 'half' else 1e-3
    for path, found in zip(paths, values, strict=True):
        known = wanted[path]
        compared = np.ones(len(known), bool)
        if len(parts := re.split('params/|ema/[^/]*/|opt_state/0/[mn]u/', path)) == 2:
            compared = wanted[f'opt_state/0/nu/{parts[1]}'] > ROUNDING
            compared[0] = compared.all()  # the norm is of all elements
        assert compared.any() or parts[1].endswith('qkv/bias'), path
        tolerance = {'rtol': relative, 'atol': relative * np.abs(known).max(), 'err_msg': path}
        np.testing.assert_allclose(found[compared], known[compared], **tolerance)


def test_what_a_checkpoint_says_besides(resumed):
    workdir, name, _ = resumed
    old, new = (
        json.loads((folder / 'checkpoints' / str(step) / 'meta' / 'metadata').read_text())
        for folder, step in ((FIXTURES / name, SAVED), (workdir, RESUMED))
    )
    assert set(new) == set(old) | {'meta_checksum'}
    expected = old['config'] | {'train': old['config']['train'] | {'steps': RESUMED}}
    assert identity(new['config']) == expected
    assert new['class_names'] == old['class_names']
    assert new['seconds'] > old['seconds']


@pytest.mark.parametrize('name', FLAGS['samples'])
def test_samples(name, tmp_path):
    fixture = copied(name, tmp_path)
    before = contents(fixture) if fixture.is_dir() else fixture.read_bytes()
    call(tmp_path, 'sample', f'--checkpoint={name}', *FLAGS['samples'][name], '--output=x.npz')
    assert_images(
        tmp_path / 'x.npz', EXPECTED / f'{name}.images.npz', grey_levels=8 if name == 'half' else 2
    )
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
    call(tmp_path, 'train', '--workdir=run', *run_flags('conditional'), *start)
    for row, other in zip(
        metrics(tmp_path / 'run' / 'metrics.csv'), metrics(EXPECTED / 'init_from.csv'), strict=True
    ):
        for column in ('loss', 'grad_norm', 'learning_rate'):
            assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-3), (
                row['step'],
                column,
            )


def test_a_comparison_is_complete(tmp_path):
    folder = copied('compare', tmp_path)
    copied('features.npz', tmp_path)
    before = contents(folder)
    for name in ('compare.csv', 'report.md'):
        (folder / name).unlink()
    out = call(
        tmp_path, 'compare', *run_flags('conditional'), *FLAGS['compare'], '--output=compare'
    )
    assert '2 of 2 runs are done already' in out
    now, specs = contents(folder), []
    for files in (now, before):
        spec = json.loads(files.pop('compare.json'))
        specs.append(spec | {'config': identity(spec['config'])})
    assert now == before
    assert specs[0] == specs[1]


def test_a_comparison_measures_what_is_missing(tmp_path):
    """It measures the weights that were kept, and trains nothing."""
    folder = copied('compare', tmp_path)
    copied('features.npz', tmp_path)
    path = folder / 'runs' / 'min_snr_seed0' / 'rows.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    before = contents(path.parent)
    call(tmp_path, 'compare', *run_flags('conditional'), *FLAGS['compare'], '--output=compare')
    again = [json.loads(line) for line in path.read_text().splitlines()]
    for row, other in zip(again, rows, strict=True):
        assert row.keys() == other.keys()
        assert [
            row[key] for key in ('milestone', 'name', 'metric', 'step', 'training_seconds')
        ] == [other[key] for key in ('milestone', 'name', 'metric', 'step', 'training_seconds')]
        assert row['value'] == pytest.approx(other['value'], rel=1e-2, abs=1e-6)
    assert {
        k: v for k, v in contents(path.parent).items() if k not in ('rows.jsonl', 'log.txt')
    } == before


def test_a_sweep_is_reported_again(tmp_path):
    folder = copied('sweep', tmp_path)
    before = contents(folder)
    for name in ('results.csv', 'report.md'):
        (folder / name).unlink()
    call(tmp_path, 'sweep', '--output=sweep', '--plot_only', '--noplot')
    assert contents(folder) == before


def test_a_sweep_is_complete(tmp_path):
    """Its rows belong to a machine and to versions, so the same command knows them again only where
    these are the same.
    """
    folder = copied('sweep', tmp_path)
    before = contents(folder)
    row = json.loads((folder / 'results.jsonl').read_text().splitlines()[0])
    here = {name: importlib.metadata.version(name) for name in row['versions'] if name != 'python'}
    here['python'] = '.'.join(map(str, sys.version_info[:3]))
    if here != row['versions']:
        pytest.skip(f'the rows were measured with {row["versions"]}, here are {here}')
    if shutil.which('nvidia-smi'):
        pytest.skip('the rows were measured on a machine without an NVIDIA driver')
    out = call(tmp_path, 'sweep', *run_flags('conditional'), *FLAGS['sweep'], '--output=sweep')
    assert '4 of 4 points are done' in out
    assert contents(folder) == before
