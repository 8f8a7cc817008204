# Every target sets up what it needs, inside this tree only, and is quick the second time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
RESULTS := benchmarks/results

# The first interpreter of a version this project supports; `make setup PYTHON=...` chooses another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)

# The interpreter whose torch sees the GPU; `cpu` for a rehearsal that measures nothing; and options, `--only SECTION...`.
GPU_PYTHON ?= $$(.ci/gpu-python)
GPU_DEVICE ?= cuda
GPU_OPTIONS ?=
GPU_RESULTS := $(if $(filter cpu-file,$(GPU_DEVICE)-$(origin RESULTS)),.cache/rehearsal,$(RESULTS))

# One compute thread per process, and no cache outside the tree.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_CACHE_DIR := 1
export HF_HOME := $(CURDIR)/.cache/huggingface
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export UBATCH_AUTOTUNE_CACHE := $(CURDIR)/.cache/autotune.json
export UBATCH_C_CACHE := $(CURDIR)/.cache/c
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
export FLASHINFER_WORKSPACE_BASE := $(CURDIR)/.cache

.PHONY: help setup setup-test setup-gpu demo test test-wide test-fast test-slow lint bench bench-link gpu gpu-first gpu-rest-1 gpu-rest-2 gpu-rest-3 test-gpu bench-gpu test-clients stub test-stub clean

help: ## this list
	@grep --extended-regexp '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## the virtual environment .venv, with the versions of constraints.txt
	@$(if $(filter setup,$(MAKECMDGOALS)),echo 'source .venv/bin/activate    # once per shell: then `ubatch` is a command',:)

# torch first, by itself: the rest then resolves against the version that is pinned, not the newest one. Modules are
# compiled on all processors, which pip does on one; it minds none that does not compile either.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUPPORTED)' \
	    || { echo "No Python 3.11 or 3.12 found. Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[test,dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

setup-test: $(VENV)/.installed-test

# GPU kernels that the tests interpret (Triton) or only look at (flashinfer's signatures). Without their dependencies,
# which are gigabytes of CUDA; and not where a CUDA build of torch has brought its own.
$(VENV)/.installed-test: $(VENV)/.installed constraints-test.txt
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --no-deps --requirement constraints-test.txt
	@touch $@

setup-gpu: $(VENV)/.installed-gpu

$(VENV)/.installed-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[gpu]'
	@touch $@

demo: setup ## what overlap gains, in under a minute: a step and a generation on two ranks; writes demo/trace.html
	$(BIN)/python examples/demo.py --out demo

# One worker more than processors, because tests wait for the processes that they start. A file runs in one worker, which
# has cores of its own as far as there are enough; the longest files begin (tests/conftest.py). What tests start imports
# this tree again and again: it is compiled once.
CORES ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) + 1)))
PYTEST := env --unset=PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PARALLEL := --dist loadfile --no-loadscope-reorder -n

test: setup-test ## the tests, of many cases that are alike a sample: 5 to 7 minutes on 2 cores
	$(PYTEST) -m "not slow and not wide" $(PARALLEL) $(WORKERS)

test-wide: setup-test ## the other cases, and the longest tests; CI runs both
	$(PYTEST) -m "wide and not slow" $(PARALLEL) $(WORKERS)

test-fast: setup-test ## for every commit: the tests that start nothing and compute little: about a minute on 2 cores
	$(PYTEST) -m "not slow and not wide and not long and not ranks and not server and not triton and not gpu and not alike" $(PARALLEL) $(CORES)

test-slow: setup-test ## the tests that are long by nature: more of the zoo, of interrupts, of transports, of servers
	$(PYTEST) -m slow

lint: setup ## ruff, mypy (of tests: those that only a GPU runs), and the floors (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)
	$(BIN)/lint-imports --cache-dir .cache/import_linter

bench: setup ## the CPU benchmarks; writes benchmarks/results/*.json
	$(BIN)/ubatch bench handoff --json $(RESULTS)/handoff.json
	$(BIN)/ubatch bench wrapper --json $(RESULTS)/wrapper.json
	$(BIN)/ubatch bench lanes --json $(RESULTS)/lanes.json
	$(BIN)/ubatch bench overlap --ratios 1.0 --json $(RESULTS)/overlap.json
	$(BIN)/ubatch bench overlap --lanes 2 --ratios 0.25 0.5 2.0 4.0 --json $(RESULTS)/overlap-ratios.json
	$(BIN)/ubatch bench overlap --dtype bfloat16 --ratios 1 --lanes 2 --json $(RESULTS)/overlap-bf16.json
	$(BIN)/ubatch bench transformers --json $(RESULTS)/transformers.json
	$(BIN)/ubatch bench schedules --blocks 6 --top 6 --json $(RESULTS)/schedules-qwen3-moe.json
	$(BIN)/ubatch bench schedules --random deepseek-v3 --sequences 4 --blocks 6 --json $(RESULTS)/schedules-deepseek-v3.json
	$(BIN)/ubatch bench schedules --random deepseek-v3 --sequences 12 --blocks 6 --top 3 --json $(RESULTS)/schedules-deepseek-v3-12-prompts.json
	$(BIN)/ubatch bench schedules --blocks 6 --random deepseek-v3 --layers 16 --sequences 12 --top 2 --json $(RESULTS)/schedules-deepseek-v3-16-layers.json
	$(BIN)/ubatch bench auto examples/models/tiny-moe --steps 500 --compared 0.5 --json $(RESULTS)/auto.json
	$(BIN)/ubatch bench experts --json $(RESULTS)/experts.json
	$(BIN)/ubatch bench attention --json $(RESULTS)/attention.json
	$(BIN)/ubatch bench step --blocks 6 --json $(RESULTS)/step.json
	$(BIN)/ubatch bench engine --only scheduler --json $(RESULTS)/engine-scheduler.json
	$(BIN)/ubatch bench engine --only overlap --blocks 6 --json $(RESULTS)/engine-overlap.json
	$(BIN)/ubatch bench speculation --json $(RESULTS)/speculation.json
	$(BIN)/ubatch bench abuse examples/models/tiny-moe --json $(RESULTS)/abuse.json
	$(BIN)/ubatch bench fairness examples/models/tiny-moe --json $(RESULTS)/fairness.json
	$(BIN)/ubatch bench faults examples/models/tiny-chat --only kill others poison limit pause nodes --kills 50 --json $(RESULTS)/faults.json
	$(BIN)/ubatch bench faults examples/models/tiny-chat --only kill --kills 10 --dtype bfloat16 --json $(RESULTS)/faults-bfloat16.json
	$(BIN)/ubatch bench faults examples/models/tiny-chat --only soak --minutes 20 --every-s 60 --json $(RESULTS)/faults-soak.json
	$(BIN)/ubatch bench structured --json $(RESULTS)/structured.json
	$(BIN)/ubatch bench eplb --json $(RESULTS)/eplb.json
	$(BIN)/ubatch bench eplb --only gain --experts 32 --experts-per-token 4 --expert-size 768 --sequences 16 --blocks 15 --json $(RESULTS)/eplb-gain.json
	$(BIN)/ubatch bench eplb --only shift --json $(RESULTS)/eplb-shift.json
	$(BIN)/ubatch bench engine --only offline served --blocks 4 --ranks 1 --json $(RESULTS)/engine-offline.json
	$(BIN)/ubatch bench faults examples/models/tiny-chat --only cost --blocks 160 --json $(RESULTS)/faults-cost.json

bench-link: setup ## the same over a real link between two servers, an hour; needs root
	$(BIN)/ubatch bench link --live --repeats 1 --json $(RESULTS)/link.json
	$(BIN)/ubatch bench link --links 0:0 500:600 --change --live --repeats 3 --arms serial dbo two-lanes --loads prefill mixed --json $(RESULTS)/link-change.json

# First what decides whether the rest makes sense, and the headline. What fails hides nothing that comes later.
gpu: ## test-gpu and bench-gpu in parts of 8 minutes at most, one after the other: gpu-first, gpu-rest-1, -2, -3
	@python="$(GPU_PYTHON)"; status=0; for part in first rest-1 rest-2 rest-3; do \
	    $(MAKE) --no-print-directory gpu-$$part GPU_PYTHON="$$python" || status=1; \
	done; exit $$status

gpu-first gpu-rest-1 gpu-rest-2 gpu-rest-3: gpu-%:
	@python="$(GPU_PYTHON)"; status=0; for target in test-gpu bench-gpu; do \
	    $(MAKE) --no-print-directory $$target GPU_PYTHON="$$python" GPU_OPTIONS="--only $*" || status=1; \
	done; exit $$status

test-gpu: ## the tests that need a GPU, with this machine's own torch if it is a CUDA build; writes gpu-tests.json
	@mkdir -p $(GPU_RESULTS)
	python="$(GPU_PYTHON)"; \
	PYTHONPATH=".:$${PYTHONPATH:-}" "$$python" -m serving.workbench.gpu.checks --device $(GPU_DEVICE) --json $(GPU_RESULTS)/gpu-tests.json $(GPU_OPTIONS)

bench-gpu: ## the GPU benchmarks, made for 10 minutes at most; writes benchmarks/results/gpu.json and gpu.md
	@mkdir -p $(GPU_RESULTS)
	python="$(GPU_PYTHON)"; \
	PYTHONPATH=".:$${PYTHONPATH:-}" "$$python" -m serving.workbench.gpu --device $(GPU_DEVICE) $(if $(filter cpu,$(GPU_DEVICE)),--tiny --blocks 1) \
	    --json $(GPU_RESULTS)/gpu.json --markdown $(GPU_RESULTS)/gpu.md $(GPU_OPTIONS)

# A CUDA that computes nothing, below the CUDA build of torch: 2.7 GB of packages in an environment of their own, or in the
# Python that STUB_PYTHON names.
STUB_VENV := .venv-stub
STUB_PYTHON ?= $(STUB_VENV)/bin/python
STUB := PYTHONPATH=.:tests/support $(STUB_PYTHON) -m stub_cuda

stub: $(if $(filter $(STUB_VENV)/%,$(STUB_PYTHON)),$(STUB_VENV)/.installed) ## a CUDA that computes nothing, compiled; see docs/gpu.md
	$(STUB).build

$(STUB_VENV)/.installed: constraints-stub.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Name one that has a CUDA build of torch: make stub STUB_PYTHON=..." >&2; exit 1; }
	test -x $(STUB_VENV)/bin/python || $(PYTHON) -m venv $(STUB_VENV)
	$(STUB_VENV)/bin/python -m pip install --requirement constraints-stub.txt
	@touch $@

test-stub: stub ## the GPU tests and benchmarks over it: no numbers, no speed; writes benchmarks/results/stub-cuda.json
	mkdir -p $(RESULTS)
	$(STUB).run $(if $(STUB_OPTIONS),$(STUB_OPTIONS),--json $(RESULTS)/stub-cuda.json)

# Other people's clients, in an environment of their own on top of this one: they want other versions than ours.
# Some leave connections to the garbage collector, which warns of them.
CLIENTS_VENV := .venv-clients

test-clients: $(CLIENTS_VENV)/.installed ## tools and structured answers with openai, langchain, instructor, pydantic-ai, openai-agents
	UBATCH_CLIENTS=1 env --unset=PYTHONDONTWRITEBYTECODE $(CLIENTS_VENV)/bin/python -m pytest -p no:unraisableexception tests/clients

$(CLIENTS_VENV)/.installed: $(VENV)/.installed constraints-clients.txt
	test -x $(CLIENTS_VENV)/bin/python || $(BIN)/python -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --requirement constraints-clients.txt
	realpath $(VENV)/lib/python3.*/site-packages > $$(echo $(CLIENTS_VENV)/lib/python3.*/site-packages)/ours.pth
	@touch $@

clean: ## remove the virtual environment, caches and what `make demo` wrote
	rm -rf $(VENV) $(STUB_VENV) $(CLIENTS_VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build demo *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
