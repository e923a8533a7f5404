# `make demo` and `make test` set up everything they need on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs bench chaos clean debian
.DEFAULT_GOAL := demo

# torch first: asked for by another package, pip would take a CUDA build of several GB. The builds of
# torchvision and its kin that vLLM brings do not match the CPU's torch, and nothing here needs them.
$(READY): pyproject.toml requirements/vllm.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/torch.txt
	$(BIN)/pip install --quiet --requirement requirements/vllm.txt
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --requirement requirements/dev.txt --editable '.[otel]'
	touch $@

# promtool, from the Debian package `prometheus`; a compiler for the wall clock that a test sets.
debian:
	command -v promtool >/dev/null || (apt-get update -qq && apt-get install -qq -y prometheus)
	command -v gcc >/dev/null || (apt-get update -qq && apt-get install -qq -y gcc libc6-dev)

demo: $(READY)
	$(BIN)/python -m demo

test: $(READY) debian lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

docs: $(READY)
	$(BIN)/python docs/generate.py

bench: $(READY)
	$(BIN)/python -m benchmarks.probes
	$(BIN)/python -m benchmarks.agent

# Half an hour, as root: breaks llmobs beneath real servers and writes docs/reliability.md's table.
chaos: $(READY)
	$(BIN)/python -m tests.faults_of_ours.chaos --fresh --injections 1000 --lives

clean:
	rm -rf $(VENV) .demo
