"""The command line: `jaxinfer COMMAND`, the commands being those of `_COMMANDS`.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 2 bad input (one line says
what and how to mend it), 130 interrupted, 1 anything else, `plan` of what does not fit included. JAX is imported when a
command is run, not before.
"""

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

import jaxinfer
from jaxinfer.cli.bench_options import add_bench
from jaxinfer.cli.options import Parser, add_loading, add_model, add_sampling, file_name, integers, unicode_text
from jaxinfer.cli.plan_options import add_plan
from jaxinfer.cli.scoring_options import add_perplexity, add_score
from jaxinfer.cli.sensitivity_options import add_sensitivity
from jaxinfer.cli.store_options import add_convert, add_quantize

FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What no other input would have helped with."""
LONGEST_ERROR = 2000
"""Characters: what a damaged file has in place of a name may be megabytes long."""

_COMMANDS = {
    "generate": "complete prompts from the command line, a file or standard input",
    "chat": "talk to a model; it remembers the conversation",
    "score": "print log-likelihoods of continuations of prompts, one JSON object each",
    "perplexity": "print how well a model foresees a text of any length",
    "quantize": "quantise a model by a plan, layer by layer, into a store that every command takes for a model",
    "convert": "turn a model of any format into a store, or into safetensors that other engines read",
    "pull": "fetch a model into the cache and print its path",
    "bench": "serve a workload with the engine and print latencies, rates and memory use",
    "spec-bench": "measure what a draft gains on some prompts: speed-up, acceptance by position, time of a step",
    "plan": "print what memory a model, its cache and its programs will take, and what would fit (exit code 1 if it "
    "does not); reads no weights",
    "sensitivity": "measure what each weight's precision costs, and propose the plan of least loss in a given room",
    "info": "print a model's configuration, size, memory and tokenizer, and whether its tensors fit; reads no weights",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line. Each command's arguments are added here, its work is in the module of that name."""
    root = Parser(prog="jaxinfer", description="LLM inference compiled by JAX/XLA for NVIDIA GPUs.", allow_abbrev=False)
    version = f"jaxinfer {jaxinfer.__version__}"
    root.add_argument("--version", action="version", version=version, help="print the version and exit")
    root.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        name: subparsers.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        for name, summary in _COMMANDS.items()
    }
    for command in commands.values():
        command.set_defaults(parser=command)

    generate = commands["generate"]
    add_loading(generate, tiered=True)
    source = generate.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", type=unicode_text, metavar="TEXT", help="a prompt; repeat it for several"
    )
    source.add_argument(
        "--prompts-file",
        type=file_name,
        metavar="FILE",
        help="one prompt a line (- is standard input); in a .jsonl file each line is an object with one of prompt, "
        "token_ids or messages, and optionally params, sampling options of its own",
    )
    generate.add_argument(
        "--jsonl",
        action="store_true",
        help="the prompts file, or standard input without one, holds such objects, whatever its name",
    )
    generate.add_argument("--chat", action="store_true", help="give each prompt to the model's chat template")
    generate.add_argument("--system", type=unicode_text, metavar="TEXT", help="system message for --chat")
    generate.add_argument("--json", action="store_true", help="print one JSON object for each prompt, nothing else")
    generate.add_argument("--quiet", action="store_true", help="no progress and no figures on standard error")
    generate.add_argument("--max-batch-size", type=int, default=64, metavar="N", help="completions run at once (64)")
    add_sampling(generate)

    chat = commands["chat"]
    add_loading(chat, tiered=True)
    chat.add_argument("--system", type=unicode_text, metavar="TEXT", help="system message that opens the conversation")
    add_sampling(chat, leave_out=("n", "logprobs", "prompt_logprobs"), defaults={"max_tokens": 1024})

    pull = commands["pull"]
    pull.add_argument("name", metavar="NAME", help="a short name, owner/name, or owner/name:file.gguf")
    pull.add_argument("--quiet", action="store_true", help="no progress on standard error")

    add_quantize(commands["quantize"])
    add_convert(commands["convert"])

    bench = commands["spec-bench"]
    add_loading(bench)
    bench.add_argument(
        "--draft",
        default="ngram",
        metavar="DRAFT",
        help="ngram (default), self (the model's layers in 4 bits), self:N (its lower N layers in 4 bits), or a model",
    )
    bench.add_argument(
        "--k", type=integers, default=[4], metavar="N", help="drafted tokens a step (4); several with commas: 2,4,8"
    )
    prompts = bench.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", type=unicode_text, metavar="TEXT", help="a prompt; repeat it for several"
    )
    prompts.add_argument(
        "--prompts-file", type=file_name, metavar="FILE", help="one prompt a line; by default three of its own"
    )
    bench.add_argument(
        "--lossy", choices=("top-k", "typical", "kl"), help="accept more than is exact; what that costs is shown"
    )
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of which the fastest counts (3)")
    bench.add_argument("--json", action="store_true", help="print one JSON object for each k, nothing else")
    bench.add_argument("--quiet", action="store_true", help="no progress on standard error")
    add_sampling(bench, leave_out=("logprobs", "prompt_logprobs"), defaults={"max_tokens": 128, "temperature": 0.0})

    add_loading(commands["score"])
    add_score(commands["score"])
    add_loading(commands["perplexity"])
    add_perplexity(commands["perplexity"])

    add_loading(commands["bench"], tiered=True)
    add_bench(commands["bench"])

    add_loading(commands["plan"], tiered=True)
    add_plan(commands["plan"])

    add_model(commands["sensitivity"])
    add_sensitivity(commands["sensitivity"])

    info = commands["info"]
    add_model(info)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return root


def run(arguments: Sequence[str] | None) -> int:
    """Parses and runs a command line (None: that of the process) and returns the exit code. Lets Ctrl-C through."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown, options)
    try:
        module = "jaxinfer.cli." + options.command.replace("-", "_")
        code = importlib.import_module(module).run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain again when it flushes on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        if options.traceback:
            raise
        print(f"error: {options.parser.in_options(describe(error))}", file=sys.stderr)
        return 1 if isinstance(error, OSError) and error.errno in FAILED_WRITES else 2


def _open_standard_streams() -> None:
    """Python has None for a standard stream that the caller has closed (`>&-`), which nothing here expects."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (open to the end)


def describe(error: Exception) -> str:
    """An error as one line."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fspath(error.filename)}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FAILED_WRITES and error.strerror:
        return f"the output cannot be written: {error.strerror}"
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= LONGEST_ERROR else f"{words[:LONGEST_ERROR]}..."
