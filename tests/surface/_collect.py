"""What users see of the library, as lines of text: one function for each kind."""

import argparse
import inspect
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin
from unittest import mock

import flax.linen as nn
import numpy as np
from _layouts import Layout

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe import __main__ as program
from jaxpipe.checkpoint import __main__ as checkpoint_program
from jaxpipe.layers import LORA_PARAMETERS, lora

PAGES = Path(__file__).parents[2] / "docs" / "api"


def names() -> Iterator[str]:
    """Every name of the package and of the API pages, with its signature and its members'."""
    found = {f"jaxpipe.{name}": getattr(jaxpipe, name) for name in jaxpipe.__all__}
    for page in PAGES.glob("*.md"):
        room = "jaxpipe"
        for kind, name in re.findall(r"^\.\. (\S+):: (\S+)$", page.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                room = name
            elif kind in ("autoclass", "autofunction", "py:data"):
                path = name if name.startswith("jaxpipe.") else f"{room}.{name}"
                found[path] = _resolved(path)
    for path, value in found.items():
        if isinstance(value, ModuleType):
            yield f"{path}: module"
        elif isinstance(value, type):
            yield from _of_class(path, value)
        else:
            yield f"{path}{_signature(value)}"


def keys() -> Iterator[str]:
    """Every key of the configuration with its values and default, without its meaning."""
    page = io.StringIO()
    with redirect_stdout(page):
        program.main(["config", "--markdown"])
    section = ""
    for line in page.getvalue().splitlines():
        if line.startswith("## "):
            section = line[3:].strip("`")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            yield f"{section}: {' | '.join(cells[:3])}"
        elif len(cells) == 2 and cells[0].startswith("`"):
            yield from (f"{section}: {key}" for key in cells[0].split(", "))


def commands() -> Iterator[str]:
    """What `--help` of every command shows."""
    for name in program._COMMANDS:
        yield from _shown(f"jaxpipe {name}", partial(program.main, [name, "--help"]))
    for words in ([], ["inspect"], ["verify"], ["export"]):
        prog = " ".join(["python -m jaxpipe.checkpoint", *words])
        yield from _shown(prog, partial(checkpoint_program.main, [*words, "--help"]))


def _shown(prog: str, run: Callable[[], Any]) -> Iterator[str]:
    parsers: list[argparse.ArgumentParser] = []
    # The text itself differs between versions of Python.
    with (
        mock.patch.object(
            argparse.ArgumentParser,
            "print_help",
            lambda self, file=None: parsers.append(self),  # noqa: ARG005
        ),
        suppress(SystemExit),
    ):
        run()
    (parser,) = parsers
    yield f"{prog}: {parser.description}"
    for action in parser._actions:
        word = ", ".join(action.option_strings) or action.metavar or action.dest
        choices = "" if action.choices is None else f" of {[*action.choices]}"
        yield f"{prog} {word} {action.metavar or ''}{choices} = {action.default}: {action.help}"


def _resolved(path: str) -> Any:
    room, _, name = path.rpartition(".")
    return getattr(import_module(room), name)


def _of_class(path: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    made = "" if issubclass(cls, BaseException) else _signature(cls)
    yield f"{path}: class({bases}){made}"
    if is_dataclass(cls):
        yield f"{path}: fields {', '.join(each.name for each in fields(cls))}"
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        owner = next((each for each in cls.__mro__ if name in vars(each)), cls)
        if name.startswith("_") or not owner.__module__.startswith("jaxpipe"):
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, Enum):
            yield f"{path}.{name} = {member.value!r}"
        elif callable(member):
            yield f"{path}.{name}{_signature(member)}"
        else:
            yield f"{path}.{name}"


def _signature(value: Any) -> str:
    """The parameters with their defaults. Annotations read differently in every version of JAX."""
    if get_origin(value) is not None:  # `Callable[...]`, which has one since Python 3.13
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    shown = [
        inspect.Parameter(
            each.name, each.kind, default=empty if each.default is empty else _Shown(each.default)
        )
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(shown))


class _Shown:
    """A default value. Objects that show an address show the name of their class."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        text = repr(self._value)
        if " at 0x" not in text and not text.startswith("<"):
            return text
        return f"<{getattr(self._value, '__qualname__', type(self._value).__qualname__)}>"


def arrays() -> Iterator[str]:
    """Leaves and arrays of a checkpoint of each kind."""
    for kind, engine in _saved():
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
            (path,) = Path(folder).glob("*/*/index.json")
            index = json.loads(path.read_text())
        yield f"{kind}: {', '.join(index)}"
        names = set()
        for key, leaf in index["leaves"].items():
            yield f"{kind}: leaf {key} {leaf['dtype']}{leaf['shape']}"
            names |= {span["array"] for span in leaf["spans"]}
        yield from (f"{kind}: array {name}" for name in names)


def _saved() -> Iterator[tuple[str, jaxpipe.PipelineEngine]]:
    average = {"ema": {"decay": 0.9}}
    for config, layout in (
        ({}, Layout(1, 1)),
        ({}, Layout(2, 1, model="norm", optimizer="Lamb")),
        (average, Layout(2, 2, zero=1, precision="bf16")),
        ({}, Layout(2, 1, zero=3, fsdp=2, precision="fp16")),
        ({}, Layout(2, 1, model="split_tied")),
        ({}, Layout(2, 1, schedule="interleaved", num_chunks=2)),
    ):
        example = next(layout.entries(0))
        kind = str(layout) + "".join(f"-{key}" for key in config)
        yield kind, layout.engine(config, example_batch=example)
    layers = lora([LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 1)], 2, 4.0, ["kernel"])
    model = PipelineModule(
        layers,
        topology=PipeDataParallelTopology(2, 1),
        loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean(),
        trainable=LORA_PARAMETERS,
    )
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
    example = (np.zeros((2, 4), np.float32), np.zeros((2, 1), np.float32))
    yield "lora", jaxpipe.initialize(model=model, config=config, example_batch=example)[0]


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "names": names,
    "keys": keys,
    "commands": commands,
    "arrays": arrays,
}


def collected(kind: str) -> list[str]:
    return sorted({" ".join(line.split()) for line in KINDS[kind]()})
