"""Benchmarks: one script a question. `python -m benchmarks.NAME --help`; `make performance` writes the report."""
