"""Command lines as a user types them: the whole way from images to images."""

import io
import itertools
import json
import re
import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from support.commands import ROOT, call, call_each
from support.data_files import encoded, put, random_pixels
from support.tiny import flags

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_model
from jaxunet.model.cost import FOR_A_CPU
from jaxunet.runtime.progress import LOG_SECONDS, progress_bar
from jaxunet.training.logs import read_metrics

NETWORK = [flag for flag in flags() if flag.startswith('--config.model.')]  # a tiny one
SMALL = [*flags(), '--config.model.num_classes=10', '--config.model.label_dropout=0.1']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A tiny run on the embedded digits."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    flags = ['--config.train.sample_every=6', f'--workdir={workdir}']
    out = call('jaxunet.train', *SMALL, *flags, fresh=True)
    assert '1797 images from digits:' in out
    assert f'trained model: python -m jaxunet.sample --checkpoint {workdir}\n' in out
    return workdir


@pytest.mark.parametrize('terminal', [True, False])
def test_a_log_file_gets_few_states_of_a_progress_bar(monkeypatch, terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, 'stderr', stderr)
    now = itertools.count(step=0.2)  # seconds: of 1,000 steps 200
    with progress_bar(total=1000) as bar:
        bar._time = now.__next__
        bar.start_t = bar.last_print_t = 0.0
        for _ in range(1000):
            bar.update()
    states = stderr.getvalue().count('\r')
    assert (
        states > 500
        if terminal
        else 1000 * 0.2 / LOG_SECONDS - 2 < states < 1000 * 0.2 / LOG_SECONDS + 4
    )


def test_train_writes_what_it_promises(run):
    assert {p.name for p in run.iterdir()} == {
        '.lock',
        'checkpoints',
        'metrics.csv',
        'samples',
        'tensorboard',
        'log.txt',
        'index.html',
    }
    assert [int(row['step']) for row in read_metrics(run / 'metrics.csv')] == [1, 2, 3, 4, 5, 6]
    with Image.open(run / 'samples' / 'step_0000006.png') as picture:
        assert picture.mode == 'L'


def sample(source, output, *extra, **options):
    call(
        'jaxunet.sample',
        f'--checkpoint={source}',
        f'--output={output}',
        '--num_samples=6',
        '--steps=4',
        *extra,
        **options,
    )
    with np.load(output) as arrays:
        return arrays['images'], arrays.get('labels')


@pytest.fixture(scope='module')
def sampled(run, tmp_path_factory):
    """Images and labels of the run's model."""
    return sample(run, tmp_path_factory.mktemp('sampled') / 'a.npz', fresh=True)


def test_same_seed_same_images_whatever_the_batch_and_the_devices(run, sampled, tmp_path):
    images, labels = sampled
    assert images.shape == (6, 8, 8, 1)
    assert list(labels) == [0, 1, 2, 3, 4, 5]
    for name, extra, options in (
        ('b', ['--batch_size=4'], {}),
        ('c', ['--batch_size=3'], {'devices': 4}),
    ):
        again, _ = sample(run, tmp_path / f'{name}.npz', *extra, **options)
        assert np.abs(again.astype(int) - images).max() <= 1  # float rounding of other batch shapes
    named = shutil.copytree(run, tmp_path / 'named')
    for path in named.glob('checkpoints/*/meta/metadata'):
        meta = json.loads(path.read_text())
        assert meta['class_names'] == list('0123456789')
        del meta['meta_checksum']
        path.write_text(json.dumps(meta | {'class_names': [*'012', 'three', *'456789']}))
    other, labels = sample(named, tmp_path / 'd.npz', '--seed=1', '--class_labels=three,7')
    assert list(labels) == [3, 7, 3, 7, 3, 7]
    assert np.abs(other.astype(int) - images).mean() > 1


def test_sampler_options_change_images(run, tmp_path):
    options = (
        ['--steps=4'],
        ['--like=guided_diffusion', '--timesteps=0,10,20,39'],
        ['--steps=4', '--sampler=ddim', '--eta=0.5', '--skip_schedule=quadratic'],
        ['--steps=4', '--guidance_scale=4', '--ema=none'],
    )
    shared = [f'--checkpoint={run}', '--output=x.npz', '--num_samples=6']
    commands = [['jaxunet.sample', *shared, *extra] for extra in options]
    seen = []
    for number, (code, out, error) in enumerate(call_each(commands, tmp_path)):
        assert code == 0, error
        assert ('parameters without averaging' in out) == ('--ema=none' in options[number])
        with np.load(tmp_path / str(number) / 'x.npz') as arrays:
            seen.append(arrays['images'])
    assert len({images.tobytes() for images in seen}) == len(options)


def test_export_round_trip_and_init_from(run, sampled, tmp_path):
    path = tmp_path / 'model.safetensors'
    assert 'the average with rate 0.995' in call(
        'jaxunet.export', f'--checkpoint={run}', f'--output={path}', fresh=True
    )
    state = checkpoint.read(run).state
    loaded = load_model(str(path))
    assert checkpoint.checksum(loaded.params) == checkpoint.checksum(state.ema['0.995'])
    assert loaded.class_names == checkpoint.read(run).facts.class_names == tuple('0123456789')
    again, _ = sample(path, tmp_path / 'b.npz')
    assert np.abs(sampled[0].astype(int) - again).max() <= 1
    workdir = tmp_path / 'more'
    call(
        'jaxunet.train',
        *SMALL,
        f'--config.init_from={path}',
        '--config.train.steps=2',
        '--config.optimizer.learning_rate=1e-12',
        f'--workdir={workdir}',
    )
    started = checkpoint.read(workdir).state
    path.unlink()  # resuming does not need it
    call(
        'jaxunet.train',
        *SMALL,
        f'--config.init_from={path}',
        '--config.train.steps=3',
        f'--workdir={workdir}',
    )
    np.testing.assert_allclose(
        started.params['conv_in']['kernel'], loaded.params['conv_in']['kernel'], atol=1e-9
    )


def test_dry_run(tmp_path):
    out = call(
        'jaxunet.train',
        '--dry_run',
        f'--config={ROOT}/configs/elephants64.py',
        '--config.data.path=elefants64.zip',
        '--config.data.classes=big dogs',
        '--config.evaluation.metrics=fid,kid',
        '--config.optimizer.warmup_steps=5000',
        '--config.train.steps=40',
    )
    assert 'data.path: elefants64.zip: no such file or folder: the current folder has no' in out
    assert "'classes': ('big dogs',)" in out
    assert "'metrics': ('fid', 'kid')" in out
    assert 'optimizer.warmup_steps=5000 is more than train.steps=40' in out
    assert "'base_channels': 64" in out
    assert 'parameters: 20,494,211' in out
    assert 'GFLOPs per image: 12' in out or 'GFLOPs per image: 13' in out
    assert re.search(r'memory per device, GiB: \d+\.\d\d estimated with xla \(', out)


def test_dry_run_checks_what_the_run_starts_from(run, tmp_path):
    """The line of `--dry_run`; without images, it says that names of classes are not compared."""
    dry = ['jaxunet.train', '--dry_run', *SMALL, f'--config.init_from={run}']
    commands = [
        [*dry, f'--workdir={tmp_path / "new"}'],
        [*dry, '--config.model.num_classes=0', '--config.model.label_dropout=0'],
        [*dry, '--config.data.path=nowhere'],
        [*dry, f'--workdir={run}'],
        [*dry, '--config.model.base_channels=64'],
        [*dry[:-1], '--config.init_from=nowhere.bin'],
    ]
    results = call_each(commands, tmp_path)
    lines = [re.findall(r'^init_from: .*', out, re.M) for _, out, _ in results]
    assert [code for code, _, _ in results] == [0, 0, 0, 0, 2, 2]
    (kept,), (fresh,), (unnamed,), (resumed,), *failed = lines
    assert failed == [[], []]
    assert re.search(r'step 6, .*; kept: ([\d,]+) of \1 parameters', kept)
    assert 'label table' in fresh
    assert re.search(
        r'names of classes not compared, as the images cannot be read \(.*nowhere', unnamed
    )
    assert 'not read, as the run resumes' in resumed
    assert 'model.base_channels' in results[4][2]
    assert 'nowhere.bin: no such file or folder' in results[5][2]


def test_dry_run_tells_of_the_run_in_the_workdir(run, tmp_path):
    """The default workdir is named after the config file, also if the flag has one dash."""
    (tmp_path / 'runs').mkdir()
    (tmp_path / 'runs' / 'own').symlink_to(run)
    (tmp_path / 'own.py').write_text('from jaxunet.config import default_config as get_config\n')
    dry = ['jaxunet.train', '--dry_run']
    small = [flag.replace('--', '-', 1) for flag in SMALL]
    longer = [*dry, '-config', 'own.py', *small, '-config.train.steps=9']
    line = 'resumes the run in runs/own, with its choices of fields; changed: train.steps: 6 -> 9'
    assert line in call(*longer, folder=tmp_path)
    out = call(*dry, *SMALL, '--config.parallel.devices=8', folder=tmp_path)
    assert 'resumes' not in out
    assert 'parameters: ' in out
    # What this machine lacks is told: the run may start on another one.
    assert 'parallel.devices: 8 asked for, but this machine has 1 (cpu); a run on this ' in out
    other = call(*dry, f'--workdir={run}', code=2)
    assert f'error: {run} holds a run with another config' in other


def test_dry_run_says_what_the_run_would_say(run, tmp_path):
    """Errors that depend on the command and its files alone, in the words of the run."""
    file, link = tmp_path / 'file', tmp_path / 'link'
    file.touch()
    link.symlink_to('nowhere')
    rates = ','.join(f'0.{number}' for number in range(900, 965))
    train = '--config.train.'
    longer = [f'{train}{name}=4' for name in ('log_every', 'checkpoint_every', 'steps_per_call')]
    cases = [
        (
            [f'--workdir={file}'],
            f'--workdir: {file}: cannot be made: {file} is a file, not a folder; choose another',
        ),
        ([f'--workdir={file}/run'], f'{file}/run: cannot be made: {file} is a file, not a folder'),
        ([f'--workdir={link}'], f'{link} is a link to nowhere, which is missing or a loop; choose'),
        (['--restarts=2', '--num_processes=2'], '--restarts: expected one process, or processes'),
        (['--coordinator=localhost:1'], '--num_processes: missing; a start by hand needs'),
        (['--config.backend=cuda', f'--config.ema.rates={rates}'], '65 averages of the weights; '),
        (
            [f'{train}evaluate_every=2', '--config.evaluation.features=nowhere.npz'],
            "--features: expected inception or .*, found no file 'nowhere.npz'",
        ),
        (
            [f'--workdir={run}', *longer, f'{train}steps=8'],
            'train.steps_per_call: 4 does not divide 6, the step to resume from; set it to 0',
        ),
    ]
    results = call_each(
        [['jaxunet.train', '--dry_run', *SMALL, *each] for each, _ in cases], tmp_path
    )
    for (_, told), (code, _, error) in zip(cases, results, strict=True):
        assert (code, error.count('error: ')) == (2, 1), error
        assert re.search(told, error), error
    assert file.is_file()


def test_a_run_is_not_written_between_its_images(tmp_path):
    image = encoded(random_pixels(0, (20, 30, 3)))
    folder = put(tmp_path, {'0.png': image, '1.png': image}, 'folder')
    dry = ['jaxunet.train', '--dry_run', f'--config.data.path={folder}']
    dry += ['--config.model.num_classes=0', '--config.model.label_dropout=0', *NETWORK]
    workdirs = [folder, folder / 'run', folder.parent, folder / '.run']
    commands = [[*dry, f'--workdir={workdir}'] for workdir in workdirs]
    # An empty path is not the working folder.
    commands.append([*dry, '--config.data.path=', f'--workdir={tmp_path / "run"}'])
    results = call_each(commands, tmp_path)
    assert [code for code, _, _ in results] == [2, 2, 0, 0, 0]
    for workdir, (_, _, error) in zip(workdirs[:2], results[:2], strict=True):
        assert f'error: --workdir: {workdir} is in {folder}, the folder of data.path' in error


def test_dry_run_tells_of_classes_and_of_a_long_run_on_a_cpu(tmp_path):
    image = encoded(random_pixels(0, (20, 30, 3)))
    folder = put(tmp_path, {'cat/0.png': image, 'dog/0.png': image}, 'folder')
    config = f'--config={ROOT}/configs/images.py'
    dry = ['jaxunet.train', '--dry_run', config, f'--config.data.path={folder}']
    dry += ['--config.train.steps=1000000000', *NETWORK]
    (code, _, unused), (failed, _, few) = call_each(
        [dry, [*dry, '--config.model.num_classes=1']], tmp_path
    )
    assert (code, failed) == (0, 2)
    assert 'the 2 classes of' in unused
    assert 'are not used; model.num_classes=2' in unused
    assert 'this run is long for a CPU' in unused
    assert f'For a CPU, add {FOR_A_CPU}\n' in unused
    docs = (ROOT / 'docs' / 'training.md').read_text()
    assert all(flag in docs for flag in FOR_A_CPU.split())
    assert f'error: model.num_classes: 1, but {folder} has 2 classes' in few


def test_a_config_file_without_all_fields(tmp_path):
    """The others have their defaults, and a mistake is one line, here of init_from."""
    files = []
    for name, fields in (('few', {'seed': 3}), ('wrong', {'init_from': 3})):
        files.append(tmp_path / f'{name}.py')
        files[-1].write_text(
            'from ml_collections import ConfigDict\n'
            f'def get_config():\n    return ConfigDict({fields})\n'
        )
    (code, out, error), (failed, _, wrong) = call_each(
        [['jaxunet.train', '--dry_run', f'--config={path}'] for path in files], tmp_path
    )
    assert code == 0, error
    assert "'seed': 3" in out
    assert failed == 2
    assert wrong.endswith('init_from: expected str, found 3 (int)\n')


def test_a_path_is_enough_for_images(tmp_path):
    """configs/images.py, with the path as a word of its own, as the page shows it without `=`."""
    files = {f'{i}.png': encoded(random_pixels(i, (20 + i, 30, 3))) for i in range(3)}
    folder = put(tmp_path, files, 'folder')
    config = f'--config={ROOT}/configs/images.py'
    dry = ['--dry_run', config, '--config.train.minutes=3', '--config.data.path', str(folder)]
    out = call('jaxunet.train', *dry)
    assert 'train.minutes=3: a run times its step first, and takes as many steps as fit' in out
    assert "'image_size': (20,)" in out
    assert "'steps': 4000" in out
    assert 'while training: grids dpmpp_2m in 20 steps, evaluations dpmpp_2m in 20 steps' in out
    assert 'parameters: ' in out
