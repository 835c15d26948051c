"""How the processes of a job on one machine start and end, and who may write into a run folder. Pure."""
