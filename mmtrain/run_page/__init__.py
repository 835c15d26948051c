"""The page of a run: what a job left in its folder, as one HTML file. Pure."""
