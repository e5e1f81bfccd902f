"""The laws of the house: packages import downwards only, no package has a circle, no import is hidden."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cdmpp.program import import_tvm
from tests.samples.programs import matmul_task

ROOT = Path(__file__).parents[1]
#: From the ground up; what stands in one line does not import each other.
FLOORS = [
    {"errors", "files"}, {"device"}, {"program"}, {"dataset"}, {"predictor", "profiler"}, {"tuner"}, {"endtoend"},
    {"report"}, {"cli"},
]  # fmt: skip
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in sorted((ROOT / "cdmpp").rglob("*.py"))}


def imports(name: str) -> Iterator[str]:
    """Modules of cdmpp that a module imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: imports are absolute"
            yield from {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floor(name: str) -> str:
    top = name.split(".")[1]
    return "cli" if top.startswith("cli") or top in ("__main__", "demo") else top


#: A package's ``__init__`` names what is public in it, and so imports its own files.
GRAPH = {
    name: {
        other
        for other in imports(name)
        if other in MODULES and other not in (name, "cdmpp") and not other.startswith(name + ".")
    }
    for name in MODULES
    if name != "cdmpp"
}


def test_packages_import_downwards_only() -> None:
    found = {
        f"{name} -> {other}"
        for name, others in GRAPH.items()
        for other in others
        if floor(name) != floor(other) and FLOOR[floor(other)] >= FLOOR[floor(name)]
    }
    assert found == set()


def test_no_module_is_in_a_circle() -> None:
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in GRAPH[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    assert [name for name in GRAPH if name in reached(name)] == []


def test_no_import_is_hidden() -> None:
    """Packages name lazily what is public in them; the zoo loads the module of the network that is asked for."""
    hiding = [
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and re.search(r"import_module\(f?\"cdmpp", path.read_text())
    ]
    assert hiding == []


def test_profiling_loads_few_modules(tmp_path: Path) -> None:
    """What a reader of `cdmpp profile` has to know of; the number may only fall."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from cdmpp.cli import main\n"
        f"out = ['--out', {str(tmp_path / 'd')!r}, '--programs-per-task', '1']\n"
        "assert main(['profile', 'mlp', '--workers', '1', '--builders', '1', *out]) == 0\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'cdmpp'))\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = done.stdout.splitlines()[-1].split()
    assert 20 < len(loaded) <= 28, sorted(loaded)


#: Runs the command and prints how many modules of cdmpp that loads.
COUNT = """
import sys
from cdmpp.cli import main
code = main(sys.argv[1:])
print(sum(name.split(".")[0] == "cdmpp" for name in sys.modules))
sys.exit(code)
"""


def modules_loaded(*args: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT, *args], cwd=ROOT, capture_output=True, check=True)
    return int(done.stdout.split()[-1])


def test_a_prediction_loads_few_modules(tmp_path: Path) -> None:
    """A reader who follows it has no more to read."""
    program = tmp_path / "program.json"
    program.write_text(import_tvm().ir.save_json(matmul_task(64).prim_func()))
    assert modules_loaded("predict", str(program), "--device", "xeon-cascadelake-2.5ghz@1", "--compile", "0") <= 26


def test_a_tuning_loads_few_modules(tmp_path: Path) -> None:
    """Search, cost model, profiler, database and the whole network; the number may only fall."""
    small = ("--trials", "2", "--batch", "2", "--population", "8", "--generations", "1", "--builders", "1")
    assert modules_loaded("tune", "mlp", "--device", "this-cpu@1", "--out", str(tmp_path / "t"), *small) <= 45
