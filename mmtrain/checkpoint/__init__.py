"""Checkpoints and run folders: written aside, renamed, verified."""
