"""mmtrain: a PyTorch-native trainer for large multimodal models that plans every iteration afresh."""

__version__ = "0.4.0"
