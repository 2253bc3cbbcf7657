"""Source text without comments and docstrings."""

import io
import tokenize

import pytest

from tools.sanitizer import comments, tested_sources
from tools.sanitizer.sanitizer import OPS

PYTHON = '''\
"""A module."""

import jax  # noqa: F401


class A:
    """A class."""

    text = """Not a docstring

    # at all"""


def f(a: str = '#') -> str:
    """A function
    of two lines.
    """
    # Says nothing.
    return f'{a} "# {a}' + r"\\'" + \'\\'# \'  # ends


async def g(): "é"; return 1


"""Not the first statement."""


def h():
    f('a')
'''
PYTHON_LEFT = '''\
import jax
class A:
    text = """Not a docstring\0\0    # at all"""
def f(a: str = '#') -> str:
    return f'{a} "# {a}' + r"\\'" + \'\\'# \'
async def g(): ; return 1
"""Not the first statement."""
def h():
    f('a')
'''
CUDA = r"""// A header: it's
/* of
   lines */

#include "a//b.h"  // not 'c
__device__ int/* signed */f(int   a) {
  int n = 1'000'000;  // it's \
     a continuation
  char c = '"', d = '\'', e = u8'/';  /* " */
  asm volatile("add %0, %0, 1; // one\n\t"  // adds
               "/* # */ ret;" : "+r"(a));
  asm(R"ptx(
    { // PTX

    } /* ") */
  )ptx");  // end
  return a / n;
}
"""
CUDA_LEFT = r"""#include "a//b.h"
__device__ int f(int a) {
 int n = 1'000'000;
 char c = '"', d = '\'', e = u8'/';
 asm volatile("add %0, %0, 1; // one\n\t"
 "/* # */ ret;" : "+r"(a));
 asm(R"ptx(~    { // PTX~~    } /* ") */~  )ptx");
 return a / n;
}
""".replace('~', '\0')
CMAKE = 'set(A "#b")  # c\n\n# d\nset(B c)\n'


def test_what_is_left():
    assert comments.without(PYTHON, '.py') == PYTHON_LEFT.rstrip()
    assert comments.without(CUDA, '.cuh') == CUDA_LEFT.rstrip()
    assert comments.without(CMAKE, '.txt') == 'set(A "#b")\nset(B c)'
    assert comments.without('{"a": "#"}\n# b\n', '.jsonl') == '{"a": "#"}\n# b\n'


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('A module.', 'A module\n\nof its own.'),
        ('A class.', 'Others.'),
        ('of two lines.', 'of "two" # lines.'),
        ('# Says nothing.', "# It's\n\n    # other words."),
        ('  # noqa: F401', ''),
        ('"é"', '"e"'),
    ],
)
def test_other_words_in_python(old, new):
    assert old in PYTHON
    assert comments.without(PYTHON.replace(old, new), '.py') == comments.without(PYTHON, '.py')


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('    # at all', '    # at last'),
        ('docstring\n\n', 'docstring\n'),
        ("'#'", "'# '"),
        ('"# {a}', '"# {a} '),
        ('return 1', 'return 2'),  # on a docstring's line
        ('Not the first', 'After the first'),
        ("def h():\n    f('a')", "def h(): pass\nf('a')"),
    ],
)
def test_other_code_in_python(old, new):
    assert old in PYTHON
    assert comments.without(PYTHON.replace(old, new), '.py') != comments.without(PYTHON, '.py')


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ("it's\n", 'it is "\n'),
        ('of\n   lines', "'one' // line"),
        ("// not 'c", '/* c */'),
        ('/* signed */', ' '),
        ('a continuation', "'others"),
        ('/* " */', '// "'),
        ('\n}\n', '\n\n}  // f\n\n'),
    ],
)
def test_other_words_in_cuda(old, new):
    assert old in CUDA
    assert comments.without(CUDA.replace(old, new), '.cuh') == comments.without(CUDA, '.cuh')


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('a//b', 'a//c'),
        ('/* signed */', ''),
        ("1'000'000", "1'000'001"),
        ('// one', '// two'),
        ('/* # */', '/* */'),
        ('{ // PTX', '{ // ptx'),
        ('PTX\n\n', 'PTX\n'),
        ('a / n', 'a // n'),
    ],
)
def test_other_code_in_cuda(old, new):
    assert old in CUDA
    assert comments.without(CUDA.replace(old, new), '.cuh') != comments.without(CUDA, '.cuh')


def test_comments_of_python_are_those_of_its_tokenizer():
    names = {name for op in OPS.values() for name in tested_sources.files(op.path)}
    for name in sorted(name for name in names if name.endswith('.py')):
        lines = (tested_sources.ROOT / name).read_text().split('\n')
        text = '\n'.join(lines)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        assert comments.without('\n'.join(lines), '.py') == comments.without(text, '.py'), name
        left = comments.without(text, '.py').replace('\0', '\n')
        found = tokenize.generate_tokens(io.StringIO(left).readline)
        assert not [token.string for token in found if token.type == tokenize.COMMENT], name
