"""The floors of DESIGN 3, held by reading imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    ("errors", "config", "memory_plan"),
    (
        "bundle",
        "images",
        "preprocess",
        "positions",
        "tokenizer",
        "token_bytes",
        "control_tokens",
        "chat_template",
        "messages",
        "prompt",
        "sampling",
        "grammar",
        "generation",
        "request",
        "answer",
        "sequence",
        "stats",
        "vision_cache",
        "filesystem",
        "meminfo",
        "boards",
        "libraries",
        "device",
        "machine_checks",
        "reference",
    ),
    ("checks", "executors"),
    ("runner",),
    ("request_queue", "scheduler"),
    ("vlm", "verify"),
    ("page", "server"),
    ("commands", "cli"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
VENDOR = {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "llguidance"}
VENDOR_ALLOWED = {
    "edgevlm/grammar.py": {"llguidance"},
    "edgevlm/executors/cuda.py": {"cuda"},
    "edgevlm/executors/host.py": {"onnxruntime"},
    "builders/lowering/host.py": {"onnxruntime"},
    "builders/streamed.py": {"onnxruntime"},
    "builders/compile_child.py": {"tensorrt", "tensorrt_rtx"},
}
RUNTIME_ALLOWED = {"numpy", "PIL", "tokenizers", "jinja2", "rich"}
SERVER = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "anyio", "h11"}
NEVER_AT_IMPORT = VENDOR | SERVER | {"torch", "transformers", "onnx", "builders"}

EDGEVLM = sorted(p.relative_to(ROOT) for p in (ROOT / "edgevlm").rglob("*.py"))
BUILDERS = sorted(p.relative_to(ROOT) for p in (ROOT / "builders").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function, as a dotted name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            found.add(node.module)
            # `from edgevlm import images` imports a module as well.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(dotted: str) -> str | None:
    """The module of edgevlm that a dotted name is or lies in: "edgevlm.bundle.Bundle" -> bundle."""
    parts = dotted.split(".")[1:]
    while parts:
        file = ROOT / "edgevlm" / Path(*parts)
        if file.with_suffix(".py").is_file() or (file / "__init__.py").is_file():
            return ".".join(parts)
        parts.pop()
    return None


def floor_of(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in FLOOR_OF:
            return FLOOR_OF[name]
    raise AssertionError(f"edgevlm.{module} stands on no floor; add it to FLOORS")


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", EDGEVLM, ids=str)
def test_a_module_imports_only_what_stands_below_it_or_beside_it(path: Path) -> None:
    module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    if module in ("__init__", "executors"):
        return  # the package itself re-exports what is public
    floor = floor_of(module)
    for name in imports(path):
        if name.startswith("edgevlm."):
            other = module_of(name)
            if other is None or other in (module, "executors"):
                continue
            assert floor_of(other) <= floor, f"{path} imports {name} from a higher floor"


@pytest.mark.parametrize("path", EDGEVLM, ids=str)
def test_the_runtime_never_imports_builders(path: Path) -> None:
    assert "builders" not in tops(path)


@pytest.mark.parametrize("path", EDGEVLM, ids=str)
def test_the_runtime_imports_few_libraries(path: Path) -> None:
    foreign = tops(path) - set(sys.stdlib_module_names) - {"edgevlm"}
    allowed = RUNTIME_ALLOWED | VENDOR_ALLOWED.get(path.as_posix(), set())
    if path.parts[1] != "commands":
        allowed = allowed - {"rich"}
    if path.parts[1] == "server":
        allowed = allowed | SERVER
    assert foreign <= allowed


@pytest.mark.parametrize("path", [*EDGEVLM, *BUILDERS], ids=str)
def test_vendor_libraries_are_imported_only_where_they_are_needed(path: Path) -> None:
    assert tops(path) & VENDOR <= VENDOR_ALLOWED.get(path.as_posix(), set())


def test_no_two_modules_import_each_other() -> None:
    needs: dict[str, set[str]] = {}
    for path in EDGEVLM:
        module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        found = {module_of(n) for n in imports(path) if n.startswith("edgevlm.")}
        needs[module] = {m for m in found if m is not None and m != module}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"imports go round: {' -> '.join((*above, module))}"
        if module not in done:
            for other in needs.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in needs:
        visit(module, ())


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"{code}\nimport sys\nprint(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import edgevlm", "from edgevlm import VLM, SamplingParams"])
def test_importing_edgevlm_loads_no_vendor_library(code: str) -> None:
    assert not loaded_after(code) & NEVER_AT_IMPORT


def test_help_loads_nothing_heavy() -> None:
    code = "from edgevlm.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass"
    assert not loaded_after(code) & (NEVER_AT_IMPORT | {"rich", "tokenizers", "jinja2", "PIL"})
