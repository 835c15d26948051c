"""The page of a run: one HTML file made of a job's folder. Pure."""
