# Two commands do everything on a fresh machine: `make demo` and `make test`.
#   make build   environment in .venv and the patched llama.cpp        make stock   unpatched llama.cpp, to compare with
#   make check   format, lint, types                                   make bench   stock against the pack; what bounds it
#   make gpu-test   with an NVIDIA GPU: build with CUDA, test and measure against stock (about half an hour);
#                   bench/gpu/gpu_compare.sh, as root, compares under a small memory
# MODEL=/path/to/model.gguf make demo runs the demo on a model of yours. CUDA=1 builds the CUDA backend.
# What each step printed is in build/logs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Runs a command, shows its progress and what matters of its output, keeps the rest in a log.
STEP   := $(BIN)/python native/run_step.py build/logs
PIP    := $(BIN)/pip install --progress-bar off --disable-pip-version-check
unexport NINJA_STATUS
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
NATIVE_FILES := $(shell find native -type f ! -name '*.md' ! -name upgrade.py ! -name cuda_check.py)
NATIVE_CODE  := $(wildcard native/src/*/* native/include/*.h tests/native/*.cpp tests/native/*.h)

.PHONY: demo test check format build stock stock-library upgrade bench cuda-check gpu-test clean

demo: build stock-library
	$(BIN)/python -m bench.demo $(if $(MODEL),--model "$(MODEL)")

test: build stock $(VENV)/for-test
	$(BIN)/python -m pytest

check: build $(VENV)/for-test $(VENV)/for-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CODE)

format: $(VENV)/for-check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE_CODE)

build: $(BUILT)

# $(1): log, $(2): what it is, $(3): targets
define build_stock
	@$(STEP)/$(1).log "stock llama.cpp, unpatched: $(2)" sh -c 'PATH="$(CURDIR)/$(BIN):$$PATH"; \
		cmake -S native -B build/stock -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DEXPERT_PACK_STOCK=ON $(STOCK_OPTIONS) \
			-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" && ninja -C build/stock $(3)'
endef

stock-library: $(VENV)/tools
	$(call build_stock,stock-library,its library,llama mtmd)

# make upgrade VERSION=0.3.37 goes to another llama-cpp-python, if all patches fit: docs/UPGRADING.md
upgrade: $(VENV)/tools
	@$(BIN)/python native/upgrade.py "$(VERSION)"
	$(MAKE) build stock $(VENV)/for-test
	$(BIN)/python -m pytest tests/conformance tests/runtime/test_library.py

stock: $(VENV)/tools
	$(call build_stock,stock,its library and server,llama mtmd test-llama-archs llama-server)

# MODEL=/path/to/model.gguf make bench compares with a model of yours
bench: build stock $(VENV)/for-test
	@mkdir -p build/bench
	@test -n "$(MODEL)" || test -e $(BENCH_MODEL) || $(BIN)/python -m lab.make_model $(BENCH_MODEL) --preset demo --layers 36 > /dev/null
	$(BIN)/python -m bench.compare --model "$(or $(MODEL),$(BENCH_MODEL))" --ram-cap 25% --cap-if-possible --cache 25% \
		--out build/bench/compare.jsonl --report build/bench
	$(BIN)/python -m bench.drive.native_rate build/bench --rounds 2 --out build/bench/native.jsonl
	$(BIN)/python -m bench.drive.convert_speed "$(or $(MODEL),$(BENCH_MODEL))" build/bench --rounds 1 --out build/bench/convert.jsonl

# needs nvcc, no GPU; the toolkit may lack cuBLAS, whose headers a Python package has
cuda-check: build
	@test -d build/cublas || $(BIN)/pip install --quiet --no-deps --target build/cublas 'nvidia-cublas==13.0.2.14'
	$(BIN)/python native/cuda_check.py build/cp*/source --cublas "$$(dirname "$$(find build/cublas -name cublas_v2.h | head -n 1)")"

gpu-test:
	$(MAKE) CUDA=1 build stock $(VENV)/for-test
	@mkdir -p build/gpu-models
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m bench.gpu identity build/gpu_identity.jsonl --models build/gpu-models
	$(BIN)/python -m bench.gpu resident build/gpu_resident.jsonl --models build/gpu-models
	$(BIN)/python -m bench.gpu missing build/gpu_missing.jsonl build/gpu-models/8x64-4096x2048-mxfp4.gguf

# --clear: nothing of an environment that could not be finished stays
$(VENV)/python:
	@PYTHON="$(PYTHON)" sh native/check_needs.sh venv $(if $(CUDA),cuda)
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# CMake and ninja come from here, so that the machine needs neither
$(VENV)/tools: $(VENV)/python pyproject.toml
	@$(STEP)/tools.log "build tools: from the package index" \
		$(PIP) 'scikit-build-core>=1.0' 'cffi>=1.17' 'cmake>=3.25,<4' ninja
	@touch $@

# Only what runs is installed with it: tests and checks have their own.
$(BUILT): $(VENV)/tools pyproject.toml $(NATIVE_FILES)
	@$(STEP)/build.log "llama.cpp with our patches, and what it needs to run: the first build takes 5 to 10 minutes on two cores" \
		env PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --verbose --no-build-isolation --editable .
	@rm -f $(VENV)/built*
	@touch $@

# the extras of the package that is installed already: nothing is built again
$(VENV)/for-test: $(BUILT)
	@$(STEP)/for-test.log "what the tests need: from the package index" $(PIP) 'llama-expert-pack[test]'
	@touch $@

$(VENV)/for-check: $(BUILT)
	@$(STEP)/for-check.log "what checks the code: from the package index" $(PIP) 'llama-expert-pack[dev]'
	@touch $@

clean:
	rm -rf build $(VENV) demo
