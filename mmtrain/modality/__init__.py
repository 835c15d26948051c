"""Kinds of content, one file each: the units that a module consumes, and how they become works. Pure."""
