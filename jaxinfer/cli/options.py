"""Command-line options that several commands share; those of sampling are made from `SamplingParams` itself."""

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import pathlib
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.quantization.plan import PRESETS
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.surrogates import not_unicode

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn", "int4")


_REPEAT = {str | Sequence[str]: " Repeat it for several.", Sequence[int]: " Several: with commas, or repeat it."}


class Parser(argparse.ArgumentParser):
    """Reports bad arguments in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        if unknown is not None:
            given, known = unknown[1], re.findall(r"[\w-]+", unknown[2])
            close = difflib.get_close_matches(given, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; the commands are {', '.join(known)}"
            message = f"unknown command {given!r}{meant}"
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str], found: argparse.Namespace) -> NoReturn:
        """Ends the program for what `parse_known_args` left over, naming the option that was probably meant."""
        self.error(self._explain(unknown, found))

    def in_options(self, message: str) -> str:
        """An error of the library, whose `context=0` is this command's `--context 0`."""

        def option(match: re.Match[str]) -> str:
            name = "--" + match[1].replace("_", "-")
            return f"{name} " if name in self._option_string_actions else match[0]

        return re.sub(r"\b([a-z]\w*)=(?=[^=\s])", option, message)

    def _explain(self, unknown: Sequence[str], found: argparse.Namespace) -> str:
        options = [word.partition("=")[0] for word in unknown if word.startswith("-") and len(word) > 1]
        if not options:
            model = getattr(found, "model", None)
            return f"unexpected argument {unknown[0]!r}" + (f": MODEL is {model!r} already" if model else "")
        given = options[0]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        begins = sorted((option for option in known if option.startswith(given)), key=len)
        close = begins or difflib.get_close_matches(given, known, n=1)
        return f"unknown option {given}" + (f"; did you mean {close[0]}?" if close else "")


def add_model(
    parser: argparse.ArgumentParser, dtype: str = "of the weights; default bfloat16 on a GPU, float32 on a CPU"
) -> None:
    """MODEL and --dtype, as `jaxinfer.load` takes them; `dtype` is what help says of the latter."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model folder, a .gguf file, a store, owner/name on the Hugging Face Hub, or a short name that "
        "`jaxinfer pull` knows",
    )
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)


def add_loading(parser: argparse.ArgumentParser, *, tiered: bool = False) -> None:
    """MODEL and everything that says how it is kept in memory; `loading` has the values.

    `tiered` caches are for the commands that generate without a draft, and for plans of those.
    """
    add_model(parser)
    presets = ", ".join(name for name, plan in PRESETS.items() if not plan.needs_calibration)
    parser.add_argument(
        "--quantize",
        metavar="PLAN",
        help=f"pack weights while loading: {presets}, or a .toml file (`jaxinfer quantize` has plans that need text)",
    )
    parser.add_argument(
        "--packed",
        action=argparse.BooleanOptionalAction,
        help="whether quantised weights of a file stay packed; by default where that is fast",
    )
    types = ", ".join(KV_DTYPES[len(DTYPES) :])
    if tiered:
        text = f"of the cache: {types}, tiered, or tiered:RECENT,INT8; default --dtype"
        parser.add_argument("--kv-dtype", metavar="TYPE", help=text)
    else:
        text = f"of the cache: {types}; default --dtype"
        parser.add_argument("--kv-dtype", metavar="TYPE", choices=KV_DTYPES, help=text)
    parser.add_argument(
        "--prefill-dtype", choices=DTYPES, help="keep a second copy of packed weights, decoded, to compute prompts with"
    )


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `jaxinfer.load` from the options of `add_loading`."""
    return {name: getattr(options, name) for name in ("dtype", "quantize", "packed", "kv_dtype", "prefill_dtype")}


def add_sampling(
    parser: argparse.ArgumentParser,
    *,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """An option for each field of `SamplingParams`, with its name, its type and its docstring as help."""
    group = parser.add_argument_group("sampling options")
    documentation = _field_docstrings(SamplingParams)
    group.set_defaults(sampling_defaults=dict(defaults))
    for field in dataclasses.fields(SamplingParams):
        if field.name in leave_out:
            continue
        default = defaults.get(field.name, field.default)
        words = _for_command_line(documentation[field.name]).replace("%", "%%")
        shown = "" if isinstance(default, bool) or default == () else f" Default: {str(default).lower()}."
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"sampling.{field.name}",
            default=argparse.SUPPRESS,
            help=f"{words}{_REPEAT.get(field.type, '')}{shown}",
            **_how(field),
        )


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, and the command's own defaults, under SamplingParams' names."""
    prefix = "sampling."
    given = {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}
    if "logit_bias" in given:
        given["logit_bias"] = tuple(given["logit_bias"])
    return options.sampling_defaults | given


def json_line(value: Any) -> str:
    """Strict JSON in one line; readable where standard output is UTF-8, else in ASCII, so that no character is lost."""
    readable = (sys.stdout.encoding or "").lower().replace("_", "-") in ("utf-8", "utf8")
    return json.dumps(value, ensure_ascii=not readable, allow_nan=False)


def read_text(name: str) -> str:
    """A UTF-8 file, or standard input for `-`. Raises OSError, and ValueError for what is not UTF-8."""
    if "\0" in name:
        raise ValueError(f"{name!r} is no name of a file: it holds a zero byte")
    try:
        text = sys.stdin.read() if name == "-" else pathlib.Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(name, error) from error
    return text.removeprefix("\ufeff")


def not_utf8(name: str, error: UnicodeDecodeError) -> ValueError:
    """What to say of a file, or of standard input (`-`)."""
    remedy = "" if name == "-" else "; save it as UTF-8"
    return ValueError(f"{shown_name(name)} is not UTF-8 ({error.reason} at byte {error.start}){remedy}")


def shown_name(name: str) -> str:
    return "standard input" if name == "-" else name


def _how(field: dataclasses.Field) -> dict[str, Any]:
    """How argparse reads a field, from its annotation."""
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if field.type is int:
        return {"type": int, "metavar": "N"}
    if field.type == int | None:
        return {"type": _optional_integer, "metavar": "N"}
    if field.type is float:
        return {"type": float, "metavar": "X"}
    if field.type == str | Sequence[str]:
        return {"action": "append", "type": unicode_text, "metavar": "TEXT"}
    if field.type == Sequence[int]:
        return {"action": "extend", "type": integers, "metavar": "ID[,ID...]"}
    if Mapping[int, float] in typing.get_args(field.type):
        return {"action": "append", "type": _bias, "metavar": "ID=VALUE"}
    raise TypeError(f"no command-line form for SamplingParams.{field.name} of type {field.type}")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def integers(text: str) -> list[int]:
    """A list with commas. Values separated by blanks would take the MODEL that follows for one of them."""
    return [_integer(word) for word in text.split(",")]


def file_name(given: str) -> str:
    """The path of a file or a folder. An empty one, such as that of a shell's variable, is not the current folder."""
    if not given:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    return given


def unicode_text(given: str) -> str:
    """What is for the tokenizer. Names of files may hold anything, and texts may not."""
    problem = not_unicode(given)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{given!r} {problem}")
    return given


def _optional_integer(text: str) -> int | None:
    return None if text == "none" else _integer(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 198=-100")
    return _integer(token), _number(value)


def _for_command_line(docstring: str) -> str:
    """A field's docstring without what only Python has: types, methods, field names, None."""
    sentences = [text for text in re.split(r"(?<=\.) ", docstring) if not text.endswith("after construction.")]
    words = re.sub(r" \(`\w+`\)", "", " ".join(sentences))
    words = re.sub(r"`(\w+)`", lambda match: "--" + match[1].replace("_", "-"), words)
    return re.sub(r"\bNone\b", "none", words)


def _field_docstrings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass. Python does not keep them, so they are read from the source."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(below.value.value).split())
    return found
