"""What the engine refuses, by name. All are ValueErrors; the engine goes on serving everybody else."""

from jaxinfer.request import RequestTooLong as RequestTooLong


class EngineError(ValueError):
    """Something the engine was asked for that it cannot do."""


class DuplicateRequest(EngineError):
    """The request id belongs to an unfinished request."""


class UnknownRequest(EngineError):
    """No unfinished request has this id."""


class EngineClosed(EngineError):
    """The engine has been closed and its memory freed."""
