"""Typed access to the keys of a parsed `config.json`, with defaults and one-line errors that name the key."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

show = reprlib.Repr(maxstring=80, maxother=80, maxlong=80).repr
"""`repr`, cut to a length that fits a message."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """A parsed `config.json` over its family's defaults. A key that is in neither is required.

    The `optional_*` readers return None for an explicit null or a default of None. The others refuse null: it
    is a statement of the file, not an omission.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    place: str = "config.json"

    def error(self, key: str, problem: str) -> ValueError:
        """A ValueError that names `key`, shows a short value, and says what the `problem` is."""
        value = self.values.get(key, self.defaults.get(key))
        shown = key if isinstance(value, list | tuple | Mapping) else f"{key} {show(value)}"
        return ValueError(f"{self.place}: {shown} {problem}")

    def has(self, key: str) -> bool:
        """Whether the file itself gives `key` a value other than null."""
        return self.values.get(key) is not None

    def nested(self, key: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> "Keys":
        """The keys of a dictionary inside this one."""
        return Keys(values, defaults, f"{self.place}: {key}")

    def integer(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._expected(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str) -> float:
        """A positive finite number, whether the file writes 8 or 8.0."""
        value = self._get(key)
        if not _is_positive_number(value):
            raise self._expected(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, null: bool | None = None) -> bool:
        """True or false; an explicit null counts as `null`, if that is given."""
        value = self._get(key)
        if value is None and null is not None:
            return null
        if not isinstance(value, bool):
            raise self._expected(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._expected(key, value, "a string")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        return None if self._get(key) is None else self.integer(key, least)

    def optional_number(self, key: str) -> float | None:
        return None if self._get(key) is None else self.number(key)

    def optional_list(self, key: str, length: int) -> list[Any] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self._expected(key, value, "a list")
        if len(value) != length:
            raise ValueError(f"{self.place}: {key} has {len(value)} entries; expected {length}")
        return list(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self.optional_list(key, length)
        if value is None or not all(_is_positive_number(entry) for entry in value):
            raise ValueError(f"{self.place}: {key} must be a list of {length} positive numbers")
        return tuple(float(entry) for entry in value)

    def _get(self, key: str) -> Any:
        if key in self.values:
            return self.values[key]
        if key in self.defaults:
            return self.defaults[key]
        raise ValueError(
            f"{self.place}: {key} is missing; it has no default for this kind of model: download the file again"
        )

    def _expected(self, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.place}: {key} is {show(value)}; expected {expected}")


def _is_positive_number(value: Any) -> bool:
    """Whether JSON gave a number that float32 arithmetic can start from: not NaN, infinite, or astronomic."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
