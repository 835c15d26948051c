"""What is known of a model without its weights: modules, layers, parameters, FLOPs and bytes. Pure."""
