"""Plans: ordered rules from weights to precisions, from TOML or one of the presets.

    [[rules]]
    weights = ["layers.0.*", "*.down_proj"]   # a pattern or several; the first rule that names a weight decides
    bits = 16                                 # 16 leaves a weight as it is
    [[rules]]
    weights = "lm_head"                       # the head; only a rule that writes this name means it, a "*" does not
    bits = 8                                  # one scale an output, unless there is a group_size; 6 become 8
    method = "rtn"                            # int8, as "gptq"; or "fp8", float8_e4m3fn, which has no groups
    [[rules]]
    weights = "*"
    bits = 4                                  # 2, 3 or 4
    group_size = 64
    symmetric = false
    method = "hqq"                            # or "rtn", "awq", "gptq"

Weights are `layers.{i}.{q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj}`, whatever the family calls them, and
`lm_head`. Embedding, norms and biases are never quantised, and a weight that no rule names stays as it is.

A head that is tied to the embedding becomes a copy of its own when a rule names it: the embedding is looked up row by
row and stays in 16 bits. With 8 bits that costs vocabulary * hidden + 4 * vocabulary bytes more, and a decode step,
which reads the whole head and a row of the embedding, reads half of what it did.
"""

import dataclasses
import fnmatch
import itertools
import os
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SMALL = ("rtn", "hqq", "awq", "gptq")
_METHODS = {2: _SMALL, 3: _SMALL, 4: _SMALL, 8: ("rtn", "fp8", "gptq"), 16: ("rtn",)}
"""By number of bits."""

CALIBRATED = ("awq", "gptq")
"""Methods that need to see what a weight is multiplied with."""

HEAD = "lm_head"
PROMOTED = ", promoted"
_KEYS = ("weights", "bits", "group_size", "symmetric", "method")
_TYPES = {
    "bits": (int, "a whole number"),
    "group_size": (int, "a whole number"),
    "symmetric": (bool, "true or false"),
    "method": (str, "a name in quotes"),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """How a weight is stored: 16 bits are none of the rest; 2 and 3 bits take the room of 4, and 6 bits become 8, which
    have that room and are more exact.

    With 4 bits or fewer `group_size` inputs (64 if left out) share a scale, and a zero point unless `symmetric`. "rtn"
    rounds to the nearest code, the range clipped for the least error; "hqq" optimises a floating zero for weights with
    outliers. "awq" and "gptq" look at the inputs that the weight has on calibration text (`jaxinfer.quantize`): "awq"
    scales inputs and clips ranges, "gptq" makes up for each input's rounding in those that follow.

    With 8 bits there is one scale an output, of its largest weight, and zero is zero. "rtn" and "gptq" are int8, and
    with a `group_size` have scales as fewer bits have them, and zero points if `symmetric` is False. "fp8" is
    float8_e4m3fn, whose steps are finer near zero and coarser above.
    """

    bits: int = 4
    group_size: int | None = None
    symmetric: bool | None = None
    method: str = "rtn"

    def __post_init__(self) -> None:
        if self.bits == 6:
            object.__setattr__(self, "bits", 8)
        if self.bits not in _METHODS:
            raise ValueError(f"bits is {self.bits!r}; expected {', '.join(map(str, sorted([6, *_METHODS])))}")
        if self.method not in _METHODS[self.bits]:
            methods = _METHODS[self.bits]
            raise ValueError(f"method is {self.method!r}; expected {' or '.join(methods)} with {self.bits} bits")
        group_size, symmetric = self.group_size, self.symmetric
        if self.bits == 16 or self.method == "fp8":
            if group_size is not None or symmetric is False:
                kind = "fp8 has" if self.method == "fp8" else "16 bits have"
                raise ValueError(f"{kind} no groups and no zero points: leave group_size and symmetric out")
        elif self.bits == 8 and group_size is None:
            if symmetric is False:
                raise ValueError("8 bits with one scale an output have no zero points: give a group_size, such as 128")
        else:
            group_size = 64 if group_size is None else group_size
            if group_size < 16 or group_size % 16:
                raise ValueError(f"group_size is {group_size!r}; expected a multiple of 16, such as 64 or 128")
        # What was left out is filled in, so that equal precisions compare equal however they were written.
        object.__setattr__(self, "group_size", group_size)
        object.__setattr__(self, "symmetric", self.bits > 4 if symmetric is None else symmetric)
        if self.method == "hqq" and self.symmetric:
            raise ValueError("method hqq chooses a zero; symmetric must be false")

    def __str__(self) -> str:
        """Such as "int4 g64 awq", "fp8", "int8", "int8 g64"."""
        if self.bits == 16:
            return "16 bits"
        if self.bits == 8:
            groups = "" if self.group_size is None else f" g{self.group_size}"
            zeros = "" if self.symmetric else " zero points"
            return {"fp8": "fp8", "rtn": f"int8{groups}{zeros}"}.get(self.method, f"int8{groups}{zeros} {self.method}")
        return f"int{self.bits} g{self.group_size}{' symmetric' if self.symmetric else ''} {self.method}"

    def by_method(self, method: str) -> "Precision":
        """The same, its codes chosen by another method if they have 4 bits or fewer."""
        return self if self.bits > 4 else dataclasses.replace(self, method=method)

    def promoted(self) -> "Precision":
        """The next more exact one: 2, 3, 4 bits of the same kind, then int8, then 16 bits."""
        if self.bits < 4:
            return dataclasses.replace(self, bits=self.bits + 1)
        return Precision(8 if self.bits == 4 else 16)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The precision of the weights that any of the patterns names; `*` and `?` stand for what they do in file names.

    They stand for no part of "lm_head": a tied head would become a second copy of the embedding by accident.
    """

    weights: tuple[str, ...]
    precision: Precision

    def names(self, weight: str) -> bool:
        if weight == HEAD:
            return HEAD in self.weights
        return any(fnmatch.fnmatchcase(weight, pattern) for pattern in self.weights)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Ordered rules. `name` is for messages."""

    rules: tuple[Rule, ...]
    name: str = "plan"

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule asks for a method that looks at a weight's inputs."""
        return any(rule.precision.method in CALIBRATED for rule in self.rules)

    def precision(self, weight: str) -> Precision | None:
        """The precision of a weight (`layers.3.down_proj`), by the first rule that names it; None is as it is."""
        for rule in self.rules:
            if rule.names(weight):
                return None if rule.precision.bits == 16 else rule.precision
        return None

    def runs(self, weights: Sequence[str]) -> list[tuple[Precision | None, slice]]:
        """Neighbours of one precision, of weights that are joined one below the other."""
        found = []
        start = 0
        for precision, same in itertools.groupby(weights, self.precision):
            stop = start + len(list(same))
            found.append((precision, slice(start, stop)))
            start = stop
        return found

    def promote(self, weights: Sequence[str]) -> "Plan":
        """The same plan, but for weights that get their next more exact precision. They are named by rules of it."""
        found = {weight: self.precision(weight) for weight in weights}
        rules = [Rule((weight,), precision.promoted()) for weight, precision in found.items() if precision is not None]
        name = self.name.removesuffix(PROMOTED) + PROMOTED
        return Plan((*rules, *self.rules), name)

    def by_method(self, method: str) -> "Plan":
        """The same plan, its codes of 4 bits and fewer chosen by another method."""
        rules = (Rule(rule.weights, rule.precision.by_method(method)) for rule in self.rules)
        return Plan(tuple(rules), f"{self.name}, {method}")

    def to_mapping(self) -> dict[str, Any]:
        """What `from_mapping` takes: the content of a TOML file."""
        rules = []
        for rule in self.rules:
            precision = {key: value for key, value in dataclasses.asdict(rule.precision).items() if value is not None}
            if rule.precision.group_size is None:
                del precision["symmetric"]
            rules.append({"weights": list(rule.weights), **precision})
        return {"rules": rules}

    def check(self, weights: Iterable[str]) -> None:
        """Raises ValueError for a rule that names none of a model's weights: it has a typing error."""
        known = list(weights)
        for rule in self.rules:
            if not any(rule.names(weight) for weight in known):
                raise ValueError(
                    f"{self.name}: no weight is named {' or '.join(rule.weights)}; "
                    f"names are like {known[0]}" + (f" and {known[-1]}" if len(known) > 1 else "")
                )


def uniform(name: str, precision: Precision) -> Plan:
    """A plan of one precision for everything."""
    return Plan((Rule(("*",), precision),), name)


INT4, INT8 = Precision(4, 64), Precision(8)

PRESETS: Mapping[str, Plan] = {
    "int4": uniform("int4", INT4),
    "int4-g128": uniform("int4-g128", Precision(4, 128)),
    "int4-hqq": uniform("int4-hqq", Precision(4, 64, method="hqq")),
    "int4-awq": uniform("int4-awq", Precision(4, 64, method="awq")),
    "int4-gptq": uniform("int4-gptq", Precision(4, 64, method="gptq")),
    "int4-int8-head": Plan((Rule((HEAD,), INT8), Rule(("*",), INT4)), "int4-int8-head"),
    "int3": uniform("int3", Precision(3, 64)),
    "int8": uniform("int8", INT8),
    "fp8": uniform("fp8", Precision(8, method="fp8")),
    "seed-mixed": Plan((Rule(("*.o_proj", "*.down_proj"), INT8), Rule(("*",), INT4)), "seed-mixed"),
}
"""Plans by name. All leave embedding and head in 16 bits, but for "int4-int8-head", whose head has 8.

"int4" rounds to the nearest code of 4 bits in groups of 64 inputs; "int4-awq" and "int4-gptq" choose the codes by
calibration text, and take the same room. "seed-mixed" gives q, k, v, gate and up 4 bits and
down 8. Its o is meant to have 6, which are stored as 8: a third more bytes for o, which is a tenth of a layer's weights
or less, and an error four times smaller.
"""


def resolve(plan: "Plan | str | os.PathLike[str]", given_as: str = "quantize=") -> Plan:
    """A plan, the name of a preset, or the path of a TOML file, as a plan.

    Raises FileNotFoundError for a file that is not there, and ValueError for anything else; `given_as` is what errors
    call the argument.
    """
    if isinstance(plan, Plan):
        return plan
    text = os.fspath(plan) if isinstance(plan, str | os.PathLike) else None
    if isinstance(text, str) and text in PRESETS:
        return PRESETS[text]
    if not isinstance(text, str) or not text.endswith(".toml"):
        raise ValueError(f"{given_as}{plan!r}: expected {', '.join(PRESETS)}, or the path of a .toml file")
    path = pathlib.Path(text).expanduser()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such plan; give a .toml file, or one of {', '.join(PRESETS)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return from_mapping(content, str(path))


def from_mapping(content: Mapping[str, Any], name: str) -> Plan:
    """The plan in the content of a TOML file. Raises ValueError naming the rule that is wrong, and what is expected."""
    unknown = sorted(set(content) - {"rules"})
    entries = content.get("rules")
    if unknown or not isinstance(entries, list) or not entries:
        raise ValueError(f"{name}: expected [[rules]] and nothing else" + (f", found {unknown}" if unknown else ""))
    rules = []
    for number, entry in enumerate(entries, 1):
        where = f"{name}: rule {number}"
        if not isinstance(entry, Mapping) or set(entry) - set(_KEYS):
            found = sorted(set(entry) - set(_KEYS)) if isinstance(entry, Mapping) else entry
            raise ValueError(f"{where} has {found}; expected {', '.join(_KEYS)}")
        patterns = entry.get("weights")
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"{where} has weights {patterns!r}; expected a pattern or a list of patterns")
        for key, (kind, expected) in _TYPES.items():
            if key in entry and type(entry[key]) is not kind:
                raise ValueError(f"{where}: {key} is {entry[key]!r}; expected {expected}")
        try:
            precision = Precision(**{key: value for key, value in entry.items() if key != "weights"})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        rules.append(Rule(tuple(patterns), precision))
    return Plan(tuple(rules), name)
