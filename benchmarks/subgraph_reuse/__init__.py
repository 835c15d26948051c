"""Graphs of repeated calls, simulated once for each subgraph: what the operator simulator could reuse, measured."""
