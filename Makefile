# make train   fine-tunes a real checkpoint on this machine's GPUs, or on its CPU
# make test    runs the tests; `make test-all` the slow ones, which start real launchers; `make kill-test` kills runs
# make test-full  runs the cells of the matrices that those two take samples of
# make matrix-tp  splits every model type that has a plan for tensor parallelism, and writes docs/tp_matrix.md
# make matrix-pp  splits every model type into the stages of a pipeline, and writes docs/pp_matrix.md
# Each sets up .venv first where it is missing.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
DEMO := .demo

# DeepSpeed rebuilds its C++ ops when the first `ninja` on PATH changes, and keeps them by name, not by environment.
export PATH := $(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
MODEL := $(DEMO)/SmolLM2-135M-Instruct/config.json
DATA := $(DEMO)/data/eval.jsonl
RANKS = $$(python -c "import torch; print(min(2, torch.cuda.device_count()) or 2)")
# One process for each core, each of which takes whole files: ranks wait for one another a good part of their time.
# What runs `alone` starts real launchers, kills ranks or measures time.
TESTS := OMP_NUM_THREADS=1 python -m pytest -rs
ON_ALL_CORES := --numprocesses logical --dist loadfile --no-loadscope-reorder
# The CPU's cores, shared by two ranks.
THREADS = $$(python -c "import os; print(max(1, os.cpu_count() // 2))")
CHECK_PYTHON := import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11+: make PYTHON=python3.11")
PIP := python -m pip install --no-compile --constraint constraints.txt

.PHONY: train announce ops test test-all test-full kill-test matrix-tp matrix-pp lint families deepspeed-keys clean

train: announce $(INSTALLED) $(MODEL) $(DATA)
	OMP_NUM_THREADS=$(THREADS) deepspeed --num_gpus $(RANKS) examples/train.py --config examples/demo/demo.json
	python examples/demo/show.py

announce:
	@echo "make train, on a machine with 2 cores:"
	@test -e $(INSTALLED) || echo "  1. installs PyTorch, DeepSpeed and transformers in .venv: about 1 minute, and the download"
	@test -e $(MODEL) || echo "  2. fetches SmolLM2-135M-Instruct and makes its Hugging Face folder: about 1 minute"
	@test -e $(DATA) || echo "  3. makes training data of Python's standard library: seconds"
	@echo "  4. trains 20 steps, draws the loss, asks the trained model a question: about 3 minutes on a CPU"

# Ahead of the tests, so that no test has to wait for a compiler; says at once when all is built.
ops: $(INSTALLED_DEV)
	ds-trainer doctor --build-ops

test: ops
	$(TESTS) $(ON_ALL_CORES) -m "not slow and not full and not alone"
	$(TESTS) -m "not slow and not full and alone"

test-all: ops
	$(TESTS) $(ON_ALL_CORES) -m "slow and not alone"
	$(TESTS) -m "slow and alone"

test-full: ops
	$(TESTS) $(ON_ALL_CORES) -m "full and not alone"
	$(TESTS) -m "full and alone"

# A failure names its seed: python -m tests.kill_test --seed N repeats it.
kill-test: ops
	OMP_NUM_THREADS=1 python -m tests.kill_test --runs 30

# Some types only, and no table: make matrix-tp TYPES="llama qwen3"
matrix-tp: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 python -m tests.matrix.tp --types $(TYPES)

matrix-pp: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 python -m tests.matrix.pp --types $(TYPES)

lint: $(INSTALLED_DEV)
	ruff check .
	ruff format --check .
	mypy

families: $(INSTALLED_DEV)
	python -m ds_trainer.parallel.make_families

deepspeed-keys: $(INSTALLED_DEV)
	python -m ds_trainer.engines.deepspeed.make_keys

clean:
	rm -rf $(DEMO) outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# One pip call. DeepSpeed ships no wheel, so pip builds one, in isolation and without torch: its C++ ops are compiled when
# a run first needs them. Where pip sees an installed torch and a GPU instead, DeepSpeed's set-up script asks for nvcc,
# which DS_IGNORE_CUDA_DETECTION prevents. Bytecode is left to the first import: most of what is installed never runs.
$(INSTALLED): EXTRAS := demo
$(INSTALLED_DEV): EXTRAS := demo,dev
$(INSTALLED) $(INSTALLED_DEV): pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv $(VENV); }
	DS_IGNORE_CUDA_DETECTION=1 $(PIP) setuptools --editable '.[$(EXTRAS)]'
	touch $(sort $(INSTALLED) $@)

$(MODEL): | $(INSTALLED)
	python examples/demo/prepare_model.py --out $(@D)

$(DATA): examples/demo/prepare_data.py | $(INSTALLED)
	python examples/demo/prepare_data.py --out $(@D)
