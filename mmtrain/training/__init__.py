"""The loop of a job: with the ranks that it has begun with, or with those that are left."""
