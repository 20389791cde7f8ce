"""The module that the launcher starts engines as, with something else in the place of vLLM."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = "from tests.soak.stand_in_engine import main\n\nmain()\n"


def install(folder: Path, source: str = STAND_IN) -> str:
    """Make the module in `folder`; the PYTHONPATH with which engines find it."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "api_server.py").write_text(source)
    return f"{folder}:{ROOT}"
