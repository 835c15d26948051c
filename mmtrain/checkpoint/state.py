"""What is trained, whatever the layout: numbers of the run, and tensors by the names of the model's parameters.

A checkpoint, and a job that goes on at another layout, take it from one set of chunks and put it into another.
"""

import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from mmtrain.checkpoint.files import STATE, StoredCheckpoint
from mmtrain.checkpoint.tensor_boxes import RowsOf
from mmtrain.config.config import Config
from mmtrain.config.intervals import Interval
from mmtrain.config.toml_sections import to_dict
from mmtrain.data.packing import LoaderState
from mmtrain.observe.validated import Validated
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.optim import EMA, LocalOptimizers
from mmtrain.spec.spec import VocabularyRows

logger = logging.getLogger("mmtrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The integers that, with the tensors, make a run continue exactly."""

    step: int
    """Steps done."""
    loader: dict[str, Any]
    """State of the loader after those steps."""
    tokens: int = 0
    """Tokens seen by all replicas."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values of the config by key: a run continues exactly only under equal ones."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Memory that plans leave for other uses, and the margins that grew, as of `BudgetHistory.to_dict`."""

    clips: int | None = None
    """Clips seen by all replicas; None: not known, of a checkpoint from before they were counted."""
    skipped: int = 0
    """Steps in a row, the last one included, that were skipped since loss or gradient were not finite."""
    samples: int | None = None
    """Samples seen by all replicas; None: not known, of a checkpoint from before they were counted."""
    loader_before: dict[str, Any] = field(default_factory=dict)
    """State of the loader before the last step; empty: not known, or there is none."""
    costs: dict[str, Any] = field(default_factory=dict)
    """What was learned of the seconds of actions, as of `LearnedCosts.to_dict`; empty: nothing."""
    validated: Validated = field(default_factory=Validated)
    """The validations up to the step."""

    @classmethod
    def first(cls, config: Config) -> "TrainState":
        """The state of a job which has not trained yet."""
        loader = LoaderState(seed=config.debug.seed).to_dict()
        return cls(step=0, loader=loader, settings=_settings(config), clips=0, samples=0)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "TrainState":
        """The inverse of `to_dict`. Raises: ValueError, TypeError: it is none."""
        return cls(**{**raw, "validated": Validated.from_dict(raw["validated"])})

    @classmethod
    def read(cls, stored: StoredCheckpoint) -> "TrainState":
        """The state in a checkpoint. Raises: CheckpointError: it has no such state."""
        raw = stored.state
        kinds = {"step": int, "loader": dict, "tokens": int}
        for name, kind in {**kinds, **_SINCE_LATER}.items():
            if not isinstance(raw.get(name), kind):
                raise stored.damaged(f"{STATE} does not say the {name}")
        optional = {name: raw[name] for name in _SINCE_LATER if name in raw}
        optional.setdefault("settings", raw.get("data", {}))  # older ones have only some, as "data"
        try:
            validated = Validated.from_dict(raw.get("validated", {"step": raw["step"]}))
        except (TypeError, ValueError) as error:
            raise stored.damaged(f"{STATE} does not say the validations: {error}") from None
        return cls(**{name: raw[name] for name in kinds}, validated=validated, **optional)

    def after(self, *, loader: dict[str, Any], tokens: int, clips: int, samples: int, skipped: bool) -> "TrainState":
        """The state after one step more.

        Args:
            loader: its state after the step.
            tokens, clips, samples: of the step, over all replicas.
            skipped: whether the step changed no weight.
        """
        return replace(
            self,
            step=self.step + 1,
            loader=loader,
            tokens=self.tokens + tokens,
            clips=None if self.clips is None else self.clips + clips,
            samples=None if self.samples is None else self.samples + samples,
            loader_before=self.loader,
            skipped=self.skipped + 1 if skipped else 0,
        )

    def with_memory(self, memory: dict[str, Any]) -> "TrainState":
        """This state with other margins. Args: memory: empty without a limit."""
        return replace(self, memory=memory or self.memory)

    def resumed(self, settings: dict[str, Any]) -> "TrainState":
        """This state in a run with these settings; a warning of rank 0 names those that were others."""
        logger.info("resumed from step %d", self.step)
        before = {**_SETTINGS_SINCE_LATER, **self.settings} if self.settings else {}
        for name, old in before.items() if dist.get_rank() == 0 else ():
            new = settings.get(name, old)
            if new != old:
                moved = name.startswith(_OF_DATA)
                what = "the data do not go on where they stopped" if moved else "later steps follow the new value"
                logger.warning("%s was %r when step %d was saved and is %r now: %s", name, old, self.step, new, what)
        return replace(self, settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """The state as a table for JSON."""
        return {
            "step": self.step,
            "loader": dict(self.loader),
            "tokens": self.tokens,
            "settings": dict(self.settings),
            "memory": dict(self.memory),
            "costs": dict(self.costs),
            "clips": self.clips,
            "skipped": self.skipped,
            "samples": self.samples,
            "loader_before": dict(self.loader_before),
            "validated": asdict(self.validated),
        }

    @property
    def epochs(self) -> Fraction:
        """Epochs done."""
        return LoaderState.from_dict(self.loader).epochs

    def reaches(self, interval: Interval) -> bool:
        """Whether the last step completed an interval."""
        before = LoaderState.from_dict(self.loader_before or self.loader).epochs
        return interval.count(self.step, self.epochs) > interval.count(max(0, self.step - 1), before)


_SINCE_LATER: dict[str, Any] = {
    "memory": dict | None,
    "costs": dict | None,
    "clips": int | None,
    "skipped": int | None,
    "samples": int | None,
    "loader_before": dict | None,
    "settings": dict | None,
}
"""Fields that older checkpoints lack, and their types."""
_SETTINGS_SINCE_LATER = {"data.validation_part": 0.0}
"""Settings that older checkpoints lack, with the values that they had."""
_LEARNED_FROM = ("data", "tokenizer", "diffusion", "training", "optimizer", "lr_scheduler")
"""Sections whose values decide what a step learns."""
_NOT_LEARNED_FROM = frozenset(
    {
        "data.num_workers",
        "data.prefetch",
        "data.validation_split",
        "training.attention_backend",
        "training.attention_part_blocks",
        "training.inputs_ahead_mib",
        "training.enable_cpu_offload",
        "optimizer.implementation",
    }
)
_OF_DATA = ("data.", "tokenizer.", "training.seq_len", "training.global_batch_size", "debug.seed")


def _settings(config: Config) -> dict[str, Any]:
    """The values by key of which a resumed run says that they were others."""
    sections = {name: to_dict(getattr(config, name)) for name in _LEARNED_FROM}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    found["data.sources"] = [[s.label, s.source, s.split, s.weight] for s in config.data.sources]
    found["debug.seed"] = config.debug.seed
    return {key: value for key, value in found.items() if key not in _NOT_LEARNED_FROM}


class NamedTensors:
    """The tensors of this rank's chunks and optimizers, under names that no layout changes.

    Args: aliases: parameter name -> name that it is stored under (tied head -> embedding).
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizers: LocalOptimizers, aliases: Mapping[str, str]) -> None:
        self._chunks, self._optimizers, self._aliases = chunks, optimizers, aliases
        held = (getattr(chunk, "stored_rows", {}) for chunk in chunks)
        self._rows: dict[str, VocabularyRows] = {
            aliases.get(name, name): rows for of_chunk in held for name, rows in of_chunk.items()
        }

    @property
    def averages(self) -> bool:
        """Whether weights are averaged."""
        return self._optimizers.averages

    def table(self) -> dict[str, Any]:
        """Name -> parameter, buffer, moment, average or setting of an optimizer, or random state; tensors are the live
        ones, and rows of a larger one `RowsOf` it."""
        tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in self._parameters()}
        tensors |= {self._stored_name(key): value for key, value in self._optimizers.state_dict().items()}
        for name, tensor in tensors.items():
            if (rows := self._rows_of(name)) and isinstance(tensor, Tensor) and tensor.ndim:
                tensors[name] = RowsOf(tensor, rows.first, rows.total)
        tensors[random_state_name()] = random_state()
        return tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the live tensor of every parameter, buffer, moment and average that exists, further copies of a
        tied matrix included. Also of a step that an error ended: of gathered parameters, these are the shards."""
        yield from ((f"model.{name}", tensor) for name, tensor in self._parameters(keep_vars=True))
        for name, parameter, optimizer, _ in self._optimizers.trained():
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer.state.{self._aliases.get(name, name)}.{key}", value

    def first_row(self, name: str, tensor: Tensor) -> int:
        """The first row of a tensor of `tensors` in the stored one of its name."""
        rows = self._rows_of(name)
        return rows.first if rows and tensor.ndim else 0

    def _rows_of(self, stored: str) -> VocabularyRows | None:
        """The vocabulary rows of a parameter or of its moments and their settings, by its name in a checkpoint."""
        kind, _, rest = stored.partition(".")
        names = {"model": rest, "optimizer": rest.partition(".")[2].rpartition(".")[0]}
        return self._rows.get(names.get(kind, ""))

    def drop_moments(self) -> None:
        """Forgets all moments and averages, as before the first step."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Takes over a table whose values were replaced, in place or not. Hyperparameters stay those of the config.

        Averages that are not in it begin at the weights.
        """
        tensors = {name: value.part if isinstance(value, RowsOf) else value for name, value in tensors.items()}
        with torch.no_grad():
            for name, tensor in self._parameters():  # in place already, but for further copies of a tied matrix
                source = tensors[f"model.{name}"]
                if source is not tensor and local_part(source).data_ptr() != local_part(tensor).data_ptr():
                    local_part(tensor).copy_(local_part(source))
        flat = {}
        used: set[str] = set()
        for key in self._optimizers.state_dict():
            name = self._stored_name(key)
            if is_average(name) and name not in tensors:
                continue
            value = tensors[name]
            # Two copies of a tied matrix on one rank: each has moments of its own.
            flat[key] = value.clone() if name in used and isinstance(value, Tensor) else value
            used.add(name)
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        self._optimizers.load_state_dict(flat)
        for group, values in zip(self._groups(), settings, strict=True):
            group.update(values)
        if random_state_name() in tensors:  # else this rank was not there
            set_random_state(tensors[random_state_name()])

    def _parameters(self, *, keep_vars: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The stored name and the tensor of every parameter and buffer in this rank's chunks, copies included.

        Args: keep_vars: parameters themselves, not detached: so that no operation of DTensor runs.
        """
        for chunk in self._chunks:
            for name, tensor in chunk.state_dict(keep_vars=keep_vars).items():
                yield self._aliases.get(name, name), tensor

    def _stored_name(self, key: str) -> str:
        """The name of an entry of the optimizers' table, which is KIND.PARAMETER.VALUE."""
        kind, _, rest = key.partition(".")
        for alias, name in self._aliases.items():
            if rest.startswith(alias + "."):
                rest = name + rest[len(alias) :]
        return f"optimizer.{kind}.{rest}"

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def average_name(parameter: str) -> str:
    """The name of the average of a parameter."""
    return f"optimizer.state.{parameter}.{EMA}"


def is_average(name: str) -> bool:
    """Whether a name is that of the average of a parameter."""
    return name.startswith("optimizer.state.") and name.endswith(f".{EMA}")


def seed_everything(seed: int, deterministic: bool) -> None:
    """Sets the random state of this process. Args: deterministic: torch refuses operations whose results vary."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def random_state_name() -> str:
    """The name of this rank's random state."""
    return f"rng.{dist.get_rank()}"


def random_state() -> str:
    """Random state of this process, as JSON: one plain entry of the checkpoint."""
    version, keys, gauss = random.getstate()
    kind, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else "",
        "numpy": [kind, np.asarray(numpy_keys).tolist(), position, has_gauss, cached],
        "python": [version, list(keys), gauss],
    }
    return json.dumps(state)


def set_random_state(text: str) -> None:
    """Puts what `random_state` gave back."""
    state = json.loads(text)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
