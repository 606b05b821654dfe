"""`jaxinfer chat MODEL`: a conversation in the terminal, or from piped standard input, one message a line."""

import argparse
import contextlib
import sys
from collections.abc import Generator

from jaxinfer.cli.options import loading, not_utf8, sampling_values
from jaxinfer.generation import stream
from jaxinfer.model import load
from jaxinfer.outputs import Delta
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.surrogates import not_unicode

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def run(options: argparse.Namespace) -> int:
    """Reads messages until there are no more. Bad input ends the program only where nobody sits before it."""
    params = SamplingParams.from_dict(sampling_values(options))

    model = load(options.model, **loading(options), progress=True)
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, so nobody can talk to it; use `jaxinfer generate`")
    model.tokenizer.render_chat([{"role": "user", "content": "?"}])  # no template: say so before anything is typed
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # not on every system
            import readline  # noqa: F401  # line editing for input()
        print(_HELP, file=sys.stderr)
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(opening)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            raise not_utf8("-", error) from error
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(f"no command {line.split()[0]}: {_HELP}", file=sys.stderr)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                problem = not_unicode(line)
                if problem is not None:
                    raise ValueError(f"the message {problem}")
                answer = _answer(stream(model, model.tokenizer.apply_chat_template(asked), params), interactive)
            except ValueError as error:  # most likely the conversation has outgrown the context
                if not interactive:
                    raise
                print(f"error: {error} (/reset starts a new conversation)", file=sys.stderr)
                continue
            if answer is None and not interactive:
                return 1
            if answer:  # an answer that failed, or was stopped before its first word, is forgotten with its question
                messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(deltas: Generator[Delta, None, None], interactive: bool) -> str | None:
    """Prints an answer as it comes and returns it, or as much of it as there was before Ctrl-C; None if it failed."""
    pieces = []
    try:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            if delta.finish_reason == "error":
                print(f"error: {delta.stop_reason}", file=sys.stderr)
                return None
    except KeyboardInterrupt:
        if not interactive:
            raise
    finally:
        deltas.close()
        print(flush=True)
    return "".join(pieces)
