"""Every public name is on a page of the API reference."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import jaxpipe

PAGES = sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.md"))
ROOMS = sorted(
    {name for name in jaxpipe.__all__ if isinstance(getattr(jaxpipe, name), ModuleType)}
    | {"monitor"}
)


def names_for_users(room: ModuleType) -> list[str]:
    exceptions = (
        name
        for name, value in vars(room).items()
        if isinstance(value, type) and issubclass(value, Exception)
    )
    return getattr(room, "__all__", [*exceptions])


def documented() -> Iterator[tuple[str, object]]:
    for page in PAGES:
        room = jaxpipe
        for kind, name in re.findall(
            r"^\.\. (?:py:)?(\w+):: (\S+)$", page.read_text(), re.MULTILINE
        ):
            if kind == "currentmodule":
                room = import_module(name)
            elif kind != "autosummary" and "." not in name:
                yield name, getattr(room, name)


ON_PAGES = dict(documented())


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_public_names_are_on_a_page(room: str) -> None:
    module = import_module(f"jaxpipe.{room}".rstrip("."))
    values = {name: getattr(module, name) for name in names_for_users(module)}
    wanted = {name for name, value in values.items() if not isinstance(value, ModuleType)}
    assert {name for name in wanted if ON_PAGES.get(name, ON_PAGES) is not values[name]} == set()


@pytest.mark.parametrize(
    "cls", [jaxpipe.PipelineEngine, jaxpipe.PipelineModule], ids=lambda cls: cls.__name__
)
def test_every_name_of_a_class_in_groups_is_on_its_page(cls: type) -> None:
    blocks = (
        re.split(rf"^\.\. autoclass:: {cls.__name__}$", page.read_text(), flags=re.MULTILINE)
        for page in PAGES
    )
    _, block = next(parts for parts in blocks if len(parts) == 2)
    block = re.split(r"^(?:\.\.|```)", block, flags=re.MULTILINE)[0]
    on_page = re.findall(r"^   \.\. auto(?:method|property):: (\w+)$", block, re.MULTILINE)
    assert sorted(on_page) == [name for name in dir(cls) if not name.startswith("_")]


def test_no_name_is_on_two_pages() -> None:
    names = [name for name, _ in documented()]
    assert {name for name in names if names.count(name) > 1} == set()


def test_every_page_of_the_reference_is_listed() -> None:
    listed = (PAGES[0].parents[1] / "api.md").read_text()
    assert {page.stem for page in PAGES if f"(api/{page.stem}.md)" not in listed} == set()
