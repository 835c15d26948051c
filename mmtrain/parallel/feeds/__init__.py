"""The arguments of each chunk's forward in one step, one file for each kind of content."""
