# One virtual environment for everything; the first target builds it, the others reuse it.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo lab test long quick test-gpu lint clean

demo: .venv/ready                ## run the quickstart notebook, print its replies and numbers
	$(BIN)/tfmagic demo

lab: .venv/ready                 ## open the quickstart in JupyterLab
	$(BIN)/jupyter lab notebooks/01_quickstart.ipynb

test: .venv/ready                ## every test that needs no GPU
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not long"

long: .venv/ready                ## thousands of random schedules, every GPU kernel built, a five-minute soak: about 40 minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -m long
	$(BIN)/python -m tests.soak 300

quick: .venv/ready               ## the tests that take seconds
	OMP_NUM_THREADS=1 $(BIN)/pytest

test-gpu:                        ## on a machine with a CUDA device, in the environment that is active there
	python3 -m pytest -p tests.gpu.isolation -m gpu tests/gpu tests/drafting tests/disk/test_gpu.py \
		tests/checkpoint/test_reading.py

lint: .venv/ready
	$(BIN)/ruff check .

clean:
	-$(BIN)/tfmagic stop --all
	rm -rf .venv build dist *.egg-info artifacts

.venv/ready: pyproject.toml .ci/constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c .ci/constraints.txt -e '.[test]'
	touch $@
