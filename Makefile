# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11+ with venv, and make. Every target makes or refreshes .venv by itself.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := engine pallas_kernels sharding checkpoints scripts
STAMP := .venv/.installed
AOT := .venv/aot/.installed

.PHONY: venv demo test test-slow test-device bench lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headrace needs Python 3.11 or newer; try make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making .venv" >&2; $(PYTHON) -m venv .venv; }
	@echo "installing the packages of constraints.txt into .venv" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Apart from the environment's packages: beside them, jax would look for a TPU at every start.
$(AOT): constraints.txt | $(STAMP)
	@echo "installing libtpu, the compiler for TPUs, into .venv/aot" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade \
	  --target .venv/aot -c constraints.txt \
	  'libtpu; sys_platform == "linux" and platform_machine == "x86_64"'
	@echo "installing XLA's compiler for NVIDIA GPUs into .venv/aot/cuda" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade \
	  --target .venv/aot/cuda -c constraints.txt \
	  'jax-cuda12-plugin; sys_platform == "linux" and platform_machine == "x86_64"' \
	  'jax-cuda12-pjrt; sys_platform == "linux" and platform_machine == "x86_64"'
	@mkdir -p .venv/aot
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m scripts.generate --model=smollm2-135m --max_tokens=48 --temperature=0 \
	  --max_num_seqs=4 --max_num_batched_tokens=64 --max_model_len=2048 \
	  --prompt="The capital of France is" \
	  --prompt="Water boils when" \
	  --prompt="Once upon a time, a small robot"

# Processes that tests run in; a file's tests, which share engines, run in one of them.
WORKERS ?= 2

# Programs without LLVM's optimizations: half of a run's time would be theirs. The slow tests have
# them, with the tests marked `optimized`. XLA=: no flags here either.
XLA ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false

test: $(STAMP)
	@XLA_FLAGS="$(XLA)" $(BIN)/python -m pytest -q -m "not slow and not device" --durations=10 \
	  -n $(WORKERS) --dist loadfile

# Without the longest: make test-slow SLOW="slow and not long".
SLOW ?= slow

test-slow: $(STAMP) $(AOT)
	@$(BIN)/python -m pytest -q -m "($(SLOW)) or optimized" --durations=10 -n $(WORKERS)

# The cases of the kernels, each by the kernel of the device at hand: PLATFORMS=tpu,cpu on a TPU.
PLATFORMS ?= cuda,cpu

test-device: $(STAMP)
	@JAX_PLATFORMS=$(PLATFORMS) $(BIN)/python -m pytest -q -m "not slow" --durations=10 \
	  tests/pallas_kernels

# The figures and charts of every suite, in BENCH. With PEER_PYTHON and PEER_MODEL, PEER_GGUF or
# both, beside the peers. BENCH_FLAGS are for all suites; serving replays SERVING requests.
BENCH ?= build/bench
BENCH_FLAGS ?=
SERVING ?= 64
PEERS := $(if $(PEER_PYTHON),--peer_python=$(PEER_PYTHON) \
  $(if $(PEER_MODEL),--peer_model=$(PEER_MODEL)) $(if $(PEER_GGUF),--peer_gguf=$(PEER_GGUF)))
MEASURE = @mkdir -p $(BENCH) && $(BIN)/python -m scripts.benchmark --suite=$(1) \
  --output=$(BENCH)/$(1).json --charts=$(BENCH) $(2) $(BENCH_FLAGS)

bench: $(STAMP)
	$(call MEASURE,decode)
	$(call MEASURE,prefill,$(PEERS))
	$(call MEASURE,startup)
	$(call MEASURE,loading)
	$(if $(PEERS),$(call MEASURE,peers,$(PEERS)))
	$(call MEASURE,serving,--num_requests=$(SERVING) $(PEERS))
	$(call MEASURE,sampling)
	$(call MEASURE,scheduler)
	$(call MEASURE,steps,--requests=1)
	$(call MEASURE,scoring)
	$(call MEASURE,prefix)
	$(call MEASURE,kernels)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m compileall -q $(PACKAGES) tests

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
