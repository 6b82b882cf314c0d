# make train   fine-tunes a real checkpoint on this machine's GPUs, or on its CPU
# make test    runs the tests; `make test-all` the slow ones, which start real launchers; `make kill-test` kills runs
# make matrix-tp  splits every model type that has a plan for tensor parallelism, and writes docs/tp_matrix.md
# make matrix-pp  cuts every model type into the stages of a pipeline, and writes docs/pp_matrix.md
# Each sets up .venv first where it is missing.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
DEMO := .demo

# DeepSpeed rebuilds its C++ ops when the first `ninja` on PATH changes, and keeps them by name, not by environment.
export PATH := $(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions

INSTALLED := $(VENV)/.installed
MODEL := $(DEMO)/SmolLM2-135M-Instruct/config.json
DATA := $(DEMO)/data/eval.jsonl
RANKS = $$(python -c "import torch; print(min(2, torch.cuda.device_count()) or 2)")
# The CPU's cores, shared by two ranks.
THREADS = $$(python -c "import os; print(max(1, os.cpu_count() // 2))")
CHECK_PYTHON := import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11+: make PYTHON=python3.11")
PIP := python -m pip install --constraint constraints.txt

.PHONY: train ops test test-all kill-test matrix-tp matrix-pp lint families clean

train: $(INSTALLED) $(MODEL) $(DATA)
	OMP_NUM_THREADS=$(THREADS) deepspeed --num_gpus $(RANKS) examples/train.py --config examples/demo/demo.json
	python examples/demo/show.py

# Ahead of the tests, so that no test has to wait for a compiler; says at once when all is built.
ops: $(INSTALLED)
	ds-trainer doctor --build-ops

test: ops
	OMP_NUM_THREADS=1 python -m pytest -rs -m "not slow"

test-all: ops
	OMP_NUM_THREADS=1 python -m pytest -rs -m slow

# A failure names its seed: python -m tests.kill_test --seed N repeats it.
kill-test: ops
	OMP_NUM_THREADS=1 python -m tests.kill_test --runs 30

# Some types only, and no table: make matrix-tp TYPES="llama qwen3"
matrix-tp: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m tests.matrix.tp --types $(TYPES)

matrix-pp: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m tests.matrix.pp --types $(TYPES)

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy

families: $(INSTALLED)
	python -m ds_trainer.parallel.make_families

clean:
	rm -rf $(DEMO) outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# DeepSpeed's set-up script reads the installed torch, so pip must not build it in isolation, where there is none. It also
# asks for nvcc where it sees a GPU, though it compiles nothing at this point: DS_IGNORE_CUDA_DETECTION keeps it from that.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv $(VENV); }
	$(PIP) torch numpy setuptools wheel ninja
	DS_IGNORE_CUDA_DETECTION=1 $(PIP) --no-build-isolation deepspeed
	$(PIP) --editable '.[demo,dev]'
	touch $@

$(MODEL): | $(INSTALLED)
	python examples/demo/prepare_model.py --out $(@D)

$(DATA): examples/demo/prepare_data.py | $(INSTALLED)
	python examples/demo/prepare_data.py --out $(@D)
