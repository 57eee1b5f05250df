# make demo   install, build sst2 on the embedded default, serve it, load-test it, report
# make test   install, all checks, all tests
PYTHON ?= python3
BIN := .venv/bin
# onnxruntime and onnxruntime-gpu install the same module: exactly one of them.
RUNTIME := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
EXTRAS := $(RUNTIME),serve,bench,embedded,peers,dev
RUN := runs/sst2
REPOSITORY := model_repository

.PHONY: install demo serve test check browser fix clean
.DEFAULT_GOAL := install

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: install
	$(BIN)/compressor build --task sst2 --recipe laptop --export onnx --out $(RUN) --repository $(REPOSITORY)
	@mkdir -p $(RUN)/benchmarks
	@set -e; $(BIN)/compressor serve $(REPOSITORY) --log $(RUN)/benchmarks/triton.log > $(RUN)/benchmarks/serve.log & server=$$!; \
	trap 'kill $$server 2>/dev/null; wait $$server' EXIT; \
	until grep -q '^ready' $(RUN)/benchmarks/serve.log; do kill -0 $$server || exit 1; sleep 0.5; done; \
	cat $(RUN)/benchmarks/serve.log; \
	$(BIN)/compressor classify "a gripping film" "two hours i will never get back"; \
	$(BIN)/locust -f benchmarks/locustfile.py --headless --only-summary -u 16 -r 16 -t 30s --texts $(RUN)/1-corpus/validation.arrow
	$(BIN)/python -m benchmarks compare --run $(RUN) --repository $(REPOSITORY) --quick --out $(RUN)/benchmarks
	@echo "report: $(RUN)/report.html"

serve: install
	$(BIN)/compressor serve $(REPOSITORY)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check browser
	$(BIN)/python -m pytest

# Pages are tested in a real one. Without the right to install it these tests are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	echo "no Chromium here, and no way to install it: the tests in a browser will be skipped"

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
