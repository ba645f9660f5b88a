# Two commands do everything on a fresh machine: `make demo` and `make test`.
#   make build   environment in .venv and the patched llama.cpp        make stock   unpatched llama.cpp, to compare with
#   make check   format, lint, types                                   make bench   comparison with stock
# MODEL=/path/to/model.gguf make demo runs the demo on a model of yours.

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

NATIVE_FILES := $(shell find native -type f)
NATIVE_CODE  := $(wildcard native/src/*.cpp native/src/*.h native/src/cuda/* native/include/*.h)

.PHONY: demo test check format build stock bench clean

demo: build stock
	$(BIN)/python -m bench.demo $(if $(MODEL),--model "$(MODEL)")

test: build stock
	$(BIN)/python -m pytest

check: $(VENV)/tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CODE)

format: $(VENV)/tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE_CODE)

build: $(VENV)/built

stock: $(VENV)/tools
	@mkdir -p build/stock
	$(BIN)/cmake -S native -B build/stock -G Ninja -DEXPERT_PACK_STOCK=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		> build/stock/configure.log || { tail -n 20 build/stock/configure.log; exit 1; }
	$(BIN)/ninja -C build/stock --quiet llama mtmd test-llama-archs

bench: build stock
	$(BIN)/python -m bench.compare

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

$(VENV)/built: $(VENV)/tools pyproject.toml $(NATIVE_FILES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet --no-build-isolation --editable '.[test,dev]'
	@touch $@

clean:
	rm -rf build $(VENV) demo
