"""Campaigns of faults against whole jobs and their files, seeded, for the night: `pytest -m nightly tests/faults`."""
