"""The shape of the house: imports go one way, files stay readable, the seam is the one place that picks a backend."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
# Each may import those before it. Names are the longest matching prefix of the module.
LAYERS = [
    (
        'pallas_kernels',
        'xla_ffi',
        'jaxunet.errors',
        'jaxunet.progress',
        'jaxunet.config',
        'jaxunet.config_relations',
        'jaxunet.distributed',
        'jaxunet.download',
    ),
    ('jaxunet.ops', 'jaxunet.images', 'jaxunet.solvers', 'jaxunet.fingerprint', 'jaxunet.processes'),
    (
        'jaxunet.unet',
        'jaxunet.diffusion',
        'jaxunet.weighting',
        'jaxunet.timesteps',
        'jaxunet.timestep_policy',
        'jaxunet.sampling',
        'jaxunet.data',
    ),
    ('jaxunet.training.state', 'jaxunet.weights'),
    ('jaxunet.checkpoint', 'jaxunet.classes', 'jaxunet.generate', 'jaxunet.parts', 'jaxunet.estimate', 'jaxunet.metrics'),
    ('jaxunet.training', 'jaxunet.load'),
    ('jaxunet.benchmarking', 'jaxunet.profiling'),
    (
        'jaxunet.cli',
        'jaxunet.train',
        'jaxunet.sample',
        'jaxunet.export',
        'jaxunet.prepare_data',
        'jaxunet.evaluate',
        'jaxunet.metrics.train_features',
        'jaxunet.benchmark',
        'jaxunet.benchmark_kernels',
        'jaxunet.profile',
        'configs',
    ),
    ('jaxunet.sweeping', 'jaxunet.sweep'),
    ('jaxunet.comparing', 'jaxunet.compare'),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def rank(module: str) -> int | None:
    known = [name for name in RANK if module == name or module.startswith(name + '.')]
    return RANK[max(known, key=len)] if known else None


def sources():
    return [p for folder in ('jaxunet', 'pallas_kernels', 'xla_ffi', 'configs') for p in (ROOT / folder).rglob('*.py')]


def imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_go_one_way():
    wrong = []
    for path in sources():
        here = '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
        own = rank(here)
        assert own is not None or here == 'jaxunet', f'{here} has no layer: add it to LAYERS'
        if own is not None:
            wrong += [f'{here} imports {name}' for name in imports(path) if (rank(name) or 0) > own]
    assert not wrong


def test_files_stay_readable():
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > 420}
    assert not long


def test_only_the_seam_names_a_backend():
    """Nobody else compares against 'pallas' or 'cuda'."""
    for path in (ROOT / 'jaxunet').rglob('*.py'):
        if path.name in ('ops.py', 'config.py'):
            continue
        constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        assert not {'pallas', 'cuda'} & {c for c in constants if isinstance(c, str)}, path
