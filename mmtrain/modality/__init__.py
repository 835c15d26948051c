"""Kinds of content, one file each: what a module consumes of a batch, and how its works are made of it. Pure."""
