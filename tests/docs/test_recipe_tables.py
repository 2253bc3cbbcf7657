"""The tables and pictures of docs/results/recipes, from rows as the queue writes them."""

from __future__ import annotations

import json
import pathlib
import runpy

import numpy as np
import pytest
from PIL import Image
from support import recipe_tables as tables

PICTURES = pathlib.Path(__file__).parents[2] / 'docs/results/recipes/pictures.py'


def row(case, seconds, sampler, fid, *, seed=0, data='objects64', **values):
    steps = int(sampler.split(':')[1])
    return {
        'case': case,
        'data': data,
        'seed': seed,
        'seconds': seconds,
        'training_seconds': seconds + 0.1,
        'step': 100 * seconds,
        'batch_size': 32,
        'sampler': sampler,
        'evaluations': 2 * steps - 1 if sampler.startswith('heun') else steps,
        'num_samples': 2000,
        'seconds_per_sample': 0.002,
        'values': {
            'train': {'fid': fid, 'kid': 0.01, 'precision': 0.5, 'recall': 0.25, **values},
            'test': {'kid': 0.02},
        },
        'references': {'train': 9000, 'test': 1000},
        'features': 'classifier-1',
        'git': 'abc',
        'device': 'GPU',
        'versions': {'jax': '1'},
    }


ROWS = [
    row('v-cosine', 60, 'ddim:50', 60.0, copies=0.125),
    row('v-cosine', 60, 'dpmpp_2m:20', 50.0),
    row('v-cosine', 60, 'dpmpp_2m:20', 54.0, seed=1),
    row('v-cosine', 60, 'heun:25', 10.0),  # one seed only: does not count
    row('v-cosine', 180, 'ddim:50', 20.0),
    row('epsilon-linear', 60, 'ddim:50', 100.0),
    row('epsilon-linear', 600, 'ddim:50', 36.0),
    row('flow', 60, 'ddim:50', 36.0),
    row('edm', 60, 'heun:10', 90.0),
]


def cells(text):
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ][2:]


def test_the_best_sampler_of_most_seeds_is_shown():
    shown = cells(tables.objectives(ROWS))
    found = {(line[0], line[1], line[2]): line for line in shown}
    assert [line[0] for line in shown[:2]] == ['epsilon-linear'] * 2  # the baseline first
    line = found['v-cosine', '60', '50']
    assert line[3:7] == ['dpmpp_2m 20', '2', '6,000', '52 ± 2']
    assert line[7:] == ['10 ± 0', '20 ± 0', '0.5 ± 0', '0.25 ± 0', '']
    assert found['v-cosine', '180', '50'][3] == 'ddim 50'
    assert ('v-cosine', '180', '20') not in found  # no sampler within 20 evaluations
    assert found['edm', '60', '20'][3] == 'heun 10'
    assert 'GPU, jax 1, commit abc; 2000 samples' in tables.objectives(ROWS)


def test_sampling_times_of_processes_that_had_the_device_alone():
    shared = row('flow', 60, 'ddim:50', 36.0)
    del shared['seconds_per_sample']
    slower = {**row('v-cosine', 60, 'heun:25', 10.0), 'seconds_per_sample': 0.004}
    shown = cells(tables.sampling_times([row('edm', 60, 'heun:25', 9.0), slower, shared]))
    assert shown == [['heun 25', '49', '3.00', '2.00-4.00']]


def test_times_to_the_quality_of_the_baseline():
    found = {line[0]: line[1:] for line in cells(tables.sooner(ROWS))}
    assert found['epsilon-linear'] == ['600', '1.0']
    # From 52 after 60.1 s to 20 after 180.1 s: 36 is half way.
    assert found['v-cosine'] == ['120', '5.0']
    assert found['flow'] == ['≤ 60', '≥ 10.0']
    assert found['edm'] == ['not in 60', '']


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    both = [row('edm', 60, 'heun:10', 90.0), row('edm', 60, 'heun:10', 80.0)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, both)) + '\n')
    (found,) = tables.read(tmp_path)
    assert found['values']['train']['fid'] == 80.0


def test_without_rows_the_tables_say_so(tmp_path):
    found = tables.read(tmp_path)
    assert tables.objectives(found) == tables.elephants(found) == tables.NOTHING
    assert tables.sampling_times(found) == tables.NOTHING
    assert tables.sooner(found) == tables.pictures(tmp_path) == tables.NOTHING


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    """The pictures of a small output folder."""
    folder = tmp_path_factory.mktemp('recipes')
    animals = [
        row(case, s, 'heun:25', 5.0, data='elephants64', copies=s / 1000)
        for case in ('edm', 'flow')
        for s in (60, 180)
    ]
    lines = map(json.dumps, [*ROWS, *animals])
    (folder / 'rows.jsonl').write_text('\n'.join(lines) + '\n')
    (folder / 'pictures').mkdir()
    (folder / 'logs').mkdir()
    for r in animals:
        path = folder / 'pictures' / f'elephants64_{r["case"]}_seed0_{r["seconds"]}s.png'
        Image.fromarray(np.full((60, 60, 3), r['seconds'], np.uint8)).save(path)
        log = 'training_seconds,held_out_loss,seen_loss\n1.0,0.5,0.5\n2.0,,\n3.0,0.25,0.2\n'
        (folder / 'logs' / f'elephants64_{r["case"]}_seed0.csv').write_text(log)
    for r in ROWS:
        path = folder / 'pictures' / f'objects64_{r["case"]}_seed0_{r["seconds"]:g}s.png'
        Image.new('RGB', (120, 120)).save(path)
    script = runpy.run_path(str(PICTURES))
    output = tmp_path_factory.mktemp('drawn')
    script['main'].__globals__['HERE'] = output
    script['main']([folder])
    return output, animals


def test_all_pictures_are_drawn(drawn):
    output, _ = drawn
    for name in tables.PICTURES:
        with Image.open(output / name) as image:
            assert min(image.size) > 100
        assert f'results/recipes/{name})' in tables.pictures(output)


def test_the_grids_stand_by_objective_and_time(drawn):
    output, _ = drawn
    with Image.open(output / 'elephants.jpg') as image:
        canvas = np.asarray(image.convert('L')).astype(int)
    label = canvas.shape[0] // 2 - 60
    assert canvas.shape[1] == 120
    for top in (label, 2 * label + 60):
        assert abs(canvas[top + 20, 30] - 60) < 4
        assert abs(canvas[top + 20, 90] - 180) < 4


def test_copies_of_the_elephants_are_shown(drawn):
    _, animals = drawn
    assert [line[-1] for line in cells(tables.elephants(animals))] == ['0.06', '0.18'] * 2
