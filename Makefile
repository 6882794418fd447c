# `make train` sets up and trains the quickstart; `make test` sets up and passes the tests; tests/README.md has the rest.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
# Three workers, whatever the machine: one waits for processes while two compute. A thread each is enough for small tensors.
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -rs

.PHONY: setup train test tests texts test-avx2 test-all test-triton test-busy lint gpu
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q torch==$(TORCH) $(if $(filter 2.11.%,$(TORCH)),"numpy<2.4")
	$(BIN)/pip install -q -e ".[test]"
	touch $@

train: setup
	$(BIN)/tpshard train recipes/quickstart.yaml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	MYPYPATH=types $(BIN)/mypy -p tpshard

# Side by side: mypy uses one core, and pytest's workers wait for processes now and then.
test: setup
	$(MAKE) -j 2 lint tests

# The processes that tests start read compiled modules, also where Python is told not to write any.
tests:
	$(BIN)/python -m compileall -q $(patsubst %/py.typed,%,$(wildcard */py.typed))
	$(PYTEST) -m "not slow and not gpu"

# Writes the answers of tests/texts anew, for review.
texts: setup
	$(BIN)/python tests/text_case.py

# With the kernels of a CPU that has AVX2 and no AVX-512, on one that may have both: numpy's, torch's and their libraries'.
AVX2 = OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-avx2: setup
	$(AVX2) $(PYTEST) -m "not slow and not gpu"

# What `make test` leaves out and needs no GPU, and how long each of it takes.
test-all: test
	$(PYTEST) -m "slow and not gpu" --durations=0

# The kernels compiled and interpreted by another Triton, such as the one that torch for CUDA pins.
TRITON ?= 3.7.1
KERNELS := tests/kernels/test_triton_kernels.py tests/kernels/test_paged_attention.py tests/kernels/test_fp8.py
test-triton: setup
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(abspath $(VENV)/triton-$(TRITON)) $(PYTEST) -m "not gpu" $(KERNELS)

test-busy: setup
	$(BIN)/python tests/busy.py 2 $(PYTEST) -m "not slow and not gpu"

# Installs nothing: runs in the Python that holds torch and Triton for this machine's GPU.
gpu:
	PYTHONPATH=types $(PYTHON) -m pytest -m gpu --continue-on-collection-errors --durations=0 tests/gpu
