"""Rules of the code base that no linter knows. Each test lists the offenders of all files."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxpipe").rglob("*.py"))


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(_text(path))))


def _at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def test_user_mistakes_are_no_assertion_errors() -> None:
    wrong = {"AssertionError", "NotImplementedError"}
    raised = [
        (path, node.exc)
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    assert len(raised) > 500
    assert [
        _at(path, exc)
        for path, exc in raised
        if getattr(getattr(exc, "func", exc), "id", "") in wrong
    ] == []


def test_nothing_private_of_jax_and_the_environment_in_one_room() -> None:
    rooms = ("launch", "distributed")
    assert [path for path in FILES if re.search(r"jax\._src|getenv", _text(path))] == []
    readers = [path for path in FILES if "os.environ" in _text(path)]
    assert [path for path in readers if path.parent.name not in rooms] == []


UNPROMISED = re.compile(
    r"jax\.extend|jax\.interpreters|\beqn\.(params|effects|ctx|source_info)\b|primitive\.name "
    r"(==|in) [\"{(]"
)
"""What JAX may change in any release: modules, fields of equations, names of primitives."""


def test_what_jax_does_not_promise_is_read_in_one_room() -> None:
    readers = [path for path in FILES if UNPROMISED.search(_text(path))]
    assert [path for path in readers if path.parent.name != "jaxpr"] == []
    modules = [path for path in FILES if re.search(r"jax\.(extend|interpreters)", _text(path))]
    assert [path.name for path in modules] == ["_equation.py"]


def test_files_inside_a_room_are_private() -> None:
    inside = [path for path in FILES if path.parent.name not in ("jaxpipe", "_util")]
    assert [path for path in inside if not path.name.startswith("_")] == []


LARGE = {"Engine", "PipelineParallelGrid", "StorePath"}
"""Classes with the methods that users of DeepSpeed and of `pathlib.Path` call."""


def test_classes_have_at_most_15_public_methods() -> None:
    """Properties count too."""
    classes = [node for path in FILES for node in _nodes(path) if isinstance(node, ast.ClassDef)]
    large = []
    for node in classes:
        names = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
        if len([name for name in names if not name.startswith("_")]) > 15:
            large.append(node.name)
    assert {*large} == LARGE


def test_no_key_is_built_from_strings() -> None:
    """What a search cannot find, a rename does not reach."""
    rooms = {"schedules", "executor", "state"}
    assert [
        _at(path, node)
        for path in FILES
        if path.parent.name in rooms
        for node in _nodes(path)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.JoinedStr)
    ] == []


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


def test_a_line_assigns_one_value() -> None:
    assert [_at(path, node) for path in FILES for node in _nodes(path) if _is_packed(node)] == []


def _imported(path: Path) -> Iterator[str]:
    """The files of its own room that a file imports, at any time.

    In functions and for types alone too.
    """
    room = f"jaxpipe.{path.parent.name}"
    for node in _nodes(path):
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


CIRCLES = {"plan/_html", "plan/_result"}
"""Files of a room that import each other, and are to be mended."""


def test_files_of_a_room_do_not_import_each_other_in_a_circle() -> None:
    circles = set[str]()
    for room in {path.parent for path in FILES if path.parent.name != "jaxpipe"}:
        files = {path.stem: path for path in room.glob("*.py") if path.stem != "__init__"}
        reached = {name: {*_imported(path)} & files.keys() for name, path in files.items()}
        for _ in files:
            reached = {
                name: found.union(*(reached[each] for each in found))
                for name, found in reached.items()
            }
        circles |= {f"{room.name}/{name}" for name, found in reached.items() if name in found}
    assert circles == CIRCLES


def test_modules_of_tests_have_names_of_their_own() -> None:
    # pytest puts each folder of tests on the path, so that one of two modules would hide the other.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert [name for name, count in Counter(names).items() if count > 1] == []
