"""Who may import what, and what importing the package costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shmemar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Checker = Callable[[str, ast.Module], list[str]]

PACKAGE = Path(shmemar.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE.parent).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
INSTRUCTION = re.compile(
    r"\b(ld|st|atom|red|fence|membar|mov|multimem|bar|barrier|shfl|griddepcontrol|mul|fma)\.[a-z]"
    r"|%(globaltimer|clock|laneid|smid|n?ctaid|n?tid)\b"
)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree, but for bodies of ``if TYPE_CHECKING:`` and strings that stand alone."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for other in child.orelse:
                yield from executed(other)
            continue
        yield from executed(child)


def imported(path: str, tree: ast.Module) -> Iterator[str]:
    """Full names of everything that the module at `path` may import when it runs."""
    package = path.split("/")[:-1]
    for node in executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            is_import = ast.unparse(node.func).endswith(("import_module", "__import__"))
            constants = (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
            yield from (str(name) for name in constants if is_import)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def check_direction(path: str, tree: ast.Module) -> list[str]:
    """Imports go one way: root <- device <- device/kernels <- host."""
    folder = path.rpartition("/")[0]
    if path == "shmemar/__main__.py" or is_in(folder.replace("/", "."), "shmemar.host"):
        return []
    forbidden = ["shmemar.host"]
    if folder == "shmemar/device":
        forbidden.append("shmemar.device.kernels")
    elif folder == "shmemar":
        forbidden.append("shmemar.device")
    return [n for n in imported(path, tree) if any(is_in(n, package) for package in forbidden)]


def check_owners(path: str, tree: ast.Module) -> list[str]:
    """One module alone imports nvshmem, and one mpi4py."""
    owners = {"nvshmem": "shmemar/host/runtime.py", "mpi4py": "shmemar/host/bootstrap.py"}
    return [
        name
        for name in imported(path, tree)
        for package, owner in owners.items()
        if is_in(name, package) and path != owner
    ]


def check_environment(path: str, tree: ast.Module) -> list[str]:
    """``config.py`` alone touches the environment."""
    names = {f"os.{name}" for name in ("environ", "environb", "getenv", "putenv", "unsetenv")}
    if path == "shmemar/config.py":
        return []
    attributes = (ast.unparse(n) for n in executed(tree) if isinstance(n, ast.Attribute))
    return [name for name in (*attributes, *imported(path, tree)) if name in names]


def check_ptx(path: str, tree: ast.Module) -> list[str]:
    """``device/ptx.py`` alone holds PTX."""
    strings = (n.value for n in executed(tree) if isinstance(n, ast.Constant))
    found = [s for s in strings if isinstance(s, str) and INSTRUCTION.search(s)]
    return [] if path == "shmemar/device/ptx.py" else found


def check_habits(path: str, tree: ast.Module) -> list[str]:
    """No ``print`` but in ``__main__.py``, and no bare ``except``."""
    nodes = list(executed(tree))
    bare = ["except:" for n in nodes if isinstance(n, ast.ExceptHandler) and n.type is None]
    calls = (ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call))
    prints = [name for name in calls if name in ("print", "builtins.print")]
    return bare if path == "shmemar/__main__.py" else bare + prints


CHECKERS = [check_direction, check_owners, check_environment, check_ptx, check_habits]


@pytest.mark.parametrize("path", SOURCES)
@pytest.mark.parametrize("check", CHECKERS)
def test_a_source_keeps_the_rules(check: Checker, path: str) -> None:
    assert check(path, ast.parse(SOURCES[path])) == []


@pytest.mark.parametrize(
    "path", ["shmemar/__init__.py", "shmemar/device/ptx.py", "shmemar/host/bootstrap.py"]
)
def test_the_sources_were_found(path: str) -> None:
    assert path in SOURCES


BAD = [
    (check_direction, "shmemar/layout.py", "import shmemar.device.words"),
    (check_direction, "shmemar/layout.py", "from shmemar import host"),
    (check_direction, "shmemar/__init__.py", "from .host.communicator import init"),
    (check_direction, "shmemar/config.py", "def f():\n    from shmemar.host import heap"),
    (check_direction, "shmemar/spec.py", "import_module('shmemar.device.kernels')"),
    (check_direction, "shmemar/device/words.py", "from shmemar.host.heap import SymmetricHeap"),
    (check_direction, "shmemar/device/words.py", "from shmemar.device import kernels"),
    (check_direction, "shmemar/device/words.py", "from .kernels.one_shot import build"),
    (check_direction, "shmemar/device/kernels/one_shot.py", "from ...host import heap"),
    (check_owners, "shmemar/host/heap.py", "import nvshmem.core"),
    (check_owners, "shmemar/host/heap.py", "from mpi4py import MPI"),
    (check_owners, "shmemar/host/runtime.py", "def f():\n    import mpi4py.MPI as M"),
    (check_owners, "shmemar/host/bootstrap.py", "from nvshmem import core"),
    (check_owners, "shmemar/host/heap.py", "if not TYPE_CHECKING:\n    import mpi4py"),
    (
        check_owners,
        "shmemar/host/heap.py",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import mpi4py",
    ),
    (check_environment, "shmemar/spec.py", "import os\nos.environ['X']"),
    (check_environment, "shmemar/spec.py", "import os\nos.getenv('X')"),
    (check_environment, "shmemar/host/heap.py", "from os import environ"),
    (check_ptx, "shmemar/device/memory.py", "f('ld.relaxed.sys.global.b32 $0, [$1];')"),
    (check_ptx, "shmemar/device/memory.py", "f('st.global.b32 [$0], $1;')"),
    (check_ptx, "shmemar/device/memory.py", "f(f'fence.acq_rel.{scope};')"),
    (check_ptx, "shmemar/host/heap.py", "x = 'mov.u64 $0, %globaltimer;'"),
    (check_habits, "shmemar/host/heap.py", "print('x')"),
    (check_habits, "shmemar/host/heap.py", "try:\n    pass\nexcept:\n    pass"),
    (check_habits, "shmemar/__main__.py", "try:\n    pass\nexcept:\n    pass"),
]


@pytest.mark.parametrize(("check", "path", "source"), BAD)
def test_a_breach_is_seen(check: Checker, path: str, source: str) -> None:
    assert len(check(path, ast.parse(source))) == 1


GOOD = [
    (check_direction, "shmemar/__main__.py", "from shmemar.host import communicator"),
    (check_direction, "shmemar/host/heap.py", "from shmemar.device.kernels import build"),
    (check_direction, "shmemar/device/kernels/one_shot.py", "from shmemar.device.kernels import x"),
    (check_direction, "shmemar/spec.py", "if TYPE_CHECKING:\n    from shmemar.host import heap"),
    (check_direction, "shmemar/spec.py", "import shmemar.devices"),
    (check_owners, "shmemar/host/bootstrap.py", "from mpi4py import MPI"),
    (check_owners, "shmemar/host/runtime.py", "import nvshmem.core"),
    (check_environment, "shmemar/config.py", "import os\nos.environ['X']"),
    (check_ptx, "shmemar/device/memory.py", '"""Lowered to ld.relaxed.sys."""'),
    (check_ptx, "shmemar/device/interpreter.py", "RELAXED_SYS = 'relaxed.sys'"),
    (check_habits, "shmemar/__main__.py", "print('x')"),
]


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_what_is_allowed_is_not_reported(check: Checker, path: str, source: str) -> None:
    assert check(path, ast.parse(source)) == []


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "mpi4py", "numba", "numba_cuda", "llvmlite", "cuda", "nvshmem", "cupy", "torch",
            "greenlet",
        }:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[1])
"""


def run_blocked(source: str) -> str:
    """Run Python in a fresh process where neither MPI nor a compiler nor a GPU library loads."""
    command = [sys.executable, "-c", BLOCKED + source, str(PACKAGE.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["mpi4py", "numba", "llvmlite"])
def test_the_fresh_process_has_no_heavy_package(module: str) -> None:
    source = f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)"
    assert run_blocked(source) == f"{module} is blocked"


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run_blocked(
        "import shmemar\n"
        "print(shmemar.__version__, *{'numpy', 'numba', 'mpi4py'} & sys.modules.keys())"
    )
    assert loaded == shmemar.__version__


@pytest.mark.parametrize("name", shmemar.__all__)
def test_a_public_name_resolves_without_mpi_or_gpu(name: str) -> None:
    source = f"import shmemar\nprint(shmemar.{name} is shmemar.{name}, {name!r} in dir(shmemar))"
    assert run_blocked(source) == "True True"


def test_the_communicators_module_loads_neither_mpi_nor_a_compiler() -> None:
    assert run_blocked("import shmemar.host.startup as c\nprint(c.init.__name__)") == "init"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shmemar' has no attribute 'allreduce_all'"):
        _ = shmemar.allreduce_all


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == shmemar.__version__
