"""The command line. This file alone is imported before `main` runs: see `command_line.py` for the rest."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. `arguments` are those of the process if not given."""
    try:
        with _callbacks_are_watched():
            # Imported here, so that Ctrl-C while it is ends the program without a traceback.
            from jaxinfer.cli import command_line

            return command_line.run(arguments)
    except KeyboardInterrupt:
        pass
    except (ImportError, SystemError) as error:
        # What Ctrl-C makes of C++ that it meets: a module that is initialised, a call that comes back.
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
    if arguments is None:
        # At once: a process that is taken down while threads of XLA compile may abort.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(130)
    return 130


@contextlib.contextmanager
def _callbacks_are_watched() -> Iterator[None]:
    """What callbacks raise, Python prints and forgets.

    Ctrl-C that meets one of the garbage collector, as JAX has one, is sent again. Where a store cannot be written,
    Orbax raises the first error and ends its loop, which TensorStore's threads still call with theirs: not printed.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            again = signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
            threading.Timer(0.01, *again).start()  # sent from here it would be forgotten as well
        elif str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
