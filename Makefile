PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train train-video train-sound train-clip test nightly mutants check docs data shapes squares sounds pairs venv clean

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $@

data: data/charts/README.md

data/charts/README.md: | venv
	$(BIN)/mmtrain data charts data/charts --num-samples 12000 --seed 0

shapes: data/shapes/README.md

data/shapes/README.md: | venv
	$(BIN)/mmtrain data shapes data/shapes --num-samples 6000 --seed 0

squares: data/squares/README.md

data/squares/README.md: | venv
	$(BIN)/mmtrain data shapes data/squares --level easy --num-samples 12000 --seed 0

sounds: data/sounds/README.md

data/sounds/README.md: | venv
	$(BIN)/mmtrain data sounds data/sounds --num-samples 6000 --seed 0

pairs: data/pairs/README.md

data/pairs/README.md: | venv
	$(BIN)/mmtrain data pairs data/pairs --num-samples 6000 --seed 0

train: venv data
	$(BIN)/mmtrain train --config debug_qwen2_vl.toml
	rm -rf outputs/charts_model
	$(BIN)/mmtrain export outputs/debug_qwen2_vl outputs/charts_model

train-video: venv squares
	$(BIN)/mmtrain train --config debug_square.toml
	rm -rf outputs/debug_square/judged
	$(BIN)/mmtrain sample outputs/debug_square --judge --out outputs/debug_square/judged

train-sound: venv sounds
	$(BIN)/mmtrain train --config debug_sound.toml

train-clip: venv pairs
	$(BIN)/mmtrain train --config debug_clip.toml

# Tests side by side: many use one core, or wait. A test may itself start up to 8 processes.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

test: venv
	$(PYTEST) --durations=20

# Everything that is too long for every change, and properties with ten times as many examples; `make nightly SHARD=2/3`
# runs the second third of it.
SHARD ?= 1/1

nightly: venv
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile nightly --shard $(SHARD) --durations=20

# Small mistakes, one after the other, each of which some test must notice: tests/mutants.toml.
mutants: venv
	$(BIN)/python tests/run_mutants.py

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py
	$(BIN)/python tests/run_mutants.py --list

docs: $(VENV)/docs-installed
	$(BIN)/python docs/make_errors_page.py > docs/errors.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Apart from `venv`: only this target needs the site's theme, which is some 60 MB.
$(VENV)/docs-installed: pyproject.toml | venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[docs]'
	touch $@

clean:
	rm -rf outputs data/charts data/shapes data/squares data/sounds data/pairs
