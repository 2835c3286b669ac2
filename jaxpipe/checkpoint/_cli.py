"""Checkpoints on the command line."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe._util.imports import import_named
from jaxpipe._util.paths import any_path, size_of
from jaxpipe._util.stores import AnyPath
from jaxpipe._util.text import format_bytes
from jaxpipe.errors import ConfigError, JaxpipeError, counted, printable, shown
from jaxpipe.weights import Rename

from ._inspect import inspect_checkpoint
from ._verify import verify_checkpoint
from ._weights import export_safetensors, save_huggingface

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m jaxpipe.checkpoint`; return 0, or 1 if there is no intact checkpoint."""
    try:
        # Wrong usage exits here with 2.
        args = _parser().parse_args(argv)
        text = args.run(args)
    except JaxpipeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{printable(text)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpipe.checkpoint",
        description="Inspect and verify checkpoints, and export their parameters for other "
        "libraries.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="what is in a checkpoint, by stage and layer")
    inspect.set_defaults(run=lambda args: inspect_checkpoint(args.path, args.tag))
    verify = commands.add_parser(
        "verify", help="read all of a checkpoint; the exit status is 1 if it is damaged"
    )
    verify.set_defaults(run=_verify)
    export = commands.add_parser(
        "export",
        help="write the parameters as safetensors",
        epilog="With --format huggingface, --renames is the table of names: a list of "
        "jaxpipe.weights.Rename, or a function that returns one, called with the path of --config "
        "if that is given. The models of jaxpipe.models have jaxpipe.models:llama_names, "
        "gpt2_names and bert_names.",
    )
    export.set_defaults(run=_export)
    for command in (inspect, verify, export):
        command.add_argument(
            "path", metavar="PATH", type=_path, help="directory of checkpoints, or of one"
        )
        command.add_argument(
            "--tag", metavar="T", help="name of the checkpoint; without it, the latest"
        )
    export.add_argument(
        "--out",
        metavar="PATH",
        required=True,
        help="file to write, such as model.safetensors; or a folder",
    )
    export.add_argument(
        "--max-shard-bytes",
        metavar="SIZE",
        type=_size,
        help="largest size of a file, such as 5GB or 4GiB; if one file is not enough, several are "
        "written with an index, as Hugging Face libraries do",
    )
    export.add_argument(
        "--format",
        choices=("jaxpipe", "huggingface"),
        default="jaxpipe",
        help="jaxpipe: one file of tensors named by our paths; huggingface: a folder that "
        "transformers opens",
    )
    theirs = export.add_argument_group("for --format huggingface")
    theirs.add_argument(
        "--renames", metavar="NAME", help="module:name, such as jaxpipe.models:llama_names"
    )
    theirs.add_argument("--config", metavar="FILE", help="the config.json to write, or its folder")
    theirs.add_argument(
        "--dtype", help="dtype to convert floating-point tensors to, such as bfloat16"
    )
    theirs.add_argument(
        "--lora-alpha", metavar="ALPHA", type=float, help="merge adapters, made with this alpha"
    )
    return parser


def _verify(args: argparse.Namespace) -> str:
    found = verify_checkpoint(args.path, args.tag)
    return (
        f"{found.path} is as it was written: {counted(found.num_rows, 'row')} of "
        f"{counted(found.num_arrays, 'array')}, {format_bytes(found.num_bytes)}"
    )


def _export(args: argparse.Namespace) -> str:
    theirs = {
        "--renames": args.renames,
        "--config": args.config,
        "--dtype": args.dtype,
        "--lora-alpha": args.lora_alpha,
    }
    given = [option for option, value in theirs.items() if value is not None]
    if args.format == "jaxpipe":
        if given:
            raise ConfigError(
                f"{given[0]} must be used with --format huggingface, but got --format jaxpipe. Add "
                "it."
            )
        written = export_safetensors(
            args.path, args.out, args.tag, max_shard_bytes=args.max_shard_bytes
        )
    else:
        options = {} if args.max_shard_bytes is None else {"max_shard_bytes": args.max_shard_bytes}
        written = save_huggingface(
            args.path,
            args.out,
            _renames(args.renames, args.config),
            config=args.config,
            tag=args.tag,
            dtype=args.dtype,
            lora_alpha=args.lora_alpha,
            **options,
        )
    return "\n".join(f"{path}  {format_bytes(size_of(path))}" for path in written)


def _renames(text: str | None, config: str | None) -> Sequence[Rename]:
    example = "jaxpipe.models:llama_names"
    if text is None:
        raise ConfigError(
            "--format huggingface must have a table of names. Add for instance --renames "
            f"{example}."
        )
    found = import_named(text, "--renames", example)
    if callable(found):
        found = found() if config is None else found(any_path(config, "--config"))
    if not isinstance(found, Sequence) or not all(isinstance(each, Rename) for each in found):
        raise ConfigError(
            "--renames must name a sequence of jaxpipe.weights.Rename, or a function that returns "
            f"one, but got {text} that gives {shown(found)}. Name for instance {example}."
        )
    return found


def _path(text: str) -> AnyPath:
    """Return the absolute path, so that `.` has a name too."""
    found = any_path(text, "PATH")
    return found.resolve() if isinstance(found, Path) else found


def _size(text: str) -> int:
    """Convert a size such as `5GB` or `4GiB` to bytes."""
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2] or "").upper() if match else ""
    size = (
        int(float(match[1]) * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit[:1]])
        if match
        else 0
    )
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"must be a size of at least one byte, but got {text!r}. Write for instance 5GB."
        )
    return size
