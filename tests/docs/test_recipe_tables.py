"""The tables and pictures of docs/results/recipes, from rows as the queue writes them."""

from __future__ import annotations

import json
import pathlib
import runpy
import tarfile

import numpy as np
import pytest
from PIL import Image
from support.markdown import cells

from tools.docs import recipe_tables as tables
from tools.docs import sharing_table

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


def test_the_best_sampler_of_most_seeds_is_shown():
    shown = cells(tables.objectives(ROWS))
    found = {(line[0], line[1]): line for line in shown}
    assert [line[0] for line in shown[:2]] == ['epsilon-linear'] * 2  # the baseline first
    line = found['v-cosine', '60']
    assert line[2:6] == ['dpmpp_2m 20', '2', '6,000', '52 ± 2']
    assert line[6:] == ['10 ± 0', '20 ± 0', '0.5 ± 0', '0.25 ± 0', '']
    assert found['v-cosine', '180'][2] == 'ddim 50'
    assert found['edm', '60'][2] == 'heun 10'
    assert 'GPU, jax 1, commit abc; 2000 samples' in tables.objectives(ROWS)


def test_rows_of_several_features_are_never_in_one_table():
    other = {**row('flow', 180, 'heun:25', 5.0), 'features': 'classifier-2'}
    with pytest.raises(ValueError, match='classifier-1, classifier-2'):
        tables.objectives([*ROWS, other])


def test_each_device_is_shown_with_its_commits():
    other = {**row('flow', 180, 'heun:25', 5.0), 'device': 'TPU', 'git': 'def'}
    assert 'GPU, jax 1, commit abc; TPU, jax 1, commit def; 2000' in tables.objectives(
        [ROWS[0], other, *ROWS]
    )


def test_throughput_of_processes_that_share_a_gpu():
    def of(processes, mps, case, ms):
        own = {'processes': processes, 'mps': mps, 'case': case, 'ms': ms}
        return {**row('edm', 60, 'heun:10', 9.0), **own, 'quartiles': [ms - 1, ms, ms + 1]}

    rows = [of(2, True, 'flow', 8.0), of(1, False, 'edm', 5.0), of(2, True, 'edm', 8.0)]
    assert cells(sharing_table.table(rows)) == [
        ['1', 'no', 'edm', '5.00 (4.00 to 6.00)', '6,400', '1.00'],
        ['2', 'yes', 'flow, edm', '8.00 (7.00 to 9.00), 8.00 (7.00 to 9.00)', '8,000', '1.25'],
    ]


def test_digits_have_a_line_for_each_sampler():
    found = [
        row('edm', 10, 'heun:20', 9.0, data='digits'),
        row('edm', 30, 'heun:20', 2.0, data='digits'),
        row('edm', 30, 'heun:20', 3.0, data='digits', seed=1),
        row('edm', 30, 'dpmpp_2m:20', 1.0, data='digits'),
    ]
    assert [line[:6] for line in cells(tables.digits(found))] == [
        ['edm', '3,000', 'heun 20', '39', '2', '2.5 ± 0.5'],
        ['edm', '3,000', 'dpmpp_2m 20', '20', '1', '1'],
    ]


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    both = [row('edm', 60, 'heun:10', 90.0), row('edm', 60, 'heun:10', 80.0)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, both)) + '\n')
    (found,) = tables.read(tmp_path)
    assert found['values']['train']['fid'] == 80.0


def test_without_rows_the_tables_say_so(tmp_path):
    found = tables.read(tmp_path)
    assert tables.objectives(found) == tables.elephants(found) == tables.NOTHING
    assert tables.pictures(tmp_path) == tables.endings(tmp_path) == tables.NOTHING


def written(folder, rows, side=60):
    """An output folder of the queue: rows, a grid of each time, and a log of each animal."""
    (folder / 'pictures').mkdir(parents=True)
    (folder / 'logs').mkdir()
    (folder / 'rows.jsonl').write_text(''.join(f'{json.dumps(r)}\n' for r in rows))
    for r in rows:
        job = f'{r["data"]}_{r["case"]}_seed{r["seed"]}'
        shade = Image.fromarray(np.full((side, side, 3), r['seconds'] % 256, np.uint8))
        shade.save(folder / 'pictures' / f'{job}_{r["seconds"]:g}s.png')
        losses = '1.0,0.5,0.5\n2.0,,\n3.0,0.25,0.2\n' if r['data'] == 'elephants64' else ''
        log = f'training_seconds,held_out_loss,seen_loss\n{losses}'
        (folder / 'logs' / f'{job}.csv').write_text(log)
    return folder


def packed(folder, target):
    """Packs it as `tools/gpu/recipes.sh pack` does."""
    target.mkdir()
    (target / 'rows.jsonl').write_text((folder / 'rows.jsonl').read_text())
    with tarfile.open(target / 'pictures.tar', 'w') as archive:
        for name in ('logs', 'pictures'):
            archive.add(folder / name, name)
    return target


ANIMALS = [
    row(case, s, 'heun:25', 5.0, data='elephants64', copies=s / 1000)
    for case in ('edm', 'flow')
    for s in (60, 180)
]


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    """The kept pictures after a first folder, and after a packed one of a later commit."""
    output = tmp_path_factory.mktemp('drawn')
    script = runpy.run_path(str(PICTURES))
    script['main'].__globals__['HERE'] = output
    script['main']([written(tmp_path_factory.mktemp('first') / 'folder', [*ROWS, *ANIMALS])])
    before = {o['file']: o for o in tables.origins(output)}
    later = [
        row('images', 180, 'heun:25', 30.0),
        row('images', 180, 'dpmpp_2m:20', 31.0),
        row('flow', 180, 'heun:25', 30.0, data='elephants64', copies=0.5),
        row('flow', 1, 'ddpm:50', 0.0, data='alone'),
    ]
    later = [{**r, 'git': 'def', 'step': 7} for r in later]
    for name in ('values', 'references', 'features'):
        del later[-1][name]  # nothing is compared there
    folder = tmp_path_factory.mktemp('second')
    script['main']([packed(written(folder / 'folder', later), folder / 'packed')])
    return output, before


def test_pictures_of_a_later_run_join_the_earlier_ones(drawn):
    output, before = drawn
    now = {o['file']: o for o in tables.origins(output)}
    changed = {file for file, origin in now.items() if before.get(file) != origin}
    assert changed == {
        'images.jpg',
        'grids/objects64_images_seed0_180s.jpg',
        'grids/elephants64_flow_seed0_180s.jpg',
        'grids/alone_flow_seed0_1s.jpg',
        'logs/elephants64_flow_seed0.csv',
    }
    assert before.keys() < now.keys()
    origin = now['grids/objects64_images_seed0_180s.jpg']
    assert (origin['git'], origin['step'], origin['sampler']) == ('def', 7, 'heun:25')
    for name, seconds in (('flow_seed0_60s', 60), ('flow_seed0_180s', 180), ('edm_seed0_60s', 60)):
        with Image.open(output / f'grids/elephants64_{name}.jpg') as image:
            assert image.size == (60, 60)
            assert abs(image.convert('L').getpixel((30, 30)) - seconds) < 4


def test_grids_of_the_photographs_are_halves_but_for_the_recipe(drawn):
    output, _ = drawn
    for name, size in (
        ('grids/objects64_images_seed0_180s.jpg', (60, 30)),
        ('images.jpg', (60, 60)),
    ):
        with Image.open(output / name) as image:
            assert image.size == size
    assert '64 unselected samples of this recipe after 180 seconds' in tables.recipe_picture(output)


def test_rows_of_a_later_run_join_the_earlier_ones(drawn):
    output, _ = drawn
    found = tables.read(output)
    assert len(found) == len({tuple(map(str, r.values())) for r in found}) == 16
    assert [r['case'] for r in found if 'features' not in r] == ['flow']


def test_the_page_shows_every_picture_with_its_run(drawn):
    output, _ = drawn
    text = tables.pictures(output)
    for name in ('quality.png', 'overfitting.png'):
        with Image.open(output / name) as image:
            assert min(image.size) > 100
        assert f'results/recipes/{name})' in text
    shown = {line[0]: line[1:] for line in cells(text[text.index('500 elephants') :])}
    assert [cell.rpartition('<br>')[2] for cell in shown['flow']] == [
        'heun 25, 6,000 steps, commit abc',
        'heun 25, 7 steps, commit def',
    ]
    assert 'commit abc, def.' in text.splitlines()[-1]


def test_every_kept_picture_has_its_run():
    kept = {o['file'] for o in tables.origins()}
    there = {
        str(path.relative_to(tables.FOLDER))
        for folder in ('grids', 'logs')
        for path in tables.FOLDER.glob(f'{folder}/*')
    }
    assert there == {file for file in kept if '/' in file}
    assert all((tables.FOLDER / file).exists() for file in kept)


def test_copies_of_the_elephants_are_shown():
    lost = {**ANIMALS[2], 'losses': {'held_out_loss': 0.5, 'seen_loss': 0.25}}
    found = [
        *ANIMALS[:2],  # another objective
        lost,
        ANIMALS[3],
        row('flow', 180, 'ddpm:50', 5.0, data='elephants64', kid=0.005, copies=0.5),
    ]
    assert [line[:2] + line[7:] for line in cells(tables.elephants(found))] == [
        ['flow', '60', '0.06', '0.25', '0.5'],
        ['flow', '180', '0.5', '', ''],
    ]


def test_held_out_losses_are_those_of_the_log_or_of_the_rows(drawn):
    output, _ = drawn
    script = runpy.run_path(str(PICTURES))
    script['held_out'].__globals__['HERE'] = output
    losses = {'held_out_loss': 0.5, 'seen_loss': 0.25}
    rows = [{**r, 'losses': losses} for r in (ANIMALS[1], ANIMALS[0])]
    assert script['held_out'](rows, 'edm') == [(1.0, 1.0), (3.0, 1.25)]
    assert script['held_out'](rows, 'v-cosine') == [(60.1, 2.0), (180.1, 2.0)]
    assert script['held_out'](ANIMALS, 'v-cosine') == []


def test_endings_of_several_folders_have_a_table_and_a_picture(tmp_path):
    def ended(case, seconds, fid, judged=0.0, **fields):
        found = {**row(case, seconds, 'heun:25', fid, copies=0.0, **fields), 'average': '0.05'}
        return found | ({'judged': {'train': {'fid': judged}}, 'judge': 'other'} if judged else {})

    first = [ended('linear-4', 60, 10.0), ended('constant-1', 60, 16.0, data='elephants64')]
    later = [
        ended('linear-4', 60, 12.0, 3.0, seed=1),
        ended('constant-1', 60, 14.0, 5.0),
        ended('linear-4-180s', 180, 8.0, 2.0),
        ended('constant-1-180s', 180, 9.0, 4.0),
    ]
    output = tmp_path / 'output'
    output.mkdir()
    script = runpy.run_path(str(PICTURES))
    script['endings'].__globals__['HERE'] = output
    script['endings']([written(tmp_path / 'first', first)])
    assert [path.name for path in output.iterdir()] == ['endings.jsonl']
    script['endings']([packed(written(tmp_path / 'later', later), tmp_path / 'packed')])
    text = tables.endings(output)
    assert [line[:4] + line[6:8] for line in cells(text)] == [
        ['objects64', '60', 'constant-1', '1', '14', '5'],
        ['objects64', '60', 'linear-4', '2', '11 ± 1', '3'],  # the judge saw one of them
        ['objects64', '180', 'constant-1', '1', '9', '4'],
        ['objects64', '180', 'linear-4', '1', '8', '2'],
        ['elephants64', '60', 'constant-1', '1', '16', ''],
    ]
    assert 'commit abc; features classifier-1; judge other.' in text
    assert text.endswith('(results/recipes/endings.jpg)')
    with Image.open(output / 'endings.jpg') as image:
        assert image.size == (800, 353)
