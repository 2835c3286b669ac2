"""Rules of the code base that no linter knows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxpipe").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_user_mistakes_are_no_assertion_errors(path: Path) -> None:
    raised = [n.exc for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise) and n.exc is not None]
    names = [getattr(getattr(exc, "func", exc), "id", "") for exc in raised]
    assert "AssertionError" not in names
    assert "NotImplementedError" not in names


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_private_of_jax_and_the_environment_in_one_room(path: Path) -> None:
    text = path.read_text()
    assert "jax._src" not in text
    assert "getenv" not in text
    assert "os.environ" not in text or path.parent.name in ("launch", "distributed")


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=_name)
def test_files_inside_a_room_are_private(path: Path) -> None:
    assert path.name.startswith("_") or path.parent.name == "jaxpipe"
