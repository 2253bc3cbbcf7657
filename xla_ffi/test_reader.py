"""Checks of calls that no test in Python can make: `reader_test.cc` makes them."""

import pathlib

from support.cpp import needs_compiler, printed_by

SOURCES = (
    'binding/reader_test.cc',
    'binding/reader.cc',
    'adamw/read.cc',
    'attention/read.cc',
    'conv3x3/read.cc',
    'group_norm/read.cc',
    'linear/read.cc',
)
# In the order of `tell_all`.
WANTED = """\
conv: read
conv: read
conv: x: expected at most 2147479552 pixels, found 2147483648
linear: read
linear: x: expected at most 2147479552 pixels, found 2147483648
norm: read
norm: x: expected at most 65535 samples, found 65536
norm: x: expected at most 2147479552 pixels of a sample, found 2147483648
attention: read
attention: qkv: expected at most 2147479552 queries of all heads, found 2147483648
attention gradient: qkv: expected at most 2147479552 queries of all heads, found 2147483648
sums: read
sums: all tensors: expected at most 1099511627776 elements, found 1099511627777
sums: all tensors: expected at most 2147483647 chunks, found 2147483648
adamw: read
adamw: all tensors: expected at most 1099511627776 elements, found 1099511627777
packed adamw: read
packed adamw: read
packed adamw: gradients[0]: tensor 1 reaches past its end; expected whole tensors
packed adamw: gradients[0]: tensor 1 reaches past its end; expected whole tensors
packed adamw: gradients[0]: expected no more elements than the tensors take
packed adamw: gradients[1]: expected no more elements than the tensors take
packed adamw: gradients[0]: expected no more elements than the tensors take
narrow: read
narrow: all tensors: expected at most 1099511627776 elements, found 1099511627784
conv: x[0]: expected an address that is a multiple of 16, found one 8 bytes past; copy the array
conv: y: expected an address that is a multiple of 16, found one 2 bytes past; copy the array
"""


@needs_compiler
def test_what_the_reader_says(tmp_path: pathlib.Path) -> None:
    assert printed_by(SOURCES, tmp_path) == WANTED
