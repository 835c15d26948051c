"""The configuration of a job: its sections, their strict TOML, and the degrees of parallelism."""
