"""What is said of the package beside it agrees with the package."""

import tomllib
from pathlib import Path

import pytest
import yaml

import jaxpipe

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    assert CITATION["version"] == jaxpipe.__version__


@pytest.mark.parametrize(
    ("cited", "packaged"),
    [("title", "name"), ("abstract", "description"), ("license", "license"), ("keywords",) * 2],
)
def test_the_citation_says_what_the_package_says(cited: str, packaged: str) -> None:
    assert CITATION[cited] == PROJECT[packaged]


def test_authors() -> None:
    assert CITATION["authors"] == PROJECT["authors"]


def test_the_changelog_is_linked_where_readers_look() -> None:
    assert "](CHANGELOG.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](changelog.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "../CHANGELOG.md" in (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
