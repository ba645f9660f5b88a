"""Compiles every CUDA source that our patches touch, and our own, without a GPU, to machine code of each generation.

Usage: cuda_check.py SOURCE_TREE [--cublas INCLUDE_DIR] [--arch 8.9]...

The generations are those of consumer GPUs, Turing to Blackwell; what differs between them is in docs/CUDA.md. SOURCE_TREE is the patched llama.cpp of a build. cuBLAS headers come from the CUDA toolkit, or from INCLUDE_DIR (the
nvidia-cublas package has them). A patched header is compiled through one file that instantiates its kernels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent
# 120a: Blackwell's MXFP4 kernels are not in the family's common instructions
ARCHITECTURES = ("75", "86", "89", "120a")
# upstream's instances of the kernels in a header
INSTANCES = {
    "mmq.cuh": "template-instances/mmq-instance-mxfp4.cu",
    "mmf.cuh": "template-instances/mmf-instance-ncols_1.cu",
    "common.cuh": "norm.cu",
}


def touched_sources(tree: Path) -> list[Path]:
    """CUDA files to compile, each once."""
    folder = tree / "ggml" / "src" / "ggml-cuda"
    found = sorted((NATIVE / "src" / "cuda").glob("*.cu"))
    for patch in sorted((NATIVE / "patches").glob("*.patch")):
        for name in re.findall(r"^\+\+\+ b/ggml/src/ggml-cuda/(\S+)$", patch.read_text(), re.MULTILINE):
            found.append(folder / INSTANCES.get(name, name))
    return found


def compile_one(source: Path, arch: str, tree: Path, cublas: Path | None) -> str:
    """The compiler's complaint, empty if there is none."""
    folders = [
        tree / "ggml" / "include",
        tree / "ggml" / "src",
        tree / "ggml" / "src" / "ggml-cuda",
        *{header.parent for header in (NATIVE / "src").glob("*/*.h")},
        NATIVE / "include",
        *([cublas] if cublas else []),
    ]
    with tempfile.NamedTemporaryFile(suffix=".o") as out:
        command = [
            *(["ccache"] if shutil.which("ccache") else []),
            *("nvcc", "-std=c++17", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-c", "-o", out.name),
            *("-O0", "-Xptxas", "-O0"),  # whether it compiles, not how well: half the time
            *("-DGGML_CUDA_USE_GRAPHS", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD"),
            *("--extended-lambda", "-use_fast_math", "-Xcompiler", "-fPIC"),
            *(f"-I{folder}" for folder in folders),
            str(source),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if run.returncode == 0 else (run.stderr or run.stdout)[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the CUDA sources that the patches touch.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--cublas", type=Path)
    parser.add_argument("--arch", action="append", help="as 86 or 120a; default: all", choices=ARCHITECTURES)
    args = parser.parse_args()
    sources = touched_sources(args.tree)
    work = [(arch, source) for arch in args.arch or ARCHITECTURES for source in sources]
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = pool.map(lambda item: compile_one(item[1], item[0], args.tree, args.cublas), work)
        for (arch, source), complaint in zip(work, complaints, strict=True):
            print(f"{'FAILED' if complaint else 'compiles'}  sm_{arch}  {source.name}", flush=True)
            failed += bool(complaint)
            if complaint:
                print(complaint, file=sys.stderr)
    print(f"{len(work) - failed} of {len(work)} compile: {len(sources)} CUDA sources for each generation")
    return 1 if failed or not work else 0


if __name__ == "__main__":
    sys.exit(main())
