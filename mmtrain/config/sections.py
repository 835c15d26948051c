"""The sections of a job besides its model, data and planner."""

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from mmtrain.config.bounds import at_least, at_most, not_empty
from mmtrain.config.figures import LOWEST, Figure, metric_file
from mmtrain.config.intervals import Interval
from mmtrain.config.toml_sections import FilePath, shown
from mmtrain.config.topology import JobLayout
from mmtrain.errors import ConfigError
from mmtrain.schedule.library.names import check_name

MOST_WORKERS = 128
"""Processes that prepare the batches of one replica."""
MOST_SECONDS = 10_000_000
"""The longest wait that may be configured: four months."""
MOST_RANKS = 2**16
"""Along one axis of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """[job]: what this run is and where its files go."""

    description: str = ""
    """Title of the run's page and of what is exported; a file that extends this one does not inherit it."""
    dump_folder: FilePath = "outputs"
    """Folder for the resolved config, checkpoints, metrics and traces; made if absent. Of a file NAME.toml that does
    not say it: outputs/NAME, whatever the file that it extends says."""

    def __post_init__(self) -> None:
        not_empty("job", self, "dump_folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """[training]"""

    steps: int = 0
    """Optimizer steps of the whole job; 0: as many as training.epochs takes."""
    epochs: float = 0.0
    """Passes over the training samples, in place of steps: each epoch has every sample once, and ends with a step of
    those that remain (docs/data.md). A part of an epoch is possible, as 0.5. 0: training.steps says how long."""
    seq_len: int
    """Tokens of one packed microbatch, image tokens included; with [model.dit] or [model.contrast], of the longest
    caption."""
    global_batch_size: int
    """Packed microbatches of one step over all data-parallel replicas."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0: never."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that FSDP2 computes in; master weights stay float32, unless master_weights says otherwise. auto: bfloat16
    on CUDA where the device has it, else float32; simulate, tune and allocate go by planner.hardware."""
    master_weights: Literal["all", "trained", "none"] = "all"
    """Parameters with float32 masters, in each rank's shards; the others are bfloat16 alone, 2 bytes instead of 4, as
    mixed_precision_param must be. trained: those that train; frozen ones lose only what computing in bfloat16 loses
    anyhow, so that losses are the same to the bit. none: no parameter; updates of less than 0.2 % to 0.4 % of a weight
    are rounded away, which at the small rates of fine-tuning are most: for lack of memory alone, and with a larger
    rate."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is NaN or infinite: stop before the optimizer step, or skip that step, but not ten
    in a row."""
    attention_backend: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """varlen: documents, images, frames and windows in one call of torch's variable-length attention, on CUDA in half
    precision. flex: FlexAttention, on CUDA. sdpa: scaled-dot-product attention piece by piece. auto: varlen where it
    takes the dtype and the heads, and flex for other masks on CUDA; else sdpa. The log says which, and why."""
    attention_part_blocks: int = 0
    """FlexAttention computes 128 rows that see more than this many blocks of 128 keys in parts, side by side, and
    merges these: for few long rows, which keep a GPU waiting. 0: no parts. -1: parts of at most a tenth of what one
    multiprocessor computes."""
    loss_chunk_tokens: int = -1
    """Labelled positions whose logits exist at one time, as many as fit 512 MiB in float32 on a rank with -1. Below
    seq_len, the head keeps no logits: its backward makes logits, loss and gradients piece by piece. That saves 4 bytes
    for each label and token from forward to backward, and 8 more at the peak. 0: all logits at once."""
    inputs_ahead_mib: float = 256.0
    """On a GPU, the inputs of coming forwards (pixels, sounds, tokens, indices) are copied to it while earlier actions
    run, as long as those that wait there hold fewer MiB. Memory limits count these. 0: copied when a forward begins."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory (FSDP2)."""

    def __post_init__(self) -> None:
        at_most("training", self, seq_len=2**24, global_batch_size=2**20)
        at_most("training", self, epochs=10**6)
        at_least("training", self, steps=0, epochs=0.0, seq_len=2, global_batch_size=1, max_norm=0.0)
        at_least("training", self, attention_part_blocks=-1, loss_chunk_tokens=-1, inputs_ahead_mib=0.0)
        at_most("training", self, inputs_ahead_mib=2**20)
        if self.steps and self.epochs:
            raise ConfigError(
                f"training.steps = {self.steps} and training.epochs = {self.epochs:g} are both set; keep one, and set "
                "the other to 0 if a base file has it"
            )
        if not self.steps and not self.epochs:
            raise ConfigError("training: steps and epochs are both 0, so the job has no length; set one of them")

    @property
    def param_dtype(self) -> str:
        """The dtype of compute; that of a CPU where the device is not known."""
        return "float32" if self.mixed_precision_param == "auto" else self.mixed_precision_param

    @property
    def inputs_ahead_bytes(self) -> float:
        """Bytes of inputs that wait on a GPU for their forwards."""
        return self.inputs_ahead_mib * 2**20

    @property
    def passes(self) -> Fraction | None:
        """The epochs as they were written; None: the job counts steps."""
        return Fraction(str(self.epochs)) if self.epochs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """[parallelism]: the degree of each mesh axis, and the schedule."""

    data_parallel_replicate_degree: int = 1
    """Pipelines, which hold copies of the (sharded) parameters and read different data."""
    data_parallel_shard_degree: int = 1
    """Ranks over which FSDP2 shards parameters, gradients and optimizer state."""
    context_parallel_degree: int = 1
    """Ranks that divide the tokens of each microbatch, and its images."""
    context_parallel_split: Literal["causal", "balanced"] = "balanced"
    """Which tokens a rank takes. causal: two mirrored pieces of the sequence. balanced: blocks by unmasked work."""
    context_parallel_block_size: int = 128
    """Tokens of a block of the balanced split."""
    context_parallel_head_groups: int = 1
    """Keys and values are gathered in this many groups of heads (at most a rank's key heads), those of the next group
    under the attention of the current one."""
    encoder_context_parallel: Literal["images", "patches"] = "images"
    """images: each context-parallel rank encodes whole images. patches: all ranks share each image's patches
    (native-resolution encoders), for images too large for one rank."""
    tensor_parallel_degree: int = 1
    """Ranks that divide each layer's heads, inner columns and the vocabulary, and between layers the rows."""
    tensor_parallel_rows: Literal["divided", "whole"] = "divided"
    """Rows of a tensor-parallel rank between layers. divided: its part of them (sequence parallelism), with an
    all-gather and a reduce-scatter in each half of a layer. whole: all of them, with one all-reduce of the same bytes
    instead; each rank then computes all norms, holds more activations and sends all rows to the next stage."""
    vocabulary_parallel: Literal["tensor", "pipeline", "search"] = "tensor"
    """Which ranks divide the rows of the token embedding and of the head. tensor: those of tensor parallelism, on the
    pipeline ranks where the language model begins and ends. pipeline: those of all pipeline ranks, each of
    which then holds a part of both and computes its part of the loss. search: the partition search decides
    (planner.partition = "search"); where it finds no iterations to simulate, tensor."""
    encoder_tensor_parallel: Literal["shard", "data"] = "shard"
    """shard: the encoder's layers are divided like the language model's. data: each tensor-parallel rank holds the
    whole encoder and encodes its part of the images."""
    fsdp_reshard_after_forward: Literal["step", "always"] = "step"
    """step: parameters are gathered once a step. always: before each use, and freed after it (an encoder only where
    its ranks share each image); needs data_parallel_shard_degree = 1, since replicas with different plans cannot
    agree on an order of gathers."""
    pipeline_parallel_degree: int = 1
    """P: pipeline ranks."""
    pipelines: list[int] = field(default_factory=list)
    """Pipelines that hold the model once each, by their numbers of pipeline ranks, as in [2, 3]: in place of
    pipeline_parallel_degree and data_parallel_replicate_degree where numbers of nodes are not multiples."""
    pipeline_parallel_schedule: FilePath = "interleave"
    """Order of forwards and backwards: a name (docs/schedules.md), a recipe's path or PATH:FUNCTION
    (docs/recipes.md; a program, which every rank runs), or the path of a CSV with orders as of torch's pipelining.
    interleave: DIP's greedy dual queues over the work graph. 1F1B: one forward, one backward. The zero-bubble and
    V-shaped schedules split backwards into input-gradient and weight-gradient passes."""

    separate_gradients: bool = False
    """Split backwards of the schedule's orders where that shortens an iteration; weight gradients then fill idle times,
    and ranks hold more activations, within memory limits (docs/recipes.md)."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_degree") and not 1 <= value <= MOST_RANKS:
                raise ConfigError(f"parallelism.{f.name} = {value}; a degree is at least 1 and at most {MOST_RANKS}")
        self._check_pipelines()
        at_least("parallelism", self, context_parallel_block_size=1, context_parallel_head_groups=1)
        if self.tensor_parallel_rows == "whole" and self.tensor_parallel_degree == 1:
            raise ConfigError(
                'parallelism.tensor_parallel_rows = "whole" with tensor_parallel_degree = 1: nothing is divided; '
                "remove the key, or raise the degree"
            )
        check_name(self.pipeline_parallel_schedule, where="parallelism.pipeline_parallel_schedule =")

    def _check_pipelines(self) -> None:
        if not self.pipelines:
            return
        if any(not 1 <= depth <= MOST_RANKS for depth in self.pipelines) or len(self.pipelines) > MOST_RANKS:
            raise ConfigError(
                f"parallelism.pipelines = {self.pipelines}; each pipeline has at least 1 and at most {MOST_RANKS} ranks"
            )
        for name in ("pipeline_parallel_degree", "data_parallel_replicate_degree"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"parallelism.pipelines = {self.pipelines} with parallelism.{name} = {getattr(self, name)}, which "
                    "it is in place of; remove one of the two, or set the degree to 1"
                )

    @property
    def layout(self) -> JobLayout:
        """The job's pipelines."""
        depths = self.pipelines or [self.pipeline_parallel_degree] * self.data_parallel_replicate_degree
        return JobLayout(
            depths=tuple(depths),
            dp_shard=self.data_parallel_shard_degree,
            cp=self.context_parallel_degree,
            tp=self.tensor_parallel_degree,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint]: what all blocks do with their activations, whatever the batch."""

    mode: Literal["none", "selective", "full", "ops", "offload"] = "none"
    """none: keep all, unless the planner chooses (planner.search.memory under a memory limit). full: recompute each
    block. selective: recompute every block but its matrix products and attention. ops: recompute all of a block but the
    operations in save_ops. offload: activations wait in host memory."""
    save_ops: list[str] = field(default_factory=list)
    """With mode = "ops": names of torch operations whose results are kept, as in "aten.mm"."""

    def __post_init__(self) -> None:
        if bool(self.save_ops) != (self.mode == "ops"):
            raise ConfigError(
                f'activation_checkpoint.mode = "{self.mode}" with save_ops = {self.save_ops}: mode "ops", and no '
                'other, takes a list of operations to keep; without any, it is mode "full"'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """[validation]: loss and answer accuracy on held-out samples, through the pipeline."""

    enable: bool = False
    """Validate at all."""
    freq: int | str = 50
    """Steps between validations, or epochs, as in "0.5 epochs" (then after the first step that reaches them); there is
    also one before the first step and one after the last."""
    steps: int = 4
    """Batches of training.global_batch_size microbatches in one validation."""
    shuffled_captions: bool = False
    """With [model.dit]: also the loss with each clip under the caption of another; it should be higher."""
    weights: Literal["ema", "trained"] = "trained"
    """Weights that are validated: ema: their averages (optimizer.ema_decay)."""
    generate: int = 0
    """Held-out questions that each validation answers: the last one of each of the first records. The log, tensorboard
    and the page of the run show the answers, and how many are right. 0: none."""
    generate_tokens: int = 64
    """Most tokens of such an answer; each takes a forward pass over all questions that are not answered yet."""
    samples: int = 0
    """With [model.dit], of clips that are pixels: samples that each validation makes, as `mmtrain sample` makes them by
    default. The first different captions of the validation split are the prompts. Tensorboard and the page of the run
    show the sheet. It takes 30 forward passes. 0: none."""
    metric: FilePath = ""
    """A function of yours, PATH:FUNCTION, that gets the answers (validation.generate) and their references, two
    lists of texts, and returns a number, a list with one for each answer (their mean counts), or a table of such by
    name. The file is a program, which rank 0 of a job runs, and no other command (docs/checkpoints.md). Empty: none."""
    patience: int = 0
    """The job ends early after this many validations in a row without a better value of the figure of
    checkpoint.keep_best, or of the loss where that is empty. The one before the first step does not count. 0: never."""

    def __post_init__(self) -> None:
        at_least("validation", self, steps=1, generate=0, generate_tokens=1, patience=0, samples=0)
        Interval.parse("validation.freq", self.freq)
        for name, unset in (("generate", 0), ("samples", 0), ("patience", 0), ("metric", "")):
            if getattr(self, name) and not self.enable:
                raise ConfigError(
                    f"validation.{name} = {shown(getattr(self, name))}, but validation.enable = false, so there is no "
                    f"validation; set it to true, or {name} to {shown(unset)}"
                )
        if not self.metric:
            return
        _, function = metric_file(self.metric)
        if not self.generate:
            raise ConfigError(
                f"validation.metric = {shown(self.metric)} with validation.generate = 0: there are no answers for it; "
                "set generate to a number of questions, or remove the metric"
            )
        if function in LOWEST:
            raise ConfigError(
                f"validation.metric = {shown(self.metric)}: {function} is a figure of every validation; give your "
                "function another name"
            )

    @property
    def every(self) -> Interval:
        """The steps or epochs between two validations."""
        return Interval.parse("validation.freq", self.freq)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """[checkpoint]: sharded checkpoints of model, optimizer, schedule, loader and random state."""

    enable: bool = True
    """Save, and resume from what is there; false: the run leaves no model."""
    folder: FilePath = "checkpoint"
    """Folder inside of job.dump_folder."""
    interval: int | str = 500
    """Steps between checkpoints, or epochs, as in "1 epoch" (then after the first step that reaches them); there is
    also one after the last step."""
    keep_latest_k: int = 2
    """Older checkpoints are removed; 0: keep all. One takes 12 bytes for each parameter that trains (8 of them
    moments in float32), 4 more for its average if there is one (optimizer.ema_decay), and 4 for each other one."""
    keep_best: str = ""
    """Also keep the checkpoint with the best value of a figure of the validations, and save whenever one is the best so
    far: loss (the lowest), accuracy, exact_match (validation.generate) or a name of the numbers of validation.metric
    (the highest); "lowest NAME" and "highest NAME" say which. Empty: none."""
    load_step: int = -1
    """Step to resume from; -1: the newest one that is whole, if there is any. Later ones are renamed aside."""
    verify: Literal["auto", "required", "off"] = "auto"
    """Whether files are compared with the manifest (size, SHA-256) before they are read, also by `mmtrain export` and
    `sample`. auto: if there is one, else a warning; required: a checkpoint without one is refused; off: no."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write in the background while training goes on."""

    def __post_init__(self) -> None:
        not_empty("checkpoint", self, "folder")
        at_least("checkpoint", self, keep_latest_k=0, load_step=-1)
        Interval.parse("checkpoint.interval", self.interval)
        if self.keep_best:
            Figure.parse("checkpoint.keep_best", self.keep_best)
            if not self.enable:
                raise ConfigError(
                    f"checkpoint.keep_best = {shown(self.keep_best)}, but checkpoint.enable = false, so nothing is "
                    'saved; set it to true, or keep_best to ""'
                )
        if self.keep_latest_k == 1:
            raise ConfigError(
                "checkpoint.keep_latest_k = 1 would leave no complete checkpoint while one is replaced; "
                "set 0 (keep all) or at least 2"
            )

    @property
    def every(self) -> Interval:
        """The steps or epochs between two checkpoints."""
        return Interval.parse("checkpoint.interval", self.interval)

    @property
    def figure(self) -> Figure:
        """The figure by which validations are compared."""
        return Figure.parse("checkpoint.keep_best", self.keep_best or "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """[metrics]"""

    log_freq: int = 1
    """Steps between log lines and tensorboard points; metrics.jsonl has every step."""
    enable_tensorboard: bool = True
    """Write tensorboard files, into tb/ of job.dump_folder."""
    enable_wandb: bool = False
    """Send the same numbers and images to Weights & Biases; needs the package wandb. Its own variables name the project
    and the run (WANDB_PROJECT, WANDB_RUN_NAME, WANDB_RUN_ID to go on with one) or keep it here (WANDB_MODE=offline)."""
    trace_freq: int = 0
    """Steps between timelines written as Chrome / Perfetto traces; 0: never."""
    timeline_freq: int = 100
    """Steps between images of the measured beside the planned timeline, in tensorboard and in RUN/timelines, where
    `mmtrain report` finds them; one of the last step as well. 0: never."""
    progress_bar: bool = True
    """A bar below the log when standard error is a terminal."""
    peak_flops: float = 0.0
    """Peak FLOP/s of one device, the MFU's denominator; 0: that of known accelerators, by name. Of others, and of a
    CPU, no MFU is shown then, only FLOP/s."""

    def __post_init__(self) -> None:
        if self.enable_wandb and not importlib.util.find_spec("wandb"):
            raise ConfigError(
                "metrics.enable_wandb = true, but the package wandb is not installed; pip install wandb, or set false"
            )
        at_least("metrics", self, log_freq=1, trace_freq=0, timeline_freq=0, peak_flops=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """[comm]: process groups."""

    timeout_seconds: int = 300
    """A rank that waits longer for another one ends the job, and names the rank that does not answer. It holds for
    every process group; set it above the slowest thing that one rank does alone."""
    share_device: bool = False
    """Ranks of a machine may share its CUDA devices, in turns. They talk over gloo and through host memory, since NCCL
    refuses two ranks on one device: to try a layout on fewer devices, not to train."""

    def __post_init__(self) -> None:
        at_most("comm", self, timeout_seconds=MOST_SECONDS)
        at_least("comm", self, timeout_seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """[debug]"""

    seed: int = 0
    """Seed of weights, data order and every other random choice."""
    deterministic: bool = False
    """Deterministic kernels only; an operation that has none raises. On a GPU it costs time: sums of gradients (of
    embeddings, of chosen rows) and attention's backward run in one order instead of as they come, convolutions are not
    tuned, and new memory is filled."""
    check_plans: bool = False
    """Prove each plan free of deadlock under three models of the transport before it runs."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"debug.seed = {self.seed}; it must be at least 0 and below 2**63")
