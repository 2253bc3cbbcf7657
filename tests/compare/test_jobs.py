"""Jobs of `jaxunet.compare.queue`: files of them, messages for wrong ones, and times of a step."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import zipfile

import pytest
from PIL import Image
from support.configs import CONFIGS, load

from jaxunet.compare import step_cost
from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.jobs import Job, base_config, completed
from jaxunet.compare.step_times import step_times
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
JOBS, TINY = RESULTS / 'recipes/jobs.py', RESULTS / 'methods/tiny.toml'


@pytest.fixture(scope='module')
def job():
    """The first of the small jobs."""
    return read_jobs(str(TINY), '')[0]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'seconds': ()}, 'expected ascending times'),
        ({'seconds': (2.0, 1.0)}, 'expected ascending times'),
        ({'seconds': (1.0, math.inf)}, 'expected ascending times'),
        ({'samplers': ()}, 'samplers: expected at least one, found none'),
        ({'samplers': ('ddim',)}, 'expected NAME:STEPS'),
        ({'samples': 0}, 'samples: expected 1 or more, found 0'),
        ({'config': 'nowhere.py'}, 'no file nowhere.py'),
        ({'fields': {'diffusion.step': 5}}, 'diffusion.step: unknown field'),
        ({'averages': ('0.995', '0.2')}, "averages: expected some of 0.995, 0.15, which .* '0.2'"),
        ({'references': {}}, 'averages are chosen by fid'),
        ({'choosing': 0}, 'choosing: expected samples, found 0'),
    ],
)
def test_a_wrong_job_is_one_line(job, tmp_path, changes, message):
    wrong = dataclasses.replace(job, **changes)
    path = tmp_path / 'jobs.py'
    path.write_text(
        'from math import inf\n'
        f'from jaxunet.compare.jobs import Job\ndef get_jobs(part, data):\n    return [{wrong!r}]\n'
    )
    with pytest.raises(UserError, match=message):
        read_jobs(str(path), '')


def test_a_falling_rate_reaches_the_last_time(job):
    """Also where rounding gives 180 / 0.00015 = 1,200,000, which times 0.00015 is less than 180."""
    falling = {**job.fields, 'optimizer.schedule': 'cooldown'}
    job = dataclasses.replace(job, fields=falling, seconds=(180.0,))
    for step_seconds, steps in ((0.15 / 1e3, 1_200_001), (0.0045, 40_000)):
        found = job.load_config(step_seconds=step_seconds).train
        assert (found.steps, found.steps * step_seconds >= 180) == (steps, True)


def test_two_jobs_of_one_name_are_refused(job, tmp_path):
    path = tmp_path / 'jobs.py'
    path.write_text(
        'from jaxunet.compare.jobs import Job\n'
        f'def get_jobs(part, data):\n    return [{job!r}] * 2\n'
    )
    with pytest.raises(UserError, match='two jobs are called digits_uniform_seed0'):
        read_jobs(str(path), '')


def test_the_committed_jobs_are_valid():
    endings = ('endings', 'endings_costs', 'endings_tiny')
    for part in ('all', 'minute', 'alone', 'costs', 'digits', 'tiny', *endings):
        found = read_jobs(f'{JOBS}:{part}', '/data')
        assert all(isinstance(job, Job) for job in found)
    with pytest.raises(UserError, match='one of all, objects, minute, three, ten, images'):
        read_jobs(f'{JOBS}:other', '')
    assert next(iter(step_cost.read_configs(f'{JOBS}:costs', '/data'))) == 'epsilon-linear'


def test_endings_have_the_cost_of_few_programs():
    """Those that differ in their rates and times are measured once; each has a number."""
    jobs = read_jobs(f'{JOBS}:endings', '/data')
    configs = step_cost.read_configs(f'{JOBS}:endings_costs', '/data')
    assert {job.case for job in jobs} <= configs.keys()
    assert next(iter(configs)) == 'constant-1'
    kinds = {(c.data.batch_size, c.optimizer.name, c.model.dropout) for c in configs.values()}
    assert len(kinds) == len(set(map(step_cost._step_of, configs.values()))) == 5
    assert [job.name for job in jobs if job.picture] == [
        f'{data}64_{case}-180s_seed0'
        for data in ('objects', 'elephants')
        for case in ('constant-1', 'linear-4')
    ] + [f'{data}64_dropout-linear-4-180s_seed0' for data in ('elephants', 'emoji')]


def test_the_recipe_itself_is_a_job(tmp_path):
    """Its images decide what configs/images.py leaves open."""
    Image.new('RGB', (64, 64), 'red').save(tmp_path / 'image.png')
    with zipfile.ZipFile(tmp_path / 'objects64_train.zip', 'w') as archive:
        for i in range(40):
            archive.write(tmp_path / 'image.png', f'{i}.png')
    job, _ = read_jobs(f'{JOBS}:images', str(tmp_path))
    config = job.load_config()
    assert config.image_shape == (64, 64, 3)
    assert (config.diffusion.objective, config.data.batch_size) == ('v', 32)
    assert (config.optimizer.schedule, config.optimizer.learning_rate) == ('linear', 4e-4)


def test_the_rate_that_a_recipe_leaves_open_goes_with_the_schedule_of_the_runs():
    """Times end the runs of a comparison, so their rate is constant."""
    values = load(next(path for path in CONFIGS if path.stem == 'images'))
    values.data.path = 'digits:'
    fields = {'data.path': 'digits:'}
    job = Job('images', 'digits', 'configs/images.py', fields, (1,), ('heun:2',), {})
    falling = dataclasses.replace(job, fields=fields | {'optimizer.schedule': 'linear'})
    for config, chosen in (
        (base_config(completed(values)), ('constant', 2e-4)),
        (job.load_config(), ('constant', 2e-4)),
        (falling.load_config(), ('linear', 8e-4)),
    ):
        assert (config.optimizer.schedule, config.optimizer.learning_rate) == chosen


def cost_row(**ratios):
    costs = {case: {'ms': 4 * r, 'ratio': r, 'quartiles': [r, r]} for case, r in ratios.items()}
    return {'costs': costs, 'rounds': 2, 'steps': 8, 'batch': 4, 'device': 'GPU'}


def test_the_milliseconds_of_a_step_by_case(tmp_path):
    """A later row counts by its ratios: another day, or another GPU, may be slower."""
    path = tmp_path / 'step_ms.jsonl'
    later = cost_row(uniform=1.0, flow=1.5)
    for cost in later['costs'].values():
        cost['ms'] *= 2
    for row in (cost_row(uniform=1.0, flow=1.25, policy=2.0), later):
        rows.append(path, row)
    cases = ['uniform', 'flow', 'policy', 'flow']
    assert step_times(str(path), cases) == {'uniform': 4.0, 'flow': 6.0, 'policy': 8.0}
    assert step_times('5.5', cases[:2]) == {'uniform': 5.5, 'flow': 5.5}
    assert step_times('0', cases) == {}
    with pytest.raises(UserError, match='has no steps of muon, edm; add them by python'):
        step_times(str(path), ['muon', 'flow', 'edm'])
    with pytest.raises(UserError, match=r'step_ms: no file .*no.jsonl; make it by python'):
        step_times(str(tmp_path / 'no.jsonl'), cases)
    for place in ('--step_ms', 'comparison.toml: step_ms'):
        with pytest.raises(UserError, match=f'^{place}: expected 0 or more milliseconds'):
            step_times('-1', cases, place)
        with pytest.raises(UserError, match=f'^{place}: .* has no steps of muon'):
            step_times(str(path), ['muon'], place)
    rows.append(path, cost_row(flow=1.0, uniform=0.8))
    with pytest.raises(UserError, match='that begin with one case, found uniform and flow'):
        step_times(str(path), cases)
    path.write_text('{"costs": {"flow": 1}, "rounds": 1, "steps": 1, "batch": 1, "device": ""}\n')
    with pytest.raises(UserError, match='line 1: costs: flow: expected a JSON object, found 1'):
        step_times(str(path), cases)


@pytest.mark.parametrize('arguments', [[], ['jobs.py', 'data', 'more']])
def test_step_costs_of_no_file(arguments):
    with pytest.raises(UserError, match=r'expected CONFIGS\.json, or FILE:PART'):
        step_cost.main(['step_cost', *arguments])
