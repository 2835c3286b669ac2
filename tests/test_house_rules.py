"""Rules of the code base that no linter knows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxpipe").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_user_mistakes_are_no_assertion_errors(path: Path) -> None:
    raised = [
        n.exc
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Raise) and n.exc is not None
    ]
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
    r"jax\.extend|jax\.interpreters|\beqn\.(params|effects|ctx|source_info)\b|primitive\.name "
    r"(==|in) [\"{(]"
)
"""What JAX may change in any release: modules, fields of equations, names of primitives."""


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_what_jax_does_not_promise_is_read_in_one_room(path: Path) -> None:
    assert path.parent.name == "jaxpr" or not UNPROMISED.search(path.read_text())
    assert path.name == "_equation.py" or not re.search(
        r"jax\.extend|jax\.interpreters", path.read_text()
    )


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=_name)
def test_files_inside_a_room_are_private(path: Path) -> None:
    assert path.name.startswith("_") or path.parent.name == "jaxpipe"


DEEPSPEEDS = {"Engine", "PipelineParallelGrid"}
"""Classes whose methods are those that DeepSpeed's users call."""


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_classes_have_at_most_15_public_methods(path: Path) -> None:
    classes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    for node in classes:
        methods = [x for x in node.body if isinstance(x, ast.FunctionDef) and not x.decorator_list]
        public = [x.name for x in methods if not x.name.startswith("_")]
        assert node.name in DEEPSPEEDS or len(public) <= 15, (node.name, public)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_key_is_built_from_strings(path: Path) -> None:
    """What a search cannot find, a rename does not reach."""
    rooms = {"schedules", "executor", "state"}
    subscripts = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Subscript)
    ]
    built = [ast.unparse(node) for node in subscripts if isinstance(node.slice, ast.JoinedStr)]
    assert not built or path.parent.name not in rooms


CIRCLES = {"tools": {"_html", "_result"}}
"""Files of a room that import each other, and are to be mended."""


def _is_packed(node: ast.AST) -> bool:
    """True for `a, b = x, y` where two lines would do: no value needs what was there before."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and all(_is_plain(x) for x in target.elts)):
        return False
    assigned = {ast.unparse(x) for x in target.elts}
    return assigned.isdisjoint(ast.unparse(x) for x in ast.walk(node.value) if _is_plain(x))


def _is_plain(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_line_assigns_one_value(path: Path) -> None:
    packed = [n for n in ast.walk(ast.parse(path.read_text())) if _is_packed(n)]
    assert not [f"line {node.lineno}" for node in packed]


def _imported(path: Path) -> Iterator[str]:
    """The files of its own room that a file imports, at any time.

    In functions and for types alone too.
    """
    room = f"jaxpipe.{path.parent.name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1:
                yield from [module] if module else (alias.name for alias in node.names)
            elif module == room:
                yield from (alias.name for alias in node.names)
            elif module.startswith(f"{room}."):
                yield module.removeprefix(f"{room}.")
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix(f"{room}.") for alias in node.names)


@pytest.mark.parametrize(
    "room", sorted({path.parent for path in FILES if path.parent.name != "jaxpipe"}), ids=_name
)
def test_files_of_a_room_do_not_import_each_other_in_a_circle(room: Path) -> None:
    files = {path.stem: path for path in room.glob("*.py") if path.stem != "__init__"}
    reached = {name: {*_imported(path)} & files.keys() for name, path in files.items()}
    for _ in files:
        reached = {
            name: found.union(*(reached[each] for each in found)) for name, found in reached.items()
        }
    circle = {name for name, found in reached.items() if name in found}
    assert circle - CIRCLES.get(room.name, set()) == set()


def test_modules_of_tests_have_names_of_their_own() -> None:
    # pytest puts each folder of tests on the path, so that one of two modules would hide the other.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
