"""Names of options that there are not, with those that may have been meant."""

import dataclasses
import difflib
from collections.abc import Iterable


def refuse_unknown(cls: type, names: Iterable[object], kind: str) -> None:
    """Raises ValueError for names that are no fields of the dataclass `cls`, whose fields are called `kind`."""
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=2)
            unknown.append(f"{name!r}" + (f" (did you mean {' or '.join(close)}?)" if close else ""))
    if unknown:
        raise ValueError(f"no {kind} {', '.join(unknown)}; {kind}s are {', '.join(known)}")
