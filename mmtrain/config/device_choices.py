"""What "auto" stands for where the best value depends on the kind of device. Pure."""

from mmtrain.config.config import Config, value_of, with_values


def on_device(config: Config, device: str, *, bfloat16: bool = True) -> Config:
    """The configuration with a value in place of each such "auto".

    Args: device: its type, "cuda" or "cpu". bfloat16: whether a CUDA device computes in it.
    Raises: ConfigError: another value does not fit to what was chosen.
    """
    cuda = device == "cuda"
    chosen = {
        "training.mixed_precision_param": "bfloat16" if cuda and bfloat16 else "float32",
        "optimizer.implementation": "fused" if cuda else "foreach",
    }
    values = {key: value for key, value in chosen.items() if value_of(config, key) == "auto"}
    return with_values(config, values) if values else config
