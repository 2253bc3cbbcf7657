"""Comparison files: what they state, and messages for those that are wrong."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

from jaxunet.compare import comparison_file, step_cost
from jaxunet.compare.comparison_file import read_comparison, read_jobs
from jaxunet.compare.tables import Results
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.options import SamplerConfig

ROOT = pathlib.Path(__file__).parents[2]
METHODS = ROOT / 'docs/results/methods'
TEXT = f"""
protocol = "{METHODS}/PROTOCOL.md"
config = "{ROOT}/configs/digits.py"
baseline = "uniform"
seeds = [0, 1]
seconds = [1, 2.5]
features = "features.npz"
rows = "rows.jsonl"
step_ms = "steps.jsonl"

[[rounds]]
methods = ["uniform", "mine", "flow+muon"]
seeds = [1]

[[rounds]]
methods = ["flow+muon"]
seeds = [0]

[methods.mine]
from = "adaptive"
fields = {{"timesteps.adaptive_bins" = 8}}

[images]
name = "digits"
path = "digits:"

[fields]
"diffusion.objective" = "epsilon"
"data.image_size" = [8]

[samplers]
epsilon = ["ddpm:4", "heun:2"]
flow = ["heun:2"]

[samples]
count = 12
batch_size = 4
picture = 9
guidance_scale = 1

[[references]]
path = "train.npz"
name = "train"
metrics = ["precision", "fid"]

[[references]]
path = "digits:"
name = "test"
metrics = ["kid"]
"""


@pytest.fixture
def comparison(tmp_path):
    return write(tmp_path, TEXT)


def write(folder, text):
    path = folder / 'comparison.toml'
    path.write_text(text)
    return path


def test_a_file_states_its_jobs(comparison):
    jobs = read_comparison(comparison).jobs('', 'data')
    assert [(job.case, job.seed) for job in jobs] == [
        ('uniform', 1),
        ('mine', 1),
        ('flow+muon', 1),
        ('flow+muon', 0),
    ]
    mine, joined = jobs[1:3]
    assert mine.fields == {
        'data.path': 'digits:',
        'diffusion.objective': 'epsilon',
        'data.image_size': (8,),
        'loss.weighting': 'min_snr',
        'timesteps.sampler': 'adaptive',
        'timesteps.adaptive_bins': 8,
    }
    assert (mine.seconds, mine.samplers) == ((1, 2.5), ('ddpm:4', 'heun:2'))
    assert (mine.samples, mine.batch_size, mine.averages) == (12, 4, ())
    assert mine.references == {
        'data/train.npz': ('train', ('precision', 'fid')),
        'digits:': ('test', ('kid',)),
    }
    assert joined.fields['optimizer.name'] == 'muon'
    assert joined.samplers == ('heun:2',)
    assert [job.picture for job in jobs] == [9, 9, 9, 0]


def test_methods_of_other_times_and_changed_ones(tmp_path):
    text = TEXT.replace('from = "adaptive"', 'from = "adaptive"\nseconds = [0.5]')
    changed = '[methods."flow+muon"]\nfrom = "flow+muon"\nfields = {"optimizer.name" = "adam"}\n'
    jobs = read_comparison(write(tmp_path, text.replace('[images]', f'{changed}\n[images]'))).jobs(
        '', ''
    )
    assert [job.seconds for job in jobs] == [(1, 2.5), (0.5,), (1, 2.5), (1, 2.5)]
    assert jobs[2].fields['optimizer.name'] == 'adam'
    assert jobs[2].fields['diffusion.objective'] == 'flow'


def test_how_samples_are_drawn_and_compared(tmp_path):
    """Without a protocol, with options of the samplers, and by a metric that is no distance."""
    text = TEXT.replace(f'protocol = "{METHODS}/PROTOCOL.md"', 'by = ["precision"]')
    text = text.replace('heun:2', 'ddim:2').replace('ddpm:4', 'ddim:4')
    text = text.replace('picture = 9', 'eta = 0.5').replace('"features.npz"', '"inception"')
    comparison = read_comparison(write(tmp_path, text.replace('path = "train.npz"\n', '')))
    (job, *_) = comparison.jobs('', 'data')
    assert job.sampler('ddim:4') == SamplerConfig('ddim', 4, eta=0.5, guidance_scale=1)
    assert job.references == {'': ('train', ('precision', 'fid')), 'digits:': ('test', ('kid',))}
    assert str(comparison.features) == 'inception'
    assert [metric.title for metric in comparison.distances] == ['precision']
    rows = [
        {'case': 'mine', 'seed': 0, 'seconds': 1, 'sampler': sampler, 'values': {'train': values}}
        for sampler, values in (('a', {'precision': 0.25}), ('b', {'precision': 0.5}), ('c', {}))
    ]
    assert Results(comparison, rows).cells['mine', 1] == [rows[1]]


def test_paths_of_fields_need_no_quotes(comparison):
    quoted = read_comparison(comparison).jobs('', '')
    plain = TEXT.replace('"timesteps.adaptive_bins"', 'timesteps.adaptive_bins')
    plain = plain.replace('"diffusion.objective"', 'diffusion.objective')
    plain = plain.replace('"data.image_size"', 'data.image_size')
    assert read_comparison(write(comparison.parent, plain)).jobs('', '') == quoted
    assert quoted[0].load_config().data.path == 'digits:'


def test_paths_are_relative_to_the_file(comparison):
    found = read_comparison(comparison)
    assert found.features == comparison.parent / 'features.npz'
    assert found.rows == comparison.parent / 'rows.jsonl'
    assert found.step_ms == str(comparison.parent / 'steps.jsonl')
    assert found.protocol == METHODS / 'PROTOCOL.md'


def test_some_methods_of_a_file(comparison):
    jobs = read_jobs(f'{comparison}:flow+muon,uniform', '')
    assert [(job.case, job.seed) for job in jobs] == [
        ('flow+muon', 1),
        ('uniform', 1),
        ('flow+muon', 0),
    ]
    with pytest.raises(UserError, match=r"comparison.toml:unifrm: .* found 'unifrm'; did you mean"):
        read_jobs(f'{comparison}:unifrm', '')


def test_metrics_have_titles(comparison):
    found = read_comparison(comparison)
    titles = ['precision', 'Fréchet distance', 'kernel distance to test images']
    assert [metric.title for metric in found.metrics] == titles
    assert [metric.title for metric in found.distances] == ['Fréchet distance']
    row = {'values': {'train': {'fid': 2.0}}}
    assert found.distances[0].find(row) == 2.0


WRONG = [
    ('seconds = [1, 2.5]', 'second = [1, 2.5]', 'seconds: expected a list of numbers, found none'),
    ('baseline', 'extra = 1\nbaseline', 'extra: unknown key; expected some of '),
    ('count = 12', 'counts = 12', 'samples.count: expected a whole number, found none'),
    ('count = 12', 'count = 12\ncounts = 2', 'samples.counts: unknown key; did you mean "count"'),
    ('seeds = [0, 1]', 'seeds = [0, true]', 'seeds: expected a list of whole numbers'),
    ('seeds = [1]', 'seeds = [2]', r'rounds\[0\].seeds: expected some of \(0, 1\), found 2'),
    ('seconds = [1, 2.5]', 'seconds = 3', 'seconds: expected a list of numbers, found 3'),
    ('seconds = [1, 2.5]', 'seconds = [2, 1]', 'seconds: expected ascending times'),
    ('seconds = [1, 2.5]', 'seconds = [1, nan]', 'seconds: expected ascending times'),
    ('methods = ["uniform", ', 'methods = ["unifrm", ', "rounds: 'unifrm' is not one of"),
    ('picture = 9', 'picture = -1', 'picture: expected 0 or more, found -1'),
    ('count = 12', 'count = "x"', "samples.count: expected a whole number, found 'x'"),
    ('"flow+muon"]\nseeds = [1]', '"flw"]\nseeds = [1]', "rounds: 'flw' is not one of"),
    ('seeds = [0]', 'seeds = [0, 1]', r'rounds: flow\+muon with seed 1 is there twice'),
    ('baseline = "uniform"', 'baseline = "p2"', "baseline: expected one of .*, found 'p2'"),
    ('"mine", ', '', 'methods.mine: expected a method of a round'),
    ('[methods.mine]', '[methods.flow]', 'methods.flow: expected a new name'),
    ('from = "adaptive"', 'from = "adaptve"', "methods.mine.from: 'adaptve' is not one of"),
    ('"timesteps.adaptive_bins"', '"train.steps"', 'methods.mine.fields.train.steps: is set by'),
    ('"data.image_size" = [8]', '"seed" = 1', 'fields.seed: is set by every comparison'),
    ('"data.image_size" = [8]', 'train.keep = 2', 'fields.train.keep: is set by every'),
    ('"data.image_size" = [8]', '"init_from" = "x"', 'fields.init_from: is set by every'),
    ('"data.image_size" = [8]', 'evaluation.samples = 9', 'fields.evaluation.samples: is set by'),
    ('"data.image_size" = [8]', '"data.x.crop" = 1', 'uniform_seed1: data.x.crop: unknown field'),
    ('"data.image_size" = [8]', '"backend.x" = 1', 'uniform_seed1: backend.x: unknown field'),
    ('seeds = [0, 1]', 'seeds = [0, 1, 2]', 'seeds: expected a round with seed 2, found none'),
    ('name = "digits"', 'name = "../x"', 'x_uniform_seed1: expected names .* without /'),
    (
        '[samples]',
        '[averages]\nsamples = 5\n\n[samples]',
        'averages.samples: choose one of several averages; expected two names or more, found 0',
    ),
    ('"data.image_size" = [8]', '"data.sizes" = 1', 'uniform_seed1: data.sizes: unknown field'),
    ('flow = ["heun:2"]', '', r'samplers: expected those of flow, the objective of flow\+muon'),
    ('"diffusion.objective" = "epsilon"', '', 'fields: expected "diffusion.objective"'),
    ('flow = ["heun:2"]', 'flow = ["heun"]', 'samplers: expected NAME:STEPS'),
    ('flow = ["heun:2"]', 'flow = ["huen:2"]', 'samplers: expected one of .*did you mean "heun"'),
    ('["precision", "fid"]', '["precison"]', 'metrics: .*\'precison\'; did you mean "precision"'),
    ('["precision", "fid"]', '["precision"]', r'references\[0\].metrics: expected one of fid'),
    ('name = "test"', 'name = "train"', 'references: expected different names and paths'),
    ('count = 12', f'count = {10**30}', 'expected numbers of at most 64 bits, found a longer one'),
    ('count = 12', f'count = {"9" * 5000}', 'expected numbers of at most 64 bits'),
    ('count = 12', f'count = {10**18}', 'samples: expected at most 10,000,000, found 1000'),
    (
        '"heun:2"]\n\n[samples]',
        '"heun:²"]\n\n[samples]',
        "expected NAME:STEPS or .*, found 'heun:²'",
    ),
    ('flow = ["heun:2"]', 'flow = ["heun:10001"]', 'samplers: expected at most 10,000 steps'),
    ('flow = ["heun:2"]', 'flow = ["heun:2:x"]', "flow.muon_seed1: skip_schedule: .*'x'"),
    ('baseline', f'{"a." * 30_000}a = 1\nbaseline', 'expected at most 32 levels of keys and lists'),
    ('baseline', f'x = {"[" * 400}{"]" * 400}\nbaseline', 'expected at most 32 levels of keys'),
    ('baseline', f'x = {"[" * 40}{"]" * 40}\nbaseline', 'expected at most 32 levels of keys'),
    ('baseline', f'# {"x" * 2**20}\nbaseline', 'expected at most 1,048,576 bytes, found more'),
    (
        '[methods.mine]',
        r'[methods."a\u0000b"]',
        r"texts without control characters, found 'a.x00b'",
    ),
    ('name = "digits"', f'name = "{"x" * 200}"', 'expected names .* of at most 150 bytes together'),
    ('methods = ["flow+muon"]', f'methods = {["p2"] * 10_000}', 'rounds: expected at most 10,000'),
    (
        'configs/digits.py',
        'README.md',
        r'expected a Python file with get_config.., found SyntaxErr',
    ),
    (
        'objective" = "epsilon"',
        'objective" = [[1]]',
        r'samplers: expected those of .list,., the objective',
    ),
    ('baseline', 'by = ["kid"]\nbaseline', 'metrics: expected one of kid, by which the methods'),
    ('baseline', 'by = ["fid", "kid"]\nbaseline', "by: expected some of precision, fid, .* 'kid'"),
    ('picture = 9', 'eta = 0.5', 'uniform_seed1: eta: only sampler=ddim or .* has it'),
    ('PROTOCOL.md', 'PROTOCOLS.md', 'protocol: no file .*did you mean "PROTOCOL.md"'),
    ('configs/digits.py', 'configs/digts.py', 'config: no file .*did you mean "digits.py"'),
    ('seeds = [0, 1]', 'seeds = [0, 1', 'comparison.toml: expected TOML, found another text'),
]


@pytest.mark.parametrize(('good', 'bad', 'message'), WRONG)
def test_a_wrong_file_is_one_line(tmp_path, good, bad, message):
    assert good in TEXT
    with pytest.raises(UserError, match=message) as found:
        read_comparison(write(tmp_path, TEXT.replace(good, bad))).jobs('', '')
    assert str(found.value).startswith(str(tmp_path / 'comparison.toml'))
    assert '\n' not in str(found.value)


def test_texts_with_many_dots_are_no_long_keys(tmp_path):
    """Comments have dots, too; a text without an end is told by its line, and soon."""
    dots = '.x' * 100
    text = f"title = '{dots}'\n# {dots}\n{TEXT}".replace('samplers]', f'samplers] # "{dots}')
    assert read_comparison(write(tmp_path, text)).title == dots
    with pytest.raises(UserError, match=r'expected TOML, found another text: .* line'):
        read_comparison(write(tmp_path, '"""\n' + '\\"""\n' * 100_000))


def test_a_file_that_is_missing(comparison):
    with pytest.raises(
        UserError, match=r'no file .*comparson.toml; did you mean "comparison.toml"'
    ):
        read_comparison(comparison.with_name('comparson.toml'))


def test_the_committed_files_are_valid():
    for path in sorted(ROOT.glob('docs/results/*/*.toml')):
        assert read_jobs(str(path), '/data'), path


def test_a_field_may_serve_a_method_of_another_part(tmp_path):
    """`mine` draws adaptively; no method has `policy`."""
    served = TEXT.replace('[fields]', '[fields]\n"timesteps.adaptive_memory" = 100.0')
    for part in ('', ':uniform'):
        read_jobs(f'{write(tmp_path, served)}{part}', '')
    path = write(tmp_path, TEXT.replace('[fields]', '[fields]\n"timesteps.policy_every" = 3'))
    with pytest.raises(
        UserError, match=r'comparison\.toml: .* timesteps\.policy_every: 3 has no effect'
    ):
        read_jobs(f'{path}:uniform', '')
    read_jobs(f'{path}:uniform', '', begun=True)


def test_the_jobs_of_the_methods():
    found = read_jobs(f'{METHODS}/methods.toml', '/data')
    cases = list(dict.fromkeys(job.case for job in found))
    assert [job.case for job in found if job.seed == 1][:2] == cases[:2] == ['uniform', 'flow']
    assert all([j.seed for j in found if j.case == case] == [0, 1, 2] for case in cases)
    assert {len(job.samplers) for job in found} == {2}
    costs = step_cost.read_configs(f'{METHODS}/methods.toml', '/data')
    assert list(costs) == cases
    assert next(iter(costs)) == 'uniform', 'the ratios are to the first'
    assert costs['flow+muon'].optimizer.name == 'muon'


def test_all_keys_are_explained():
    """The docstring of jaxunet.compare.comparison_file is itself such a file."""
    lines = comparison_file.__doc__.splitlines()
    shown = tomllib.loads('\n'.join(line[4:] for line in lines if line.startswith('    ')))
    used = tomllib.loads(TEXT)
    assert shown.keys() >= used.keys()
    assert shown['samples'].keys() == used['samples'].keys()
