"""Product files have at most 400 lines, and functions at most 70."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES = 400, 70
# Functions that may be longer: kernel bodies, whose closures share the barriers and references of
# one program.
LONG_FUNCTIONS = {
    'pallas_kernels/conv3x3/hopper_kernel.py': {'consume', 'call'},
    'pallas_kernels/conv3x3/hopper_producers.py': {'produce', 'activate'},
    'pallas_kernels/conv3x3/hopper_weight_gradient.py': {'_partial_sums', 'body'},
}


def sources():
    for package in ('jaxunet', 'pallas_kernels', 'tools', 'xla_ffi'):
        for path in sorted((ROOT / package).rglob('*.py')):
            if not path.match('test_*.py') and path.name not in ('parity_test.py', 'conftest.py'):
                yield str(path.relative_to(ROOT)), path.read_text(encoding='utf-8')


def test_files_are_short():
    lengths = {name: len(text.splitlines()) for name, text in sources()}
    assert lengths, 'no source files'
    long = {name: n for name, n in lengths.items() if n > FILE_LINES}
    assert not long, f'more than {FILE_LINES} lines; split by topic: {long}'


def test_functions_are_short():
    long = {
        f'{name}:{node.lineno} {node.name}': lines
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name not in LONG_FUNCTIONS.get(name, ())
        and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES
    }
    assert not long, f'more than {FUNCTION_LINES} lines; split them: {long}'
