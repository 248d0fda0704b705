# Everything a newcomer runs. `make distill RECIPE=...` and `make test` set up what they need.
RECIPE ?= recipes/tiny.yaml
ARGS ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup distill teacher baseline-ar draft zaya diffusiongemma ablation eval bench results smoke kernels gpu-check test slow faults check clean

# The main job: all stages of a recipe that are not yet done, ending with a table. NPROC=8: in so many processes, one a GPU (on a machine
# without one, on its cores, with ddp), under an engine of recipes/accelerate/: ENGINE=ddp, fsdp2, zero3 (needs: pip install deepspeed).
NPROC ?= 1
ENGINE ?= ddp
LAUNCH = $(BIN)/accelerate launch --config_file recipes/accelerate/$(ENGINE).yaml --num_processes $(NPROC) --main_process_port 0 -m cdlm.cli
distill: $(VENV)/.run
	$(if $(filter-out 1 ddp,$(NPROC) $(ENGINE)),$(LAUNCH),$(BIN)/cdlm) distill $(RECIPE) $(ARGS)

# Trains the small world's teachers again from nothing, each ending with its table, and puts them in place of the committed ones.
teacher: $(VENV)/.run zaya diffusiongemma
	$(BIN)/cdlm distill recipes/tiny-teacher.yaml $(ARGS)
	rm -rf recipes/tiny/teacher && cp -r runs/tiny-teacher/export recipes/tiny/teacher

# The paper's loss ablation on a recipe.
ablation: $(VENV)/.run
	$(BIN)/cdlm ablate $(RECIPE) $(ARGS)

# lm-eval's tasks on a model: make eval MODEL=runs/tiny/export TASKS=small_world ARGS='--apply_chat_template --output_path runs/eval'
MODEL ?= runs/tiny/export
TASKS ?= small_world
eval: $(VENV)/.dev
	$(BIN)/cdlm eval $(MODEL) --tasks $(TASKS) $(ARGS)

# A finished run's student beside every baseline, growth with length, and the time around the forwards (what is spent outside the model
# in a decoding step, and a training step against its forwards and backwards alone): runs/<name>/bench.
bench: $(VENV)/.run
	$(BIN)/cdlm bench $(RECIPE) $(ARGS)

# Trains the small world's autoregressive model again from nothing, and puts it in place of the committed one.
baseline-ar: $(VENV)/.run
	$(BIN)/cdlm distill recipes/tiny-ar.yaml $(ARGS)
	rm -rf recipes/tiny/ar && cp -r runs/tiny-ar/export recipes/tiny/ar

# Trains the small model that drafts for that one (transformers' assisted generation), and puts it in place of the committed one.
draft: $(VENV)/.run
	$(BIN)/cdlm distill recipes/tiny-ar-draft.yaml $(ARGS)
	rm -rf recipes/tiny/ar-draft && cp -r runs/tiny-ar-draft/export recipes/tiny/ar-draft

# The same in ZAYA's shape.
zaya: $(VENV)/.run
	$(BIN)/cdlm distill recipes/tiny-zaya-ar.yaml $(ARGS)
	rm -rf recipes/tiny/zaya && cp -r runs/tiny-zaya-ar/export recipes/tiny/zaya

# And in DiffusionGemma's shape: uniform noise on canvases.
diffusiongemma: $(VENV)/.run
	$(BIN)/cdlm distill recipes/tiny-diffusiongemma-teacher.yaml $(ARGS)
	rm -rf recipes/tiny/diffusiongemma && cp -r runs/tiny-diffusiongemma-teacher/export recipes/tiny/diffusiongemma

# Puts the numbers of a run (runs/tiny, or RUN=runs/tiny-a2d, or RUN=runs/tiny/bench) into eval/results and README.md.
RUN ?= runs/tiny
results: $(VENV)/.run
	$(BIN)/python eval/readme.py $(RUN)

# Every stage on a corner of the small world.
smoke: $(VENV)/.run
	rm -rf runs/smoke
	$(BIN)/cdlm distill recipes/smoke.yaml

# Compiles the attention kernels for GPUs that need not be here; fails on a spill.
kernels: $(VENV)/.dev
	$(BIN)/cdlm kernels --json eval/results/kernels.json $(ARGS)

# On a machine with a GPU: is attention right there, and how fast? Writes eval/results/<device>.json.
gpu-check: $(VENV)/.dev
	$(BIN)/python eval/gpu_check.py $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# What takes minutes and is not among those: attention's whole grid, 320 cases, of which they take 80.
slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# Kills, full disks, damaged files, bad and hostile input, 10,000 random recipes and decodings: a line a case. GROUPS="kill disk": only these.
GROUPS ?=
faults: $(VENV)/.dev
	$(BIN)/python tests/faults.py $(GROUPS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

setup: $(VENV)/.run $(VENV)/.dev

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[train,report]'
	touch $@

# torch for a GPU brings the triton that fits it; the CPU build brings none, and then 3.9.0 is what was tried.
$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q -c constraints.txt -e '.[train,data,report,eval,dev]'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install -q triton==3.9.0
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
