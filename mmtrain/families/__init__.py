"""One folder a model family: what is known of it without torch, and in `adapter.py` its classes of transformers."""
