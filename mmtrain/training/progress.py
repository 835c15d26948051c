"""How far a job is, and whether it has ended: by its steps, its epochs, or validations without a better one."""

from mmtrain.checkpoint.state import TrainState
from mmtrain.config.config import Config

MOST_STEPS = 2**31 - 1
"""The number of steps where it is not known."""


def why_ended(config: Config, state: TrainState) -> str:
    """Why no step is left, as the beginning of a sentence; empty: there are some."""
    return _why_done(config, state) or _why_early(config, state)


def why_before_its_end(config: Config, state: TrainState) -> str:
    """Why a job ends before its last step; empty: it does not."""
    return "" if _why_done(config, state) else _why_early(config, state)


def _why_done(config: Config, state: TrainState) -> str:
    training = config.training
    if training.steps and state.step >= training.steps:
        return f"step {state.step} of training.steps = {training.steps} is done"
    if training.passes is not None and state.epochs >= training.passes:
        return f"training.epochs = {training.epochs:g} are done with step {state.step}"
    return ""


def _why_early(config: Config, state: TrainState) -> str:
    patience, validated = config.validation.patience, state.validated
    if not patience or validated.since < patience:
        return ""
    return (
        f"step {state.step} is the last by validation.patience = {patience}: {validated.since} validations in a row "
        f"without a better one than {validated.text or 'none'}"
    )


def total_steps(config: Config, state: TrainState) -> float:
    """Steps of the whole job; of one of epochs as many as it will have if the steps that remain read as many samples as
    those so far. Args: state: after a step."""
    passes = config.training.passes
    if passes is None:
        return config.training.steps
    return float(state.step * passes / state.epochs) if state.epochs else MOST_STEPS
