"""Models without their weights: modules, layers, parameters, FLOPs and bytes. Pure."""
