# make demo   a real model answers        make test   the tests pass
# Both make .venv when it is missing, with the CUDA build of JAX where there is an NVIDIA driver.

VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Explain in two sentences why the sky is blue.
PYTEST_ARGS ?= -n auto --maxprocesses 8

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
	$(BIN)/python -m benchmarks.headline

clean:
	rm -rf $(VENV)

$(VENV)/.runtime: pyproject.toml
	@scripts/install.sh $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml
	@scripts/install.sh $(VENV) dev
	@touch $@ $(VENV)/.runtime
