"""Everything that a command does around its work: printing, one-line errors and exit codes."""

from __future__ import annotations

import functools
import gc
import logging as std_logging
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from jaxunet.runtime import program
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import ERROR, UserError, printable_lines
from jaxunet.runtime.interrupt import INTERRUPTED, importing, raise_again
from jaxunet.runtime.plugins import at_fault
from jaxunet.runtime.printing import let_printing_fail
from jaxunet.runtime.progress import write_above_bars

Main = Callable[[Sequence[str]], int | None]
HELP = {'?', 'help', 'helpfull', 'helpshort', 'helpxml'}
# Flags for what a command reads, one of which a stray argument may be meant for.
INPUTS = ('checkpoint', 'samples', 'input', 'jobs')
# Words for values that are none of a flag's type.
EXPECTED = {
    flags.IntegerParser: 'a whole number',
    flags.FloatParser: 'a number',
    flags.BooleanParser: 'true or false',
}


class Worded(flags.ArgumentParser):
    """absl's parser of a number or a truth value, which says in words what it expected."""

    def __init__(self, parser: flags.ArgumentParser) -> None:
        self.parser = parser
        self.syntactic_help = parser.syntactic_help

    def parse(self, argument: Any) -> Any:
        """Returns the value; raises ValueError if it is none of the type, or out of bounds."""
        try:
            getattr(self.parser, 'convert', self.parser.parse)(argument)
        except (TypeError, ValueError):
            words = f'expected {EXPECTED[type(self.parser)]}'
            raise ValueError(f'{words}, found {argument!r}') from None
        return self.parser.parse(argument)

    def flag_type(self) -> str:
        """Returns the name of the type in --helpfull."""
        return self.parser.flag_type()

    def _custom_xml_dom_elements(self, doc: Any) -> list[Any]:
        return self.parser._custom_xml_dom_elements(doc)


def run(main: Main, *, arguments: bool = False) -> None:
    """Parses the flags and runs `main`.

    A `UserError` is printed as `error: ...` without a traceback, and the exit code is its
    `exit_code`. So is an exception for lack of memory or of a device, or for a file that the system
    refuses. After Ctrl-C the exit code is `INTERRUPTED`, and the text of the KeyboardInterrupt is
    printed, or 'interrupted'. Printing never fails (`jaxunet.runtime.printing`). The process does
    not wait for a `Background`, which would delay Python's exit, or crash during it.

    Args:
      arguments: `main` takes the arguments that are not flags, and checks them; otherwise they are
        errors.
    """
    raise_again()
    started = sys.modules['__main__']
    started.__doc__ = program.shown(started.__doc__ or '')  # absl's --help prints it
    logging.use_absl_handler()  # removes other handlers of stderr, which it knows by its stream
    let_printing_fail()
    sys.unraisablehook = _tell_of_unraisable
    gc.freeze()  # otherwise Python spends 0.4 s at exit on all imported objects
    gc.enable()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.addFilter(is_shown)
    handler.setFormatter(_Printable('%(message)s'))
    handler.python_handler.stream = sys.stderr
    write_above_bars(handler.python_handler)
    try:
        app.run(
            _without_traceback(main), flags_parser=functools.partial(_parse, arguments=arguments)
        )
    except UserError as error:
        fail(error)
    except (KeyboardInterrupt, SystemError) as error:
        if not interrupted(error):
            raise
        said = str(error) if isinstance(error, KeyboardInterrupt) else ''
        print(f'\n{said or "interrupted"}', file=sys.stderr, flush=True)
        end(INTERRUPTED)


def _parse(argv: Sequence[str], *, arguments: bool) -> list[str]:
    """Parses the flags, and returns the arguments that are none, if there may be some."""
    known = flags.FLAGS
    for name in known:
        if type(known[name].parser) in EXPECTED:
            known[name].parser = Worded(known[name].parser)
    try:
        return _checked(known(list(argv)), arguments)
    except flags.UnrecognizedFlagError as error:
        text = f'{error}{_fields_called(error.flagname)}'
    except flags.Error as error:
        parsed = error.__context__ is None  # no parser refused a value
        missing = [f'--{name}' for name in known if parsed and _is_missing(known[name])]
        if missing:  # a path without its flag explains more; absl tells it if all flags are valid
            for name in known:
                known[name].validators.clear()
            _checked(known(list(argv)), arguments)
        text = f'{", ".join(missing)}: missing' if missing else str(error)
    except SystemExit as ended:
        helped = {argument.lstrip('-') for argument in argv} & HELP
        sys.exit(0 if helped and ended.code == 1 else ended.code)  # absl's --help ends with 1
    raise UserError(f'{text}\nSee --help.')


def _checked(argv: list[str], arguments: bool) -> list[str]:
    """Returns the arguments that are no flags; raises UserError for one if there may be none."""
    if arguments or len(argv) == 1:
        return argv
    known, stray = flags.FLAGS, argv[1]
    given = {name for name in known if known[name].present}
    meant = [name for name in INPUTS if name in known]
    if not meant and 'config' in known:
        meant = [name for name in ('config', 'config.data.path') if name not in given]
    elif not given.isdisjoint(meant):
        meant = []
    options = ' or '.join(f'--{name}={stray}' for name in meant)
    hint = f'did you mean {options}?' if meant else 'every option is a flag'
    raise UserError(f'unexpected argument {stray!r}; {hint}\nSee --help.')


def _is_missing(flag: flags.Flag) -> bool:
    """Returns True for a flag without a value that must have one."""
    return flag.value is None and any(not check.checker(None) for check in flag.validators)


def _fields_called(name: str) -> str:
    """Returns '; did you mean ...?' with the fields of `--config` that an unknown flag names."""
    config = flags.FLAGS['config'].value if 'config' in flags.FLAGS else None
    if config is None:
        return ''
    fields = [
        path
        for section, value in config.items()
        for path in ([f'{section}.{f}' for f in value] if hasattr(value, 'items') else [section])
        if name in (path, path.rpartition('.')[2])
    ]
    return f'; did you mean {" or ".join(f"--config.{f}" for f in fields)}?' if fields else ''


def fail(error: UserError) -> NoReturn:
    """Prints the error, and ends the command with its exit code."""
    let_printing_fail()  # an error may come before `run`
    print(f'error: {error}', file=sys.stderr, flush=True)
    if Background.running():
        end(error.exit_code)
    sys.exit(error.exit_code)


def end(code: int) -> NoReturn:
    """Exits as `jaxunet.runtime.distributed.end`, whose module imports JAX."""
    from jaxunet.runtime import distributed  # noqa: PLC0415

    distributed.end(code)


def interrupted(error: BaseException) -> bool:
    """Returns True if Ctrl-C caused the error.

    Ctrl-C inside C code can surface as a SystemError whose cause is the KeyboardInterrupt.
    """
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def _without_traceback(main: Main) -> Main:
    """Wraps `main` so that a `UserError` ends in one line.

    If a `Background` runs when `main` returns or raises, the process exits at once.
    """

    def wrapped(argv: Sequence[str]) -> int | None:
        try:
            with importing():  # JAX; not for --help
                from jaxunet.runtime.guarded import guarded  # noqa: PLC0415
            with guarded('this command'):
                code = main(argv)
        except UserError as error:
            fail(error)
        except Exception as error:
            if not interrupted(error) and (of_backend := at_fault(error)):
                fail(of_backend)
            if interrupted(error) or not Background.running():
                raise
            traceback.print_exc()
            end(ERROR)
        if Background.running():
            end(code or 0)
        return code

    return wrapped


class _Printable(std_logging.Formatter):
    """Formats messages for any terminal; names in them may be a stranger's."""

    def format(self, record: std_logging.LogRecord) -> str:
        """Returns the text of a message."""
        return printable_lines(super().format(record))


def is_shown(record: std_logging.LogRecord) -> bool:
    """Passes jaxunet's own messages, and other libraries' warnings except those of orbax's tasks.

    Orbax's failures also arrive as exceptions, which the commands report.
    """
    path = pathlib.Path(record.pathname)
    if pathlib.Path(__file__).parents[1] in path.parents:
        return True
    return record.levelno >= std_logging.WARNING and not {'orbax', 'asyncio'} & {*path.parts}


def _tell_of_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Prints an exception that cannot be caught, unless it is a consequence of another one.

    If one write or read of a checkpoint fails, orbax closes the event loop, and all the others then
    print a traceback. The first failure is raised as an exception.
    """
    if str(unraisable.exc_value) != 'Event loop is closed':
        sys.__unraisablehook__(unraisable)
