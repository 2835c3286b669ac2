"""Documents name files that exist, and the reader's documents keep their length."""

import re
from pathlib import Path

from jaxpipe.models._families import FAMILIES

ROOT = Path(__file__).parent.parent
DOCS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
FILES = {str(path.relative_to(ROOT / "jaxpipe")) for path in (ROOT / "jaxpipe").rglob("*.py")}
NAMES = {Path(name).name for name in FILES}


def test_files_that_are_named_exist() -> None:
    for path in DOCS:
        named = set(
            re.findall(r"(?<![\w/.-])(?:jaxpipe/)?((?:[a-z]+/)*_[a-z_0-9]+\.py)", path.read_text())
        )
        named |= {
            name.removeprefix("jaxpipe/")
            for name in re.findall(r"jaxpipe/[a-z_/]+\.py", path.read_text())
        }
        missing = {name for name in named if name not in FILES and not (ROOT / name).exists()}
        assert not {name for name in missing if "/" in name or name not in NAMES}


def test_links_lead_somewhere() -> None:
    for path in DOCS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_readme_lists_all_families() -> None:
    titles = ", ".join(family.title for family in FAMILIES.values())
    assert f"has {titles}, GPT-2 and BERT" in " ".join((ROOT / "README.md").read_text().split())


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "jaxpipe").glob("**/*/__init__.py")}
    assert {room for room in rooms if f"  {room}/ " not in text} == set()
    assert len(text.split()) <= 2000
