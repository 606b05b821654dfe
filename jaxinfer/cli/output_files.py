"""Files that a command writes when its work is done: looked at before the work begins."""

import pathlib

from jaxinfer.pictures import notebook_figure


def check_output(option: str, path: str | None) -> None:
    """Raises ValueError for a file that cannot be written as its folder is not there, or it is a folder itself."""
    if path is None:
        return
    if not pathlib.Path(path).parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {pathlib.Path(path).parent}; make it first")
    if pathlib.Path(path).is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")


def check_picture(option: str, path: str | None) -> None:
    """As `check_output`, and ValueError for an ending that matplotlib has no format for, or without matplotlib."""
    check_output(option, path)
    if path is None:
        return
    try:
        formats = notebook_figure((1.0, 1.0)).canvas.get_supported_filetypes()
    except ImportError as error:
        raise ValueError(f"{option}: {error}") from error
    ending = pathlib.Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        raise ValueError(f"{option} {path}: no picture format .{ending}; there are {', '.join(sorted(formats))}")
