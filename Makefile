# Everything is in noxfile.py; this only makes sure that nox is there, in an environment of its own.
TOOLS := .cache/tools
NOX := $(TOOLS)/bin/nox
# Sessions side by side: more than cores, since much is waiting, for downloads and for ranks.
SIDE_BY_SIDE := $(NOX) --parallel 3

.PHONY: demo demo-megatron demo-trl demo-vllm hunt test test-rest test-all fuzz mutants cpython upstream docs site releases \
	pairs benchmarks format clean

# Each session makes its environment and goes on; rows come as they are found.
demo: $(NOX)
	@sessions=$$($(TOOLS)/bin/python examples/demo/run.py $(NAMES)) && $(MAKE) --no-print-directory -k -j 2 $$sessions

demo-megatron demo-trl demo-vllm: $(NOX)
	@$(NOX) -s $@ -- $(NAMES)

hunt: $(NOX)
	@$(NOX) -s hunt -- $(NAMES)

test: $(NOX)
	@$(SIDE_BY_SIDE) -t test

test-rest: $(NOX)
	@$(SIDE_BY_SIDE) -t rest

test-all: $(NOX)
	@$(SIDE_BY_SIDE) -t test rest

fuzz: $(NOX)
	@$(NOX) -s fuzz

mutants: $(NOX)
	@$(NOX) -s mutants -- $(NAMES)

cpython: $(NOX)
	@$(NOX) -s cpython

upstream: $(NOX)
	@$(NOX) -s upstream upstream-trl -- $(NAMES)

docs: $(NOX)
	@$(NOX) -s docs

site: $(NOX)
	@$(NOX) -s site

releases: $(NOX)
	@$(NOX) -s survey -- $(NAMES)

pairs: $(NOX)
	@$(NOX) -s pairs -- $(NAMES)

benchmarks: $(NOX)
	@$(NOX) -s benchmarks

format: $(NOX)
	@$(NOX) -s format

clean:
	rm -rf .cache .nox build dist *.egg-info

# Made anew when the versions below change.
$(NOX): Makefile
	@echo "Setting up nox in $(TOOLS) (once)"
	@python3 -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -q 'nox>=2026.10,<2028' 'uv<1'
	@touch $(NOX)
