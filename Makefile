# make demo   a real model answers        make test   the tests pass
# Both create .venv when it is missing, with the CUDA build of JAX where there is an NVIDIA driver.

VENV := .venv
BIN := $(VENV)/bin
JAX_EXTRA := $(shell scripts/jax-extra.sh)
comma := ,
RUNTIME := .$(if $(JAX_EXTRA),[$(JAX_EXTRA)])
DEV := .[dev$(if $(JAX_EXTRA),$(comma)$(JAX_EXTRA))]
PROMPT ?= Explain in two sentences why the sky is blue.
PYTEST_ARGS ?= -n 2

.PHONY: demo test test-gpu lint types check format performance clean

demo: $(VENV)/.runtime
	@$(BIN)/jaxinfer generate smollm2-135m-instruct --chat --prompt "$(PROMPT)" --max-tokens 96 --temperature 0

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

check: test lint types

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

performance: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@python=$$(scripts/find-python.sh) && echo "Creating $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '$(RUNTIME)'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '$(DEV)'
	@touch $@ $(VENV)/.runtime
