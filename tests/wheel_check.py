"""`make check-wheel`: the wheel, in an empty environment, imports whole from elsewhere and owns its names.

Not part of the suite: it installs torch and NIXL once more. Prints one line per thing checked; exits 1 on the first
that is not so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("moonrelay", "model", "engine", "cachestore", "prefill", "decode", "router", "train")
INSIDE = """
import importlib, importlib.metadata, pkgutil, sys
packages, root = sys.argv[1].split(","), sys.argv[2]
count = 0
for name in packages:
    package = importlib.import_module(name)
    assert not package.__path__[0].startswith(root), f"{name} came from the checkout"
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            count += 1
owners = importlib.metadata.packages_distributions()
for name in packages:
    assert set(owners[name]) == {"moonrelay"}, f"{name} is owned by {owners[name]}"
installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
heavy = sorted(n for n in installed if n.startswith("nvidia-") or n in ("nixl", "nixl-cu13", "triton"))
assert not heavy, f"gigabytes of what nobody needs: {heavy}"
print(f"{count} modules import; no other distribution owns {', '.join(packages)}")
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="moonrelay-wheel-") as folder:
        scratch = Path(folder)
        tracked = run("git", "ls-files", "-z", cwd=ROOT).rstrip("\0").split("\0")
        source = scratch / "source"
        for name in tracked:  # what is tracked and nothing else: an untracked file must not hide a missing one
            if (ROOT / name).is_file() and not name.startswith(("tests/", "bench/")):
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((ROOT / name).read_bytes())
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", scratch]
        run(*pip, source, cwd=scratch)
        wheel = next(scratch.glob("moonrelay-*.whl"))
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        python = scratch / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "torch==2.13.0", f"{wheel}[train]", cwd=scratch)
        print(run(python, "-c", INSIDE, ",".join(PACKAGES), str(ROOT), cwd=scratch).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
