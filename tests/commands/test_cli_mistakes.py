"""Mistakes on the command line: one line that says what to do, and nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
from support.commands import call_each
from support.tiny import tiny_config
from support.weight_cases import random_params

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.state import fresh_state
from jaxunet.weights.files import write_weights

MISTAKES = [
    (
        ['jaxunet.train', '--config.model.base_chanels=3'],
        '--config.model.base_chanels: unknown field; did you mean model.base_channels',
    ),
    (
        ['jaxunet.train', '--config.train.stepz=3'],
        '--config.train.stepz: unknown field; did you mean train.steps?',
    ),
    (
        ['jaxunet.train', '--config.optimizer.lr=3'],
        '--config.optimizer.lr: unknown field; optimizer has name, learning_rate, ',
    ),
    (['jaxunet.train', '--config.learning_rate=3'], 'did you mean optimizer.learning_rate'),
    (['jaxunet.train', '-config.learning_rate=3'], 'did you mean optimizer.learning_rate'),
    (
        ['jaxunet.train', '--config.train.steps=many'],
        '--config.train.steps=many: expected a whole number',
    ),
    (
        ['jaxunet.train', '--config.model.channel_mult=1,x,0.5'],
        "error: the config is not valid: model.channel_mult[1]: expected float, found 'x' (str)\n",
    ),
    (['jaxunet.train', '--config.model=3'], '--config.model: is a section; set one of its fields'),
    (['jaxunet.train', '--config=nowhere.py'], 'no file or recipe nowhere.py; recipes: '),
    (
        ['jaxunet.train', '--config', 'digits', '--config.train.steps=2', '--config=images'],
        '--config: digits and images are given; give one of them',
    ),
    (['jaxunet.train', '--config', 'imges'], 'recipes: cifar10, digits, edm_cifar10, elephants64'),
    (
        ['jaxunet.train', '--data.batch_size=4'],
        "Unknown command line flag 'data.batch_size'; did you mean --config.data.batch_size?",
    ),
    (
        ['jaxunet.train', '--precision=float16'],
        "Unknown command line flag 'precision'; did you mean --config.precision?",
    ),
    (
        ['jaxunet.train', '--batch_size=4'],
        'did you mean --config.data.batch_size or --config.evaluation.batch_size?',
    ),
    (
        ['jaxunet.train', '--config.model.remat=yes'],
        "flag --config.model.remat=yes: expected true or false, found 'yes'",
    ),
    (['jaxunet.train', '--wrkdir=x'], "Unknown command line flag 'wrkdir'. Did you mean: workdir"),
    (
        ['jaxunet.train', 'configs/digits.py'],
        "unexpected argument 'configs/digits.py'; did you mean --config=configs/digits.py or "
        '--config.data.path=configs/digits.py?\nSee --help.',
    ),
    (['jaxunet.train', '--config=digits', 'x.zip'], "'x.zip'; did you mean --config.data.path=x."),
    (['jaxunet.sample', 'runs/x'], "argument 'runs/x'; did you mean --checkpoint=runs/x?\nSee --"),
    (['jaxunet.sample', '--checkpoint=RUN', 'x'], "argument 'x'; every option is a flag\nSee --h"),
    (['jaxunet.export', 'runs/x'], "argument 'runs/x'; did you mean --checkpoint=runs/x?"),
    (['jaxunet.demo', 'runs/x'], "argument 'runs/x'; did you mean --checkpoint=runs/x?"),
    (['jaxunet.evaluate', 'x'], "argument 'x'; did you mean --checkpoint=x or --samples=x?"),
    (['jaxunet.prepare_data', 'x'], "argument 'x'; did you mean --input=x?"),
    (
        ['jaxunet.train', '--config.backend=cuda'],
        'or use backend=pallas on a Hopper GPU, or xla, which runs everywhere',
    ),
    (['jaxunet.train', '--config.data.path=nowhere'], 'nowhere'),
    (
        ['jaxunet.sample', '--checkpoint=FOUR', '--output=x.png', '--num_samples=100000'],
        'x.png: PNG: expected images with 1 channel (grey) or 3 (RGB), found 4; save as .npz',
    ),
    (['jaxunet.sample', '--checkpoint=FOUR', '--output=x/'], 'x: PNG: expected images with 1 ch'),
    (
        ['jaxunet.train', '--workdir=~no_user/x'],
        'flag --workdir=~no_user/x: ~no_user/x: there is no user "no_user" on this machine; give '
        'the whole path, or ./~no_user/x for a file of that very name',
    ),
    (['jaxunet.train', '--config=~no_user/x.py'], '~no_user/x.py: there is no user "no_user"'),
    (
        ['jaxunet.train', '--config.parallel.devices=99'],
        'parallel.devices: 99 asked for, but this machine has 1',
    ),
    (
        ['jaxunet.train', '--config.train.minutes=3', '--config.train.steps=40'],
        'train.minutes: the budget of 3 minutes sets the number of steps; leave',
    ),
    (
        ['jaxunet.train', '--config.model.num_classes=3'],
        'model.num_classes: 3, but digits: has 10 classes',
    ),
    (['jaxunet.train', '--config.init_from=nowhere.bin'], 'nowhere.bin: no such file or folder'),
    (
        ['jaxunet.train', '--config.data.image_size=8', '--config.data.image_size=16'],
        '--config.data.image_size: given twice',
    ),
    (
        ['jaxunet.train', '--config.data.image_size=16x16'],
        "data.image_size: expected SIDE or HEIGHT,WIDTH, such as 64 or 48,64, found '16x16'",
    ),
    (
        ['jaxunet.train', '--config.seed=4294967296'],
        'seed: expected 0 to 4294967295, found 4294967296',
    ),
    (
        ['jaxunet.train', '--dry_run', '--config.diffusion.steps=2147483648'],
        'diffusion.steps: expected at most 1000000, found 2147483648',
    ),
    (
        ['jaxunet.train', '--dry_run', '--config.model.num_res_blocks=1000000'],
        'model.num_res_blocks: expected at most 64, found 1000000',
    ),
    (
        ['jaxunet.train', '--restarts=2', '--cluster=ompi'],
        '--restarts: mpirun cannot start one of its processes again',
    ),
    (['jaxunet.train', '--coordinator=localhost:1'], '--num_processes: missing'),
    (['jaxunet.sample'], 'error: --checkpoint: missing\nSee --help.'),
    (['jaxunet.metrics.train_features'], 'error: --reference, --output: missing\nSee --help.'),
    (
        ['jaxunet.metrics.train_features', '--epochs=many'],
        "flag --epochs=many: expected a whole number, found 'many'",
    ),
    (['jaxunet.sample', '--checkpoint=nowhere'], 'nowhere: no such file or folder'),
    (['jaxunet.sample', '--checkpoint=RUNX'], 'no such file or folder; did you mean "tiny"?'),
    (['jaxunet.sample', '--checkpoint=RUN/..'], 'nor a checkpoint in one; it holds the workdirs t'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--output=/proc/version/x.png'],
        '--output: /proc/version/x.png: cannot be written; check the name',
    ),
    (
        [
            'jaxunet.evaluate',
            *('--samples=digits:', '--reference=digits:', '--features=nowhere'),
            '--write_statistics=/proc/version/x.npz',
        ],
        '--write_statistics: /proc/version/x.npz: cannot be written; check the name',
    ),
    (
        [
            'jaxunet.metrics.train_features',
            *('--reference=nowhere', '--output=/proc/version/x.npz'),
        ],
        '--output: /proc/version/x.npz: cannot be written; check the name',
    ),
    (['jaxunet.sample', '--checkpoint=RUN', '--output=x.gif'], 'expected a name that ends in .png'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--sampler=dimm'],
        'value should be one of <ddpm|ddim|dpmpp_2m|unipc|heun',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--backend=xls'],
        '--backend: expected one of auto, xla, pallas, cuda, found \'xls\'; did you mean "xla"',
    ),
    (['jaxunet.sample', '--checkpoint=RUN', '--num_samples=0'], 'num_samples'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--eta=0.3'],
        'eta: only sampler=ddim or sampler=dpmpp_2m has it',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--sampler=ddpm', '--skip_schedule=karras'],
        '--skip_schedule: karras has no effect on 40 of 40 timesteps; leave it out, or give',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--class_labels='],
        '--class_labels: expected labels such as 0,1,2, or names, found none; leave the flag out',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--class_labels=10'],
        "--class_labels: expected whole numbers from 0 to 9, found '10'\n",
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--new_attention_order'],
        'leave --new_attention_order out',
    ),
    (['jaxunet.sample', '--checkpoint=RUN', '--ema=0.5'], '--ema: expected one of 0.995 or none'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--devices=3'],
        '--devices: 3 asked for, but this machine has 1',
    ),
    (['jaxunet.sample', '--checkpoint=RUN/checkpoints/5'], 'no such file or folder'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--num_samples=99999999999999'],
        '--num_samples=99999999999999',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--seed=4294967296'],
        'flag --seed=4294967296: 4294967296 is not an integer in the range [0, 4294967295]',
    ),
    (
        ['jaxunet.evaluate', '--checkpoint=RUN', '--reference=digits:', '--seed=4294967296'],
        'flag --seed=4294967296: 4294967296 is not an integer in the range [0, 4294967295]',
    ),
    (['jaxunet.export', '--checkpoint=nowhere', '--output=m.onnx'], 'm.onnx: extension: expected'),
    (
        ['jaxunet.export', '--checkpoint=nowhere', '--output=/proc/version/m.pt'],
        '--output: /proc/version/m.pt: cannot be written; check the name: /proc/version is a f',
    ),
    (
        ['jaxunet.export', '--checkpoint=RUN', '--output=m.pt', '--config=/bin/sh'],
        '--config: expected a Python file with get_config()',
    ),
    (
        ['jaxunet.export', '--checkpoint=RUN', '--output=m.bin'],
        'model.base_channels: expected a multiple of 32, found 8\n',
    ),
    (
        ['jaxunet.export', '--checkpoint=RUN', '--output=m.bin', '--with_optimizer', '--ema=0.995'],
        '--ema: 0.995 with --with_optimizer',
    ),
    (
        ['jaxunet.export', '--output=m.bin'],
        '--checkpoint, --init: expected one of them, found none',
    ),
    (['jaxunet.export', '--output=m.bin', '--init'], '--init: needs --config'),
    (['jaxunet.export', '--output=m.bin', '--init', '--ema=none'], '--ema: no effect with --init'),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--num_heads=2', '--schedule=cosine'],
        'a checkpoint already describes its model; leave --num_heads, --schedule out',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--preset=adm_imagenet64', '--image_size=64'],
        '--preset: adm_imagenet64 already describes the model, found --image_size beside it',
    ),
    (
        ['jaxunet.sample', '--checkpoint=RUN', '--preset=adm_imagenet64'],
        'holds its own config; leave --config and --preset out',
    ),
    (
        ['jaxunet.sample', '--checkpoint=/usr', '--num_heads=2'],
        '/usr: neither a workdir with checkpoints/ nor a checkpoint in one',
    ),
    (
        ['jaxunet.sample', '--checkpoint=/usr', '--preset=adm_imagenet64'],
        '/usr: neither a workdir with checkpoints/ nor a checkpoint in one',
    ),
    (
        ['jaxunet.export', '--checkpoint=RUN', '--output=m.pt', '--image_size=big'],
        "--image_size: expected SIDE or HEIGHT,WIDTH, such as 64 or 48,64; found 'big'",
    ),
    (['jaxunet.prepare_data', '--input=nowhere', '--output=x.npz', '--image_size=8'], 'nowhere'),
]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """The folder of a run on the embedded digits, with a checkpoint."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    config = tiny_config(model={'num_classes': 10, 'label_dropout': 0.1})
    checkpoints = checkpoint.Checkpoints(workdir, keep=1)
    state = fresh_state(config).replace(step=np.int32(6))
    checkpoints.save(6, state, config, RunFacts(class_names=tuple('0123456789')))
    checkpoints.wait()
    checkpoints.close()
    return workdir


@pytest.fixture(scope='module')
def four(tmp_path_factory):
    """Weights of a network for images of four channels."""
    path = tmp_path_factory.mktemp('weights') / 'four.safetensors'
    config = tiny_config(model={'image_channels': 4, 'num_classes': 0, 'label_dropout': 0.0})
    write_weights(path, random_params(config), config)
    return path


def test_mistakes_have_one_line_and_exit_2(run, four, tmp_path):
    commands = [
        [a.replace('RUN', str(run)).replace('FOUR', str(four)) for a in arguments]
        for arguments, _ in MISTAKES
    ]
    for number, (code, _, error) in enumerate(call_each(commands, tmp_path)):
        arguments, message = MISTAKES[number]
        assert code == 2, (arguments, error)
        assert message in error, (arguments, error)
        assert 'Traceback' not in error, (arguments, error)
        # Nothing was allocated, nothing is left behind.
        assert not list((tmp_path / str(number)).iterdir()), arguments
