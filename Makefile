# Two commands do everything on a fresh machine: `make demo` and `make test`.
#   make build   environment in .venv and the patched llama.cpp        make stock   unpatched llama.cpp, to compare with
#   make check   format, lint, types                                   make bench   stock against the pack; what bounds it
#   make gpu-test   with an NVIDIA GPU: build with CUDA, test and measure against stock (about half an hour);
#                   bench/gpu_compare.sh, as root, compares under a small memory
# MODEL=/path/to/model.gguf make demo runs the demo on a model of yours. CUDA=1 builds the CUDA backend.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One compiler cache for both builds, wherever the clone lies; the same compiler names as Python's build uses.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CC  ?= gcc
export CXX ?= g++
ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
# llama-cpp-python needs none of its own native build: it runs on ours.
export CMAKE_ARGS := -DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF

ifdef CUDA
export SKBUILD_CMAKE_DEFINE ?= EXPERT_PACK_CUDA=ON
STOCK_OPTIONS := -DEXPERT_PACK_CUDA=ON
endif
# what was built last: the other kind must be built again
BUILT := $(VENV)/built$(if $(CUDA),-cuda)

BENCH_MODEL  := build/bench/model.gguf
NATIVE_FILES := $(shell find native -type f)
NATIVE_CODE  := $(wildcard native/src/*.cpp native/src/*.h native/src/cuda/* native/include/*.h tests/native/*.cpp tests/native/*.h)

.PHONY: demo test check format build stock bench cuda-check gpu-test clean

demo: build stock
	$(BIN)/python -m bench.demo $(if $(MODEL),--model "$(MODEL)")

test: build stock
	$(BIN)/python -m pytest

check: build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CODE)

format: $(VENV)/tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE_CODE)

build: $(BUILT)

stock: $(VENV)/tools
	@mkdir -p build/stock
	$(BIN)/cmake -S native -B build/stock -G Ninja -DEXPERT_PACK_STOCK=ON $(STOCK_OPTIONS) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		> build/stock/configure.log || { tail -n 20 build/stock/configure.log; exit 1; }
	$(BIN)/ninja -C build/stock --quiet llama mtmd test-llama-archs llama-server

# MODEL=/path/to/model.gguf make bench compares with a model of yours
bench: build stock
	@mkdir -p build/bench
	@test -n "$(MODEL)" || test -e $(BENCH_MODEL) || $(BIN)/python -m bench.make_model $(BENCH_MODEL) --preset demo --layers 36 > /dev/null
	$(BIN)/python -m bench.compare --model "$(or $(MODEL),$(BENCH_MODEL))" --ram-cap 25% --cap-if-possible --cache 25% \
		--out build/bench/compare.jsonl --report build/bench
	$(BIN)/python -m bench.reader_bandwidth build/bench --rounds 2 --out build/bench/reader.jsonl
	$(BIN)/python -m bench.convert_speed "$(or $(MODEL),$(BENCH_MODEL))" build/bench --rounds 1 --out build/bench/convert.jsonl

# needs nvcc, no GPU; the toolkit may lack cuBLAS, whose headers a Python package has
cuda-check: build
	@test -d build/cublas || $(BIN)/pip install --quiet --no-deps --target build/cublas 'nvidia-cublas==13.0.2.14'
	$(BIN)/python native/cuda_check.py build/cp*/source --cublas "$$(dirname "$$(find build/cublas -name cublas_v2.h | head -n 1)")"

gpu-test:
	$(MAKE) CUDA=1 build stock
	@mkdir -p build/gpu-models
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m bench.gpu identity build/gpu_identity.jsonl --models build/gpu-models
	$(BIN)/python -m bench.gpu resident build/gpu_resident.jsonl --models build/gpu-models
	$(BIN)/python -m bench.gpu missing build/gpu_missing.jsonl build/gpu-models/8x64-4096x2048-mxfp4.gguf

$(VENV)/python:
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) was not found: install Python 3.10 or later, or set PYTHON"; exit 1; }
	@command -v $(CXX) > /dev/null || { echo "error: the compiler $(CXX) was not found: install g++ (apt install g++), or set CXX"; exit 1; }
	@command -v git > /dev/null || { echo "error: git was not found: install git (apt install git)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "error: no virtual environment could be made: install python3-venv"; exit 1; }
	@touch $@

# what builds and checks; cmake and ninja come from here, so that the machine needs neither
$(VENV)/tools: $(VENV)/python pyproject.toml
	$(BIN)/pip install --quiet 'scikit-build-core>=0.10' 'cffi>=1.17' 'cmake>=3.25,<4' ninja \
		ruff mypy 'clang-format==18.1.8'
	@touch $@

$(BUILT): $(VENV)/tools pyproject.toml $(NATIVE_FILES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet --no-build-isolation --editable '.[test,dev]'
	@rm -f $(VENV)/built*
	@touch $@

clean:
	rm -rf build $(VENV) demo
