"""`python -m moonrelay.protos`: regenerate the stubs in `moonrelay/stubs/` from `proto/`; `--check` only compares.

Needs grpcio-tools (a development dependency); serving needs only the generated files.
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
STUBS = ROOT / "moonrelay" / "stubs"


def generate(out: Path) -> None:
    """Compile every .proto into `out` as the package `moonrelay.stubs.v1`."""
    from grpc_tools import protoc

    package = out / "v1"
    package.mkdir(parents=True, exist_ok=True)
    (out / "__init__.py").write_text('"""Generated from proto/ by `make proto`; do not edit."""\n')
    (package / "__init__.py").write_text("")
    include = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        files = [str(p.relative_to(SOURCES)) for p in sorted(SOURCES.rglob("*.proto"))]
        code = protoc.main(
            ["protoc", f"-I{SOURCES}", f"-I{include}", f"--python_out={scratch}", f"--pyi_out={scratch}",
             f"--grpc_python_out={scratch}", *files]
        )  # fmt: skip
        if code:
            raise SystemExit(f"protoc failed with {code}")
        for made in sorted(Path(scratch, "moonrelay", "v1").iterdir()):
            text = made.read_text().replace("from moonrelay.v1 import", "from moonrelay.stubs.v1 import")
            (package / made.name).write_text(text)


def stale() -> list[str]:
    """Names of stub files that differ from what `proto/` gives now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = {p.relative_to(scratch) for p in Path(scratch).rglob("*.py*")}
        have = {p.relative_to(STUBS) for p in STUBS.rglob("*.py*") if "__pycache__" not in p.parts}
        differing = [p for p in made & have if not filecmp.cmp(Path(scratch, p), STUBS / p, shallow=False)]
        return sorted(str(p) for p in [*differing, *(made ^ have)])


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        names = stale()
        if names:
            raise SystemExit(f"stale stubs, run `make proto`: {', '.join(names)}")
    else:
        generate(STUBS)
