"""Isthmus beside other ways to train over a network, in one laboratory: see `python scripts/bench_pipeline --help`."""
