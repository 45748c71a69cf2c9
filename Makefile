# Everything is in noxfile.py; this only makes sure that nox is there, in an environment of its own.
TOOLS := .cache/tools
NOX := $(TOOLS)/bin/nox

.PHONY: demo test test-all fuzz cpython docs releases benchmarks format clean

demo: $(NOX)
	@$(NOX) -s demo

test: $(NOX)
	@$(NOX)

test-all: test fuzz

fuzz: $(NOX)
	@$(NOX) -s fuzz

cpython: $(NOX)
	@$(NOX) -s cpython

docs: $(NOX)
	@$(NOX) -s docs

releases: $(NOX)
	@$(NOX) -s survey -- $(NAMES)

benchmarks: $(NOX)
	@$(NOX) -s benchmarks

format: $(NOX)
	@$(NOX) -s format

clean:
	rm -rf .cache .nox build dist *.egg-info

$(NOX):
	@echo "Setting up nox in $(TOOLS) (once)"
	@python3 -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -q 'nox>=2024.10.9,<2027'
