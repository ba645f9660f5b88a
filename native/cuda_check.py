"""Compiles every CUDA source that our patches touch, and our own, without a GPU: host code, and device code to PTX.

Usage: cuda_check.py SOURCE_TREE [--cublas INCLUDE_DIR]

SOURCE_TREE is the patched llama.cpp of a build. cuBLAS headers come from the CUDA toolkit, or from INCLUDE_DIR (the
nvidia-cublas package has them). A patched header is compiled through one file that instantiates its kernels.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent
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


def compile_one(source: Path, tree: Path, cublas: Path | None) -> tuple[Path, str]:
    """The compiler's complaint, empty if there is none."""
    folders = [
        tree / "ggml" / "include",
        tree / "ggml" / "src",
        tree / "ggml" / "src" / "ggml-cuda",
        NATIVE / "src",
        NATIVE / "src" / "cuda",
        NATIVE / "include",
        *([cublas] if cublas else []),
    ]
    command = [
        *("nvcc", "-std=c++17", "-gencode", "arch=compute_80,code=compute_80", "-O0", "-c", "-o", "/dev/null"),
        *("-DGGML_CUDA_USE_GRAPHS", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD"),
        *("--extended-lambda", "-use_fast_math", "-Xcompiler", "-fPIC"),
        *(f"-I{folder}" for folder in folders),
        str(source),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return source, "" if run.returncode == 0 else (run.stderr or run.stdout)[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the CUDA sources that the patches touch.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--cublas", type=Path)
    args = parser.parse_args()
    sources = touched_sources(args.tree)
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for source, complaint in pool.map(lambda source: compile_one(source, args.tree, args.cublas), sources):
            print(f"{'FAILED' if complaint else 'compiles'}  {source.name}", flush=True)
            failed += bool(complaint)
            if complaint:
                print(complaint, file=sys.stderr)
    print(f"{len(sources) - failed} of {len(sources)} CUDA sources compile")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
