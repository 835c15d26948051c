"""Keys of other trainers, and what says the same here: for errors, and for the page that comes from this table.

Names as of transformers 5's `TrainingArguments`, LLaMA-Factory, ms-swift and NeMo Automodel of August 2026, and
torchtitan 0.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mmtrain.config.moved_keys import new_name
from mmtrain.errors import ConfigError, UnknownKeyError

HUGGING_FACE, LLAMA_FACTORY, SWIFT = "Hugging Face Trainer", "LLaMA-Factory", "ms-swift"
AUTOMODEL, TITAN = "NeMo Automodel", "torchtitan"
_TRAINER = (HUGGING_FACE, LLAMA_FACTORY, SWIFT)
_FINETUNING = (LLAMA_FACTORY, SWIFT)


class Ours(NamedTuple):
    """What a key of other trainers is here."""

    of: tuple[str, ...]
    """The trainers that have it."""
    keys: tuple[str, ...]
    """Dotted keys of ours; none: there is nothing to set."""
    how: str = ""
    """How values differ, or why there is no key."""


FOREIGN: dict[str, Ours] = {
    # How long, how much at once
    "num_train_epochs": Ours(_TRAINER, ("training.epochs",)),
    "max_steps": Ours(_TRAINER, ("training.steps",)),
    "num_epochs": Ours((AUTOMODEL,), ("training.epochs",)),
    "max_epochs": Ours((SWIFT,), ("training.epochs",)),
    "step_scheduler": Ours(
        (AUTOMODEL,),
        ("training.epochs", "training.global_batch_size", "checkpoint.interval", "validation.freq"),
        "batches count packed microbatches, not samples",
    ),
    "per_device_train_batch_size": Ours(
        _TRAINER, ("training.global_batch_size",), "packed microbatches of a step, over all replicas"
    ),
    "gradient_accumulation_steps": Ours(
        _TRAINER, ("training.global_batch_size",), "its microbatches are accumulated by the pipeline"
    ),
    "per_device_eval_batch_size": Ours(_TRAINER, ("validation.steps",), "batches of training.global_batch_size"),
    "local_batch_size": Ours((TITAN,), ("training.global_batch_size",), "of all replicas together"),
    "pipeline_parallel_microbatch_size": Ours(
        (TITAN,), ("training.seq_len",), "a microbatch is one packed sequence of that many tokens"
    ),
    # Optimizer and its rate
    "learning_rate": Ours(_TRAINER, ("optimizer.lr",)),
    "weight_decay": Ours(_TRAINER, ("optimizer.weight_decay",)),
    "adam_beta1": Ours(_TRAINER, ("optimizer.beta1",)),
    "adam_beta2": Ours(_TRAINER, ("optimizer.beta2",)),
    "adam_epsilon": Ours(_TRAINER, ("optimizer.eps",)),
    "optim": Ours(_TRAINER, ("optimizer.implementation", "optimizer.moments_dtype"), "the optimizer is AdamW"),
    "max_grad_norm": Ours(_TRAINER, ("training.max_norm",)),
    "lr_scheduler_type": Ours(_TRAINER, ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")),
    "lr_scheduler_kwargs": Ours(_TRAINER, ("lr_scheduler.min_lr_factor",)),
    "lr_decay_style": Ours((AUTOMODEL,), ("lr_scheduler.decay_type",)),
    "lr_warmup_steps": Ours((AUTOMODEL,), ("lr_scheduler.warmup_steps",)),
    "min_lr": Ours((AUTOMODEL,), ("lr_scheduler.min_lr_factor",), "as a part of optimizer.lr"),
    "betas": Ours((AUTOMODEL,), ("optimizer.beta1", "optimizer.beta2")),
    "label_smoothing_factor": Ours(_TRAINER, (), "the loss is cross-entropy of the labels alone"),
    "loraplus_lr_ratio": Ours((LLAMA_FACTORY,), ("optimizer.groups",), 'an entry with pattern = "lora_B" and its lr'),
    "use_galore": Ours(_FINETUNING, (), "moments are of whole gradients, optimizer.moments_dtype halves them"),
    "warmup_ratio": Ours(_TRAINER, ("lr_scheduler.warmup_ratio",)),
    "warmup_steps": Ours(_TRAINER, ("lr_scheduler.warmup_steps",)),
    "vit_lr": Ours((SWIFT,), ("optimizer.groups",), 'an entry with module = "vision" and its lr'),
    "aligner_lr": Ours((SWIFT,), ("optimizer.groups",), 'an entry with pattern = "projector" and its lr'),
    # Numbers and memory
    "bf16": Ours(_TRAINER, ("training.mixed_precision_param",), '"bfloat16", with float32 masters'),
    "pure_bf16": Ours((LLAMA_FACTORY,), ("training.master_weights",), '"none"'),
    "fp16": Ours(_TRAINER, ("training.mixed_precision_param",), '"bfloat16" or "float32" alone'),
    "torch_dtype": Ours((SWIFT,), ("training.mixed_precision_param",)),
    "compute_dtype": Ours((LLAMA_FACTORY,), ("training.mixed_precision_param",)),
    "tf32": Ours(_TRAINER, ("training.mixed_precision_param",), '"bfloat16" or "float32" alone'),
    "activation_checkpointing": Ours((HUGGING_FACE, AUTOMODEL), ("activation_checkpoint.mode",), '"full"'),
    "vit_gradient_checkpointing": Ours((SWIFT,), ("activation_checkpoint.mode",), "of all modules"),
    "gradient_checkpointing": Ours(
        _TRAINER, ("activation_checkpoint.mode",), '"full"; or let planner.search.memory choose'
    ),
    "disable_gradient_checkpointing": Ours((LLAMA_FACTORY,), ("activation_checkpoint.mode",), '"none"'),
    "flash_attn": Ours((LLAMA_FACTORY,), ("training.attention_backend",)),
    "attn_impl": Ours((SWIFT,), ("training.attention_backend",)),
    "attn_implementation": Ours((HUGGING_FACE, AUTOMODEL), ("training.attention_backend",)),
    # Where ranks go
    "torch_compile": Ours(_TRAINER, (), "models run as they are; only the planner is compiled"),
    "use_liger_kernel": Ours((HUGGING_FACE, SWIFT), (), "modules run as transformers has them"),
    "enable_liger_kernel": Ours((LLAMA_FACTORY,), (), "modules run as transformers has them"),
    "use_unsloth": Ours((LLAMA_FACTORY,), (), "modules run as transformers has them"),
    "auto_find_batch_size": Ours((HUGGING_FACE,), ("planner.memory_limit",), '"90%", within which plans stay'),
    "deepspeed": Ours(_TRAINER, ("parallelism.data_parallel_shard_degree",), "FSDP2 shards what ZeRO does"),
    "fsdp": Ours(_TRAINER, ("parallelism.data_parallel_shard_degree",)),
    "fsdp_config": Ours(_TRAINER, ("parallelism.data_parallel_shard_degree", "parallelism.fsdp_reshard_after_forward")),
    "distributed": Ours((AUTOMODEL,), ("parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree")),
    "dp_size": Ours((AUTOMODEL,), ("parallelism.data_parallel_shard_degree",)),
    "dp_replicate_size": Ours((AUTOMODEL,), ("parallelism.data_parallel_replicate_degree",)),
    "tp_size": Ours((AUTOMODEL,), ("parallelism.tensor_parallel_degree",)),
    "cp_size": Ours((AUTOMODEL,), ("parallelism.context_parallel_degree",)),
    "pp_size": Ours((AUTOMODEL,), ("parallelism.pipeline_parallel_degree",)),
    "pp_schedule": Ours((AUTOMODEL,), ("parallelism.pipeline_parallel_schedule",)),
    "pp_microbatch_size": Ours((AUTOMODEL,), ("training.seq_len",), "a microbatch is one packed sequence"),
    "layers_per_stage": Ours((AUTOMODEL,), ("model.language.num_segments", "planner.partition")),
    "dist_env": Ours((AUTOMODEL,), ("comm.timeout_seconds",)),
    "timeout_minutes": Ours((AUTOMODEL,), ("comm.timeout_seconds",), "in seconds"),
    "ddp_find_unused_parameters": Ours(_TRAINER, (), "a batch without images needs no setting"),
    "tensor_model_parallel_size": Ours((SWIFT,), ("parallelism.tensor_parallel_degree",)),
    "pipeline_model_parallel_size": Ours((SWIFT,), ("parallelism.pipeline_parallel_degree",)),
    "context_parallel_size": Ours((SWIFT,), ("parallelism.context_parallel_degree",)),
    "sequence_parallel_size": Ours((SWIFT,), ("parallelism.context_parallel_degree",)),
    "pipeline_parallel_layers_per_stage": Ours((TITAN,), ("model.language.num_segments", "planner.partition")),
    "ddp_timeout": Ours(_TRAINER, ("comm.timeout_seconds",)),
    "init_timeout_seconds": Ours((TITAN,), ("comm.timeout_seconds",)),
    "train_timeout_seconds": Ours((TITAN,), ("comm.timeout_seconds",)),
    # Model
    "model_name_or_path": Ours((LLAMA_FACTORY,), ("model.pretrained",)),
    "pretrained_model_name_or_path": Ours((AUTOMODEL,), ("model.pretrained",)),
    "model_revision": Ours(_FINETUNING, ("model.pretrained",), "a folder of that revision"),
    "freeze_config": Ours((AUTOMODEL,), ("model.encoder.trainable", "model.language.trainable"), "false"),
    "peft": Ours((AUTOMODEL,), ("model.lora.rank", "model.lora.alpha"), 'with model.language.trainable = "lora"'),
    "peft_config": Ours((HUGGING_FACE,), ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")),
    "hf_assets_path": Ours((TITAN,), ("model.pretrained",)),
    "flavor": Ours((TITAN,), ("model.pretrained", "model.language.config"), "an id or folder, or a config by itself"),
    "adapter_name_or_path": Ours((LLAMA_FACTORY,), ("model.lora.pretrained",)),
    "adapters": Ours((SWIFT,), ("model.lora.pretrained",)),
    "finetuning_type": Ours((LLAMA_FACTORY,), ("model.language.trainable",), 'true, false or "lora", for each module'),
    "train_type": Ours((SWIFT,), ("model.language.trainable",), 'true, false or "lora", for each module'),
    "tuner_type": Ours((SWIFT,), ("model.language.trainable",), 'true, false or "lora", for each module'),
    "lora_rank": Ours(_FINETUNING, ("model.lora.rank",)),
    "lora_alpha": Ours(_FINETUNING, ("model.lora.alpha",)),
    "lora_dropout": Ours(_FINETUNING, ("model.lora.dropout",)),
    "use_rslora": Ours(_FINETUNING, ("model.lora.use_rslora",)),
    "use_dora": Ours(_FINETUNING, ("model.lora.use_dora",)),
    "layers_to_transform": Ours((HUGGING_FACE,), ("model.language.trainable_layers",), 'as "0..3, 8", of each module'),
    "modules_to_save": Ours(
        (HUGGING_FACE, SWIFT), ("model.projector.trainable",), "true next to adapters; not of a part"
    ),
    "additional_target": Ours((LLAMA_FACTORY,), ("model.projector.trainable",), "true next to adapters; not of a part"),
    "init_lora_weights": Ours((HUGGING_FACE,), (), "a new adapter's output is 0"),
    "lora_bias": Ours((SWIFT,), (), "biases have no adapters"),
    "freeze_trainable_layers": Ours(
        (LLAMA_FACTORY,), ("model.language.trainable_layers",), '"-2.." are the last two, "..1" the first two'
    ),
    "lora_target": Ours((LLAMA_FACTORY,), ("model.lora.target_modules",)),
    "target_modules": Ours((SWIFT,), ("model.lora.target_modules",)),
    "freeze_vision_tower": Ours((LLAMA_FACTORY, AUTOMODEL), ("model.encoder.trainable",), "false"),
    "freeze_vit": Ours((SWIFT,), ("model.encoder.trainable",), "false"),
    "freeze_multi_modal_projector": Ours((LLAMA_FACTORY,), ("model.projector.trainable",), "false"),
    "freeze_aligner": Ours((SWIFT,), ("model.projector.trainable",), "false"),
    "freeze_language_model": Ours((LLAMA_FACTORY, AUTOMODEL), ("model.language.trainable",), "false"),
    "freeze_llm": Ours((SWIFT,), ("model.language.trainable",), "false"),
    "quantization_bit": Ours((LLAMA_FACTORY,), (), "weights are float32, computed in float32 or bfloat16"),
    "quant_bits": Ours((SWIFT,), (), "weights are float32, computed in float32 or bfloat16"),
    "neftune_noise_alpha": Ours(_TRAINER, (), "embeddings get no noise"),
    "trust_remote_code": Ours(_FINETUNING, (), "code of a model's folder is never run"),
    # Data
    "dataset": Ours(
        (*_FINETUNING, TITAN), ("data.source",), "or data.split, an entry of the dataset_info.json in data.source"
    ),
    "dataset_dir": Ours((LLAMA_FACTORY,), ("data.source",), "its dataset_info.json"),
    "path_or_dataset": Ours((AUTOMODEL,), ("data.source",)),
    "validation_dataset": Ours((AUTOMODEL,), ("data.validation_split",), "a split of data.source"),
    "interleave_probs": Ours((LLAMA_FACTORY,), ("data.sources",), "weight of an entry"),
    "interleave_prob": Ours((SWIFT,), ("data.sources",), "weight of an entry"),
    "media_dir": Ours((LLAMA_FACTORY,), ("data.source",), "paths of media start at the file that names them"),
    "max_samples": Ours((LLAMA_FACTORY,), (), "name a file with fewer records"),
    "columns": Ours((SWIFT,), (), "columns are told by their names (docs/data.md#records)"),
    "dataset_path": Ours((TITAN,), ("data.source",)),
    "val_dataset": Ours((SWIFT,), ("data.validation_split",), "a split of data.source"),
    "eval_dataset": Ours((LLAMA_FACTORY,), ("data.validation_split",), "a split of data.source"),
    "val_size": Ours((LLAMA_FACTORY,), ("data.validation_part",), "a part of the samples, below 1"),
    "split_dataset_ratio": Ours((SWIFT,), ("data.validation_part",)),
    "template": Ours(_FINETUNING, ("tokenizer.chat_template",), "by default the tokenizer's own"),
    "cutoff_len": Ours((LLAMA_FACTORY,), ("training.seq_len", "data.too_long")),
    "max_length": Ours((SWIFT,), ("training.seq_len", "data.too_long")),
    "max_seq_length": Ours((HUGGING_FACE,), ("training.seq_len", "data.too_long")),
    "packed_sequence": Ours((AUTOMODEL,), ("training.seq_len", "data.too_long"), "samples are always packed"),
    "packed_sequence_size": Ours((AUTOMODEL,), ("training.seq_len",), "samples are always packed"),
    "packing_length": Ours((SWIFT,), ("training.seq_len",), "samples are always packed"),
    "group_by_length": Ours(
        (HUGGING_FACE, SWIFT), ("assignment.policy",), "samples are packed, and dealt by their cost"
    ),
    "train_on_prompt": Ours((LLAMA_FACTORY,), (), "answers alone are learned"),
    "mask_history": Ours((LLAMA_FACTORY,), (), "all answers of a conversation are learned"),
    "system": Ours((SWIFT,), (), "a message of the role system in the records"),
    "default_system": Ours((LLAMA_FACTORY,), (), "a message of the role system in the records"),
    "truncation_strategy": Ours((SWIFT,), ("data.too_long",)),
    "packing": Ours(_FINETUNING, (), "samples are always packed, and attention stays inside of each"),
    "neat_packing": Ours((LLAMA_FACTORY,), (), "samples are always packed, and attention stays inside of each"),
    "padding_free": Ours((SWIFT,), (), "samples are always packed, without padding"),
    "image_max_pixels": Ours((LLAMA_FACTORY,), ("data.max_pixels",)),
    "image_min_pixels": Ours((LLAMA_FACTORY,), ("data.min_pixels",)),
    "video_maxlen": Ours((LLAMA_FACTORY,), ("data.video_max_frames",)),
    "video_max_pixels": Ours((LLAMA_FACTORY,), ("data.video_max_pixels",)),
    "dataset_shuffle": Ours((SWIFT,), ("data.shuffle",)),
    "disable_shuffling": Ours((LLAMA_FACTORY,), ("data.shuffle",), "false"),
    "dataloader_drop_last": Ours(_TRAINER, (), "an epoch's last step has the samples that are left, none is dropped"),
    "dataloader_prefetch_factor": Ours(_TRAINER, ("data.prefetch",)),
    "dataloader_pin_memory": Ours(_TRAINER, (), "batches are copied from pageable memory"),
    "remove_unused_columns": Ours(_TRAINER, (), "columns that nothing reads are ignored"),
    "dataloader_num_workers": Ours(_TRAINER, ("data.num_workers",)),
    "preprocessing_num_workers": Ours((LLAMA_FACTORY,), ("data.num_workers",), "samples are processed when read"),
    "dataset_num_proc": Ours((SWIFT,), ("data.num_workers",), "samples are processed when read"),
    # Run folder, checkpoints, reports
    "output_dir": Ours(_TRAINER, ("job.dump_folder",)),
    "run_name": Ours((HUGGING_FACE, SWIFT), ("job.description",)),
    "save_steps": Ours(_TRAINER, ("checkpoint.interval",)),
    "save_strategy": Ours(_TRAINER, ("checkpoint.enable", "checkpoint.interval")),
    "save_total_limit": Ours(_TRAINER, ("checkpoint.keep_latest_k",)),
    "save_only_model": Ours(_TRAINER, (), "`mmtrain export` writes the model alone"),
    "load_best_model_at_end": Ours(
        _TRAINER, ("checkpoint.keep_best",), "`mmtrain export` and `generate` take it by --step best"
    ),
    "metric_for_best_model": Ours(
        _TRAINER, ("checkpoint.keep_best",), '"loss", "accuracy", "exact_match" or a number of validation.metric'
    ),
    "best_metric_key": Ours((AUTOMODEL,), ("checkpoint.keep_best",)),
    "greater_is_better": Ours(_TRAINER, ("checkpoint.keep_best",), '"highest NAME" or "lowest NAME"'),
    "early_stopping_patience": Ours((HUGGING_FACE,), ("validation.patience",), "of checkpoint.keep_best"),
    "early_stopping_steps": Ours((LLAMA_FACTORY,), ("validation.patience",), "validations without a better value"),
    "early_stop_interval": Ours((SWIFT,), ("validation.patience",), "validations without a better value"),
    "early_stopping_threshold": Ours((HUGGING_FACE,), ("validation.patience",), "any better value counts"),
    "compute_metrics": Ours((HUGGING_FACE,), ("validation.metric",), "PATH:FUNCTION of answers and references"),
    "compute_accuracy": Ours((LLAMA_FACTORY,), ("validation.enable",), "accuracy is always reported"),
    "eval_metric": Ours((SWIFT,), ("validation.metric",), "PATH:FUNCTION of answers and references"),
    "predict_with_generate": Ours((HUGGING_FACE, LLAMA_FACTORY), ("validation.generate",), "how many questions"),
    "max_new_tokens": Ours(_FINETUNING, ("validation.generate_tokens",)),
    "checkpoint_dir": Ours((AUTOMODEL,), ("checkpoint.folder",)),
    "ckpt_every_steps": Ours((AUTOMODEL,), ("checkpoint.interval",), 'or epochs, as in "1 epoch"'),
    "val_every_steps": Ours((AUTOMODEL,), ("validation.freq",), 'or epochs, as in "1 epoch"'),
    "model_save_format": Ours((AUTOMODEL,), (), "`mmtrain export` writes safetensors for transformers"),
    "save_consolidated": Ours((AUTOMODEL,), (), "`mmtrain export` writes safetensors for transformers"),
    "is_async": Ours((AUTOMODEL,), ("checkpoint.async_mode",), '"async"'),
    "resume_from_checkpoint": Ours(
        _TRAINER, ("checkpoint.load_step",), "a run in the same job.dump_folder resumes by itself"
    ),
    "overwrite_output_dir": Ours((HUGGING_FACE, LLAMA_FACTORY), ("job.dump_folder",), "another folder is another run"),
    "initial_load_path": Ours((TITAN,), ("model.pretrained",), "`mmtrain export` makes a folder of a run"),
    "eval_steps": Ours(_TRAINER, ("validation.freq",)),
    "eval_strategy": Ours(_TRAINER, ("validation.enable", "validation.freq")),
    "logging_steps": Ours(_TRAINER, ("metrics.log_freq",)),
    "logging_dir": Ours((HUGGING_FACE,), ("metrics.save_tb_folder",)),
    "logging_first_step": Ours(_TRAINER, (), "the first step is always logged"),
    "disable_tqdm": Ours(_TRAINER, ("metrics.progress_bar",), "false"),
    "push_to_hub": Ours(_TRAINER, (), "`mmtrain export RUN hf --push ID`"),
    "hub_model_id": Ours(_TRAINER, (), "`mmtrain export RUN hf --push ID`"),
    "wandb": Ours((AUTOMODEL,), ("metrics.enable_wandb",)),
    "export_dir": Ours((LLAMA_FACTORY,), (), "`mmtrain export RUN FOLDER`"),
    "do_train": Ours((HUGGING_FACE, LLAMA_FACTORY), (), "`mmtrain train` does"),
    "do_eval": Ours((HUGGING_FACE, LLAMA_FACTORY), ("validation.enable",)),
    "stage": Ours((LLAMA_FACTORY,), (), "`mmtrain finetune` is supervised; there is no other stage"),
    "full_determinism": Ours((HUGGING_FACE, SWIFT), ("debug.deterministic",)),
    "rng": Ours((AUTOMODEL,), ("debug.seed",)),
    "report_to": Ours(_TRAINER, ("metrics.enable_tensorboard", "metrics.enable_wandb")),
    "plot_loss": Ours((LLAMA_FACTORY,), (), "`mmtrain report` draws it"),
    "data_seed": Ours((HUGGING_FACE, SWIFT), ("debug.seed",)),
    "seed": Ours((*_TRAINER, TITAN), ("debug.seed",)),
}
"""Name of a key -> what it is here."""


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Reads a table of TOML. Args: where: the file, for errors.

    Raises: ConfigError: of a key of another trainer, or of an older version, with ours; of tables that are too deep.
    """
    try:
        yield
    except UnknownKeyError as error:
        if hint := f"it is {new} now" if (new := new_name(error.key)) else ours(error.key):
            raise ConfigError(f"{str(error).rpartition('; ')[0]}; {hint}") from None
        raise
    except RecursionError:
        raise ConfigError(f"{where}: tables are nested hundreds deep; write them flatter") from None


def ours(key: str) -> str:
    """What to write instead of a key of another trainer, as part of a sentence; empty: it is none of theirs.

    Args: key: with sections or dashes before it, or without.
    """
    name = key.rpartition(".")[2].lstrip("-")
    known = FOREIGN.get(name)
    if known is None:
        return ""
    theirs, how = f"{name} of {', '.join(known.of)}", known.how
    if not known.keys:
        return f"{theirs} has no key here: {how}"
    return f"{theirs} is {' and '.join(known.keys)} here" + (f": {how}" if how else "")
