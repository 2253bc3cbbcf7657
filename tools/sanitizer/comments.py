"""Source text without the parts that do not change what the code does.

These are comments, docstrings, blank lines and spaces at the end of a line; in C++, also repeated
spaces elsewhere. The result is for comparing, not for running. It is the same in all versions of
Python.
"""

from __future__ import annotations

import ast
import functools
import re

# Literals are matched too, because a comment cannot begin inside of one. For Python, expressions in
# an f-string are assumed to use other quotes than the f-string, as Python before 3.12 requires.
_STRINGS = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"
_TRIPLE = r'"""(?:\\.|[^\\])*?"""' + r"|'''(?:\\.|[^\\])*?'''"
_RAW = r'\b(?:u8|[uUL])?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"'
_NUMBER = r"\b\d(?:'?\w)*"  # a ' in it separates digits
# For C++, a comment is a space, and several spaces are one.
_SPACES = r'(?:[ \t]|//(?:\\\n|[^\n])*|/\*.*?\*/)+'


def _either(literals: str, comments: str) -> re.Pattern[str]:
    return re.compile(rf'(?P<literal>{literals})|{comments}', re.DOTALL)


_PYTHON = _either(f'{_TRIPLE}|{_STRINGS}', r'#[^\n]*')
_CPP = _either(f'{_RAW}|{_NUMBER}|{_STRINGS}', _SPACES)
_CMAKE = _either(r'"(?:\\.|[^"\\])*"', r'#[^\n]*')
_LANGUAGES = {'.py': _PYTHON, '.txt': _CMAKE} | dict.fromkeys(('.cu', '.cuh', '.cc', '.h'), _CPP)


@functools.cache
def without(text: str, suffix: str) -> str:
    """Returns the text of a Python, C++, CUDA or CMake file without comments; others unchanged.

    Args:
      text: content of the file.
      suffix: suffix of the file's name, with its dot.
    """
    if suffix not in _LANGUAGES:
        return text
    if suffix == '.py':
        text = _without_docstrings(text)

    def keep(match: re.Match[str]) -> str:
        literal = match['literal']
        # Hide line breaks inside a literal from the next steps, because its blank lines count.
        return ' ' if literal is None else literal.replace('\n', '\0')

    lines = _LANGUAGES[suffix].sub(keep, text).split('\n')
    return '\n'.join(line.rstrip() for line in lines if line.strip())


def _without_docstrings(text: str) -> str:
    """Returns the text of a module without docstrings; keeps other code on the same lines."""
    lines = text.encode().splitlines(keepends=True)  # bytes, in which ast counts columns
    docstrings = [_docstring(node) for node in ast.walk(ast.parse(text))]
    for node in sorted(filter(None, docstrings), key=lambda node: node.lineno, reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + after]
    return b''.join(lines).decode()


def _docstring(node: ast.AST) -> ast.Constant | None:
    """Returns the docstring of a module, class or function."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        match node.body:
            case [ast.Expr(ast.Constant(str()) as found), *_]:
                return found
    return None
