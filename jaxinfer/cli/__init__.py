"""The command line. This file alone is imported before `main` runs: see `command_line.py` for the rest."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. `arguments` are those of the process if not given."""
    try:
        # Imported here, so that Ctrl-C while it is ends the program without a traceback.
        from jaxinfer.cli import command_line

        return command_line.run(arguments)
    except KeyboardInterrupt:
        return 130
