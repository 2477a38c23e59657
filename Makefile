# Two commands do everything on a fresh machine: `make decompose` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TOKENS ?= 3325
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
EXTRAS = $(if $(GPU),[cuda],)
comma := ,

.PHONY: decompose test test-gpu test-install lint clean
decompose: $(VENV)/installed ## Install, fetch the model, run a full prefill, print where its wall went
	$(BIN)/harness decompose --tokens $(TOKENS)

test: $(VENV)/installed-test ## Everything that needs no GPU: tests, kernels compiled for every architecture
	$(BIN)/python -m pytest -n 2 -m "not gpu and not install"

test-gpu: $(VENV)/installed-test ## Tests that need a GPU
	$(BIN)/python -m pytest -m gpu tests/gpu

test-install: $(VENV)/installed-test ## Fresh environments: the base install is small and whole, [cuda] brings every library
	$(BIN)/python -m pytest -n 2 --dist loadfile -m install tests/install

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An environment of another Python than PYTHON is made anew: its stamps go, and venv clears it.
VERSION = import sys; print(sys.version_info[:2])
ifneq ($(wildcard $(VENV)/bin/python),)
ifneq ($(shell $(BIN)/python -c '$(VERSION)' 2>&1),$(shell $(PYTHON) -c '$(VERSION)' 2>&1))
.PHONY: $(VENV)/bin/python $(VENV)/installed $(VENV)/installed-test
STALE = --clear
endif
endif

$(VENV)/bin/python:
	$(PYTHON) -m venv $(STALE) $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".$(EXTRAS)"
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,compile$(if $(GPU),$(comma)cuda,)]"
	@touch $@

clean: ## Removes what the other targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
