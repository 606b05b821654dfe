"""The one exception that reading a checkpoint raises for a file that is broken, incomplete or not supported."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read. The message names the file, the thing in it, and what to do."""
