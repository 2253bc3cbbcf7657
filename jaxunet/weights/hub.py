"""Downloads models of the Hugging Face hub by name: OWNER/NAME, or OWNER/NAME@REVISION."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.remote import INSTEAD, on_disk
from jaxunet.runtime.untrusted import one_line

NAME = re.compile(r'(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*?)(@(?P<revision>[\w][\w./-]*))?')
LIBRARY = 'huggingface_hub'
# Files of a pipeline of a UNet2DModel; others, such as pictures and flax weights, are left there.
FILES = (
    '*.json',
    'README.md',
    '*diffusion_pytorch_model*.safetensors',
    '*diffusion_pytorch_model*.bin',
)


def is_name(path: str) -> bool:
    """Returns True if a path that leads nowhere may name a model of the hub.

    A name in a folder that is here is a mistyped file.
    """
    match = NAME.fullmatch(path)
    return bool(match) and not pathlib.Path(path).parent.exists()


def on_this_machine(path: str | os.PathLike[str]) -> str:
    """Returns the path here of a model that the user named: `on_disk`, or a copy from the hub.

    Raises:
      UserError: as `on_disk` and `downloaded`.
    """
    local = on_disk(path)
    if not pathlib.Path(local).exists() and is_name(local):
        return downloaded(local)
    return local


def downloaded(name: str) -> str:
    """Returns the folder with a copy of a model; what was downloaded before is not again.

    Args:
      name: for which `is_name` is true. A revision is a commit, a branch or a tag.

    Raises:
      UserError: the extra `hub` is not installed, or the hub or the model cannot be reached.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    if importlib.util.find_spec(LIBRARY) is None:
        raise UserError(
            f'{name}: no such file or folder; to download a model of this name from the Hugging '
            "Face hub: pip install 'jaxunet[hub]'"
        )
    import huggingface_hub  # noqa: PLC0415 (an extra)

    try:
        folder = huggingface_hub.snapshot_download(
            match['repository'], revision=match['revision'], allow_patterns=list(FILES)
        )
    except Exception as error:  # of many libraries
        raise UserError(
            f'{name}: no such file or folder here, and it cannot be downloaded from the Hugging '
            f'Face hub: {one_line(error)}; {INSTEAD}'
        ) from None
    logging.info('%s of the Hugging Face hub is in %s', name, folder)
    return folder


def has_no_order(path: str) -> bool:
    """Returns True if the weights at this path have no order of qkv's rows by themselves."""
    path = on_this_machine(path)
    return pathlib.Path(path).is_dir() or path.lower().endswith('.bin')
