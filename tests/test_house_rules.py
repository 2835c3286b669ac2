"""Rules of the code base that no linter knows."""

import ast
import re
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


UNPROMISED = re.compile(
    r"jax\.extend|jax\.interpreters|\beqn\.(params|effects|ctx|source_info)\b|primitive\.name (==|in) [\"{(]"
)
"""What JAX may change in any release: modules, fields of equations, names of primitives."""


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_what_jax_does_not_promise_is_read_in_one_room(path: Path) -> None:
    assert path.parent.name == "jaxpr" or not UNPROMISED.search(path.read_text())
    assert path.name == "_equation.py" or not re.search(r"jax\.extend|jax\.interpreters", path.read_text())


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=_name)
def test_files_inside_a_room_are_private(path: Path) -> None:
    assert path.name.startswith("_") or path.parent.name == "jaxpipe"


DEEPSPEEDS = {"Engine", "PipelineParallelGrid"}
"""Classes whose methods are those that DeepSpeed's users call."""


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_classes_have_at_most_15_public_methods(path: Path) -> None:
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    for node in classes:
        methods = [x for x in node.body if isinstance(x, ast.FunctionDef) and not x.decorator_list]
        public = [x.name for x in methods if not x.name.startswith("_")]
        assert node.name in DEEPSPEEDS or len(public) <= 15, (node.name, public)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_key_is_built_from_strings(path: Path) -> None:
    """What a search cannot find, a rename does not reach."""
    rooms = {"schedules", "executor", "state"}
    subscripts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Subscript)]
    built = [ast.unparse(node) for node in subscripts if isinstance(node.slice, ast.JoinedStr)]
    assert not built or path.parent.name not in rooms
