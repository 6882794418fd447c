"""No room imports a room above it, and imports form no circle; imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[1]
FLOORS = [
    ["diagnostics"], ["files"], ["kernels"], ["models"], ["recipes"], ["parallelism"], ["devices"], ["programs"],
    ["plan"], ["train", "serve"], ["cli"],
]  # fmt: skip
"""From the ground up: a room imports its own files and those of lower floors, and no room of its own floor."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def files() -> dict[str, Path]:
    """The path of each module, by its name tpshard.room.file."""
    result = {}
    for room in FLOOR:
        for path in sorted((HOUSE / room).rglob("*.py")):
            name = ".".join(["tpshard", *path.relative_to(HOUSE).with_suffix("").parts])
            result[name.removesuffix(".__init__")] = path
    return result


def imports(tree: ast.AST) -> Iterator[str]:
    """The names that a module imports at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                yield f"{node.module}.{one.name}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                yield one.name
        yield from imports(node)


@cache
def arrows() -> dict[str, set[str]]:
    """The modules of tpshard that each module imports."""
    modules = files()

    def file_of(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    return {
        name: {file_of(one) for one in imports(ast.parse(path.read_text()))} & (modules.keys() - {name})
        for name, path in modules.items()
    }


def reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    names: set[str] = set()
    queue = [start]
    while queue:
        for name in graph[queue.pop()] - names:
            names.add(name)
            queue.append(name)
    return names


def test_every_folder_of_code_has_a_floor() -> None:
    rooms = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert rooms - {"package"} == FLOOR.keys()  # which is `tpshard` itself


def test_no_room_imports_upward() -> None:
    upward = [
        f"{name} imports {other}" for name, others in arrows().items() for other in others
        if (room := name.split(".")[1]) != (far := other.split(".")[1]) and FLOOR[far] >= FLOOR[room]
    ]  # fmt: skip
    assert upward == []


def test_folders_of_a_room_form_no_circle() -> None:
    """A folder imports only those before it. The files beside the folders are the room's door, or values for all."""
    folders: dict[str, set[str]] = {}
    for name, others in arrows().items():
        behind = {folder_of(other) for other in others if other.split(".")[1] == name.split(".")[1]}
        folders.setdefault(folder_of(name), set()).update(behind - {folder_of(name)})
    inner = folders.keys() - {f"tpshard.{room}" for room in FLOOR}
    graph = {folder: folders[folder] & inner for folder in inner}
    assert len(graph) > 30
    assert [folder for folder in sorted(graph) if folder in reach(folder, graph)] == []


def folder_of(name: str) -> str:
    return name if (HOUSE / Path(*name.split(".")[1:])).is_dir() else name.rpartition(".")[0]


def test_a_folder_holds_one_subject_that_a_sentence_says() -> None:
    """About a dozen files; more only where a folder is a table, a file a row."""
    tables = {"tpshard.cli", "tpshard.parallelism.rules", "tpshard.parallelism.passes", "tpshard.parallelism.runtime"}
    counts: dict[str, int] = {}
    for name in files():
        if folder_of(name) != name:
            counts[folder_of(name)] = counts.get(folder_of(name), 0) + 1
    assert {folder: count for folder, count in counts.items() if count > 17 and folder not in tables} == {}
    for name, path in files().items():
        if folder_of(name) == name:
            sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            assert sentence.endswith(".") and sentence.count(". ") == 0, name


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = arrows()
    behind = {name: reach(name, graph) for name in graph}
    in_circles = {name for name in graph if name in behind[name]}
    assert in_circles == set()
