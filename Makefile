# Everything a user or contributor runs. The first call makes .venv with the exact versions CI uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What answers a prompt, and what develops.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# A folder of .jsonl prompt files: make test-all PROMPTS=dir, make bench-ablation PROMPTS=dir
PROMPTS ?=
# What one process of a test run has compiled, the others need not.
unexport PYTHONDONTWRITEBYTECODE
# The demo's model, fetched once; without it the packaged pair answers.
MODEL := $(VENV)/SmolLM2-135M-Instruct.gguf
# One's own pair: make demo TARGET=dir DRAFT=dir DTYPE=nf4
TARGET ?=
DRAFT ?=
DTYPE ?=
OWN = $(if $(TARGET),--target "$(TARGET)") $(if $(DRAFT),--draft "$(DRAFT)") $(if $(DTYPE),--dtype "$(DTYPE)")
QUESTION := What is the capital of France?

# Two processes for two cores. One file is run by one process, so that its models and pipelines are
# made once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 -p no:cacheprovider

.PHONY: help venv demo smollm2 test test-live flakes chaos prompts test-all check lint bench-hop bench-ablation bench-systems peer bench-peer mutations clean

help:
	@echo "make demo            SmolLM2-135M answers with one draft worker and four verify workers;"
	@echo "                     of your own models: make demo TARGET=dir DRAFT=dir DTYPE=nf4"
	@echo "make smollm2         fetch that model; the demo does"
	@echo "make test            what CI runs: lint, types, and all tests that are not live or heavy, with one"
	@echo "                     live test for each promise; 10 to 15 minutes on two cores"
	@echo "make test-live       the other tests of processes, threads and clocks"
	@echo "make test-all        both, with the heavy checks; needs PROMPTS=dir, a folder of .jsonl prompt files"
	@echo "make flakes          the live tests of make test N=20 times, every other time on a busy machine"
	@echo "make chaos           a pipeline broken at random moments, SEEDS=25 of them; 6 minutes a seed"
	@echo "make check           lint and types only"
	@echo "make lint            lint only"
	@echo "make bench-hop       cost of a hop, a commit and a prune on this machine"
	@echo "make bench-ablation  FlowSpec's mechanisms one by one, in simulation"
	@echo "make bench-systems   every system with every draft source, in simulation"
	@echo "make peer            build llama.cpp from its published package, to compare with (about 15 minutes)"
	@echo "make bench-peer      llama.cpp's RPC split beside ours in one run, links shaped (about 100 minutes, idle machine)"
	@echo "make mutations       break one rule at a time and check that a test fails"

venv: $(STAMP)

$(RUNS): pyproject.toml ops/constraints.txt
	@echo "installing into $(VENV), once: torch, transformers and some small packages; 0.4 GB to download," \
		"or several GB where pip finds only torch for CUDA" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint ops/constraints.txt --editable '.[worker,broker,quantised,gateway]'
	@touch $@

$(STAMP): $(RUNS)
	@echo "installing what the tests need into $(VENV), once" >&2
	@$(BIN)/python -m pip install --quiet --constraint ops/constraints.txt --editable '.[worker,broker,quantised,gateway,dev]'
	@touch $@

demo: $(RUNS) $(if $(TARGET),,smollm2)
	$(BIN)/flowspec generate "$(QUESTION)" --max-new-tokens 64 $(or $(strip $(OWN)),$$(test ! -f $(MODEL) || echo --target $(MODEL) --draft smollm2-head+ngram))

smollm2: $(RUNS)
	@test -f $(MODEL) || $(BIN)/python -m ops.smollm2 $(MODEL) || true

check: lint
	$(BIN)/mypy --num-workers 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: check smollm2
	$(PYTEST) -m "not heavy and (gate or not live)"

test-live: $(STAMP)
	$(PYTEST) -m "live and not gate and not heavy"

flakes: $(STAMP)
	$(BIN)/python -m ops.flakes $(or $(N),20)

chaos: $(STAMP)
	$(BIN)/python -m ops.chaos --seeds $(or $(SEEDS),25)

prompts:
	@ls "$(PROMPTS)"/*.jsonl >/dev/null 2>&1 || { echo "no prompt sets in '$(PROMPTS)': give PROMPTS=dir, a folder of .jsonl files" >&2; exit 1; }

test-all: prompts check
	FLOWSPEC_PROMPTS="$(abspath $(PROMPTS))" $(PYTEST) --hypothesis-profile thorough --timeout 7200

bench-hop: $(STAMP)
	$(BIN)/python -m ops.bench.hop

bench-ablation: $(if $(PROMPTS),prompts) $(STAMP)
	$(BIN)/python -m ops.bench.ablation $(if $(PROMPTS),--prompts "$(PROMPTS)")

bench-systems: $(if $(PROMPTS),prompts) $(STAMP)
	$(BIN)/python -m ops.bench.systems $(if $(PROMPTS),--prompts "$(PROMPTS)")

peer: $(STAMP)
	$(BIN)/python -m ops.peer.install

bench-peer: peer
	$(BIN)/python -m ops.bench.peer

mutations: $(STAMP)
	$(BIN)/python -m ops.mutations

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
