"""Keys of other trainers, and what says the same here: for errors, and for the page that comes from this table.

Names as of transformers 5's `TrainingArguments`, LLaMA-Factory, ms-swift and NeMo Automodel of August 2026, and
torchtitan 0.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mmtrain.config.moved_keys import instead
from mmtrain.errors import ConfigError, UnknownKeyError

HUGGING_FACE, LLAMA_FACTORY, SWIFT = "Hugging Face Trainer", "LLaMA-Factory", "ms-swift"
AUTOMODEL, TITAN = "NeMo Automodel", "torchtitan"
_TRAINER = (HUGGING_FACE, LLAMA_FACTORY, SWIFT)
_FINETUNING = (LLAMA_FACTORY, SWIFT)


class OurKeys(NamedTuple):
    """What a key of other trainers is here."""

    of: tuple[str, ...]
    """The trainers that have it."""
    keys: tuple[str, ...]
    """Dotted keys of ours; none: there is nothing to set."""
    how: str = ""
    """How values differ, or why there is no key."""


FOREIGN: dict[str, OurKeys] = {
    # How long, how much at once
    "num_train_epochs": OurKeys(_TRAINER, ("training.epochs",)),
    "max_steps": OurKeys(_TRAINER, ("training.steps",)),
    "num_epochs": OurKeys((AUTOMODEL,), ("training.epochs",)),
    "max_epochs": OurKeys((SWIFT,), ("training.epochs",)),
    "step_scheduler": OurKeys(
        (AUTOMODEL,),
        ("training.epochs", "training.global_batch_size", "checkpoint.interval", "validation.freq"),
        "batches count packed microbatches, not samples",
    ),
    "per_device_train_batch_size": OurKeys(
        _TRAINER, ("training.global_batch_size",), "packed microbatches of a step, over all replicas"
    ),
    "gradient_accumulation_steps": OurKeys(
        _TRAINER, ("training.global_batch_size",), "its microbatches are accumulated by the pipeline"
    ),
    "per_device_eval_batch_size": OurKeys(_TRAINER, ("validation.steps",), "batches of training.global_batch_size"),
    "local_batch_size": OurKeys((TITAN,), ("training.global_batch_size",), "of all replicas together"),
    "pipeline_parallel_microbatch_size": OurKeys(
        (TITAN,), ("training.seq_len",), "a microbatch is one packed sequence of that many tokens"
    ),
    # Optimizer and its rate
    "learning_rate": OurKeys(_TRAINER, ("optimizer.lr",)),
    "weight_decay": OurKeys(_TRAINER, ("optimizer.weight_decay",)),
    "adam_beta1": OurKeys(_TRAINER, ("optimizer.beta1",)),
    "adam_beta2": OurKeys(_TRAINER, ("optimizer.beta2",)),
    "adam_epsilon": OurKeys(_TRAINER, ("optimizer.eps",)),
    "optim": OurKeys(_TRAINER, ("optimizer.implementation", "optimizer.moments_dtype"), "the optimizer is AdamW"),
    "max_grad_norm": OurKeys(_TRAINER, ("training.max_norm",)),
    "lr_scheduler_type": OurKeys(_TRAINER, ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")),
    "lr_scheduler_kwargs": OurKeys(_TRAINER, ("lr_scheduler.min_lr_factor",)),
    "lr_decay_style": OurKeys((AUTOMODEL,), ("lr_scheduler.decay_type",)),
    "lr_warmup_steps": OurKeys((AUTOMODEL,), ("lr_scheduler.warmup_steps",)),
    "min_lr": OurKeys((AUTOMODEL,), ("lr_scheduler.min_lr_factor",), "as a part of optimizer.lr"),
    "betas": OurKeys((AUTOMODEL,), ("optimizer.beta1", "optimizer.beta2")),
    "label_smoothing_factor": OurKeys(_TRAINER, (), "the loss is cross-entropy of the labels alone"),
    "loraplus_lr_ratio": OurKeys(
        (LLAMA_FACTORY,), ("optimizer.groups",), 'an entry with pattern = "lora_B" and its lr'
    ),
    "use_galore": OurKeys(_FINETUNING, (), "moments are of whole gradients, optimizer.moments_dtype halves them"),
    "warmup_ratio": OurKeys(_TRAINER, ("lr_scheduler.warmup_ratio",)),
    "warmup_steps": OurKeys(_TRAINER, ("lr_scheduler.warmup_steps",)),
    "vit_lr": OurKeys((SWIFT,), ("optimizer.groups",), 'an entry with module = "vision" and its lr'),
    "aligner_lr": OurKeys((SWIFT,), ("optimizer.groups",), 'an entry with pattern = "projector" and its lr'),
    # Numbers and memory
    "bf16": OurKeys(_TRAINER, ("training.mixed_precision_param",), '"bfloat16", with float32 masters'),
    "pure_bf16": OurKeys((LLAMA_FACTORY,), ("training.master_weights",), '"none"'),
    "fp16": OurKeys(_TRAINER, ("training.mixed_precision_param",), '"bfloat16" or "float32" alone'),
    "torch_dtype": OurKeys((SWIFT,), ("training.mixed_precision_param",)),
    "compute_dtype": OurKeys((LLAMA_FACTORY,), ("training.mixed_precision_param",)),
    "tf32": OurKeys(_TRAINER, ("training.mixed_precision_param",), '"bfloat16": float32 products then use TF32'),
    "activation_checkpointing": OurKeys((HUGGING_FACE, AUTOMODEL), ("activation_checkpoint.mode",), '"full"'),
    "vit_gradient_checkpointing": OurKeys((SWIFT,), ("activation_checkpoint.mode",), "of all modules"),
    "gradient_checkpointing": OurKeys(
        _TRAINER, ("activation_checkpoint.mode",), '"full"; or let planner.search.memory choose'
    ),
    "disable_gradient_checkpointing": OurKeys((LLAMA_FACTORY,), ("activation_checkpoint.mode",), '"none"'),
    "flash_attn": OurKeys((LLAMA_FACTORY,), ("training.attention_backend",)),
    "attn_impl": OurKeys((SWIFT,), ("training.attention_backend",)),
    "attn_implementation": OurKeys((HUGGING_FACE, AUTOMODEL), ("training.attention_backend",)),
    # Where ranks go
    "torch_compile": OurKeys(_TRAINER, ("compile.enable",), "blocks are compiled one by one"),
    "use_liger_kernel": OurKeys((HUGGING_FACE, SWIFT), (), "modules run as transformers has them"),
    "enable_liger_kernel": OurKeys((LLAMA_FACTORY,), (), "modules run as transformers has them"),
    "use_unsloth": OurKeys((LLAMA_FACTORY,), (), "modules run as transformers has them"),
    "auto_find_batch_size": OurKeys((HUGGING_FACE,), ("planner.memory_limit",), '"90%", within which plans stay'),
    "deepspeed": OurKeys(_TRAINER, ("parallelism.data_parallel_shard_degree",), "FSDP2 shards what ZeRO does"),
    "fsdp": OurKeys(_TRAINER, ("parallelism.data_parallel_shard_degree",)),
    "fsdp_config": OurKeys(
        _TRAINER, ("parallelism.data_parallel_shard_degree", "parallelism.fsdp_reshard_after_forward")
    ),
    "distributed": OurKeys(
        (AUTOMODEL,), ("parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree")
    ),
    "dp_size": OurKeys((AUTOMODEL,), ("parallelism.data_parallel_shard_degree",)),
    "dp_replicate_size": OurKeys((AUTOMODEL,), ("parallelism.data_parallel_replicate_degree",)),
    "tp_size": OurKeys((AUTOMODEL,), ("parallelism.tensor_parallel_degree",)),
    "cp_size": OurKeys((AUTOMODEL,), ("parallelism.context_parallel_degree",)),
    "pp_size": OurKeys((AUTOMODEL,), ("parallelism.pipeline_parallel_degree",)),
    "pp_schedule": OurKeys((AUTOMODEL,), ("parallelism.pipeline_parallel_schedule",)),
    "pp_microbatch_size": OurKeys((AUTOMODEL,), ("training.seq_len",), "a microbatch is one packed sequence"),
    "layers_per_stage": OurKeys((AUTOMODEL,), ("model.language.num_segments", "planner.partition")),
    "dist_env": OurKeys((AUTOMODEL,), ("comm.timeout_seconds",)),
    "timeout_minutes": OurKeys((AUTOMODEL,), ("comm.timeout_seconds",), "in seconds"),
    "ddp_find_unused_parameters": OurKeys(_TRAINER, (), "a batch without images needs no setting"),
    "tensor_model_parallel_size": OurKeys((SWIFT,), ("parallelism.tensor_parallel_degree",)),
    "pipeline_model_parallel_size": OurKeys((SWIFT,), ("parallelism.pipeline_parallel_degree",)),
    "context_parallel_size": OurKeys((SWIFT,), ("parallelism.context_parallel_degree",)),
    "sequence_parallel_size": OurKeys((SWIFT,), ("parallelism.context_parallel_degree",)),
    "pipeline_parallel_layers_per_stage": OurKeys((TITAN,), ("model.language.num_segments", "planner.partition")),
    "ddp_timeout": OurKeys(_TRAINER, ("comm.timeout_seconds",)),
    "init_timeout_seconds": OurKeys((TITAN,), ("comm.timeout_seconds",)),
    "train_timeout_seconds": OurKeys((TITAN,), ("comm.timeout_seconds",)),
    # Model
    "model_name_or_path": OurKeys((LLAMA_FACTORY,), ("model.pretrained",)),
    "pretrained_model_name_or_path": OurKeys((AUTOMODEL,), ("model.pretrained",)),
    "model_revision": OurKeys(_FINETUNING, ("model.pretrained",), "a folder of that revision"),
    "freeze_config": OurKeys((AUTOMODEL,), ("model.encoder.trainable", "model.language.trainable"), "false"),
    "peft": OurKeys((AUTOMODEL,), ("model.lora.rank", "model.lora.alpha"), 'with model.language.trainable = "lora"'),
    "peft_config": OurKeys((HUGGING_FACE,), ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")),
    "hf_assets_path": OurKeys((TITAN,), ("model.pretrained",)),
    "flavor": OurKeys(
        (TITAN,), ("model.pretrained", "model.language.config"), "an id or folder, or a config by itself"
    ),
    "adapter_name_or_path": OurKeys((LLAMA_FACTORY,), ("model.lora.pretrained",)),
    "adapters": OurKeys((SWIFT,), ("model.lora.pretrained",)),
    "finetuning_type": OurKeys(
        (LLAMA_FACTORY,), ("model.language.trainable",), 'true, false or "lora", for each module'
    ),
    "train_type": OurKeys((SWIFT,), ("model.language.trainable",), 'true, false or "lora", for each module'),
    "tuner_type": OurKeys((SWIFT,), ("model.language.trainable",), 'true, false or "lora", for each module'),
    "lora_rank": OurKeys(_FINETUNING, ("model.lora.rank",)),
    "lora_alpha": OurKeys(_FINETUNING, ("model.lora.alpha",)),
    "lora_dropout": OurKeys(_FINETUNING, ("model.lora.dropout",)),
    "use_rslora": OurKeys(_FINETUNING, ("model.lora.use_rslora",)),
    "use_dora": OurKeys(_FINETUNING, ("model.lora.use_dora",)),
    "layers_to_transform": OurKeys(
        (HUGGING_FACE,), ("model.language.trainable_layers",), 'as "0..3, 8", of each module'
    ),
    "modules_to_save": OurKeys(
        (HUGGING_FACE, SWIFT), ("model.projector.trainable",), "true next to adapters; not of a part"
    ),
    "additional_target": OurKeys(
        (LLAMA_FACTORY,), ("model.projector.trainable",), "true next to adapters; not of a part"
    ),
    "init_lora_weights": OurKeys((HUGGING_FACE,), (), "a new adapter's output is 0"),
    "lora_bias": OurKeys((SWIFT,), (), "biases have no adapters"),
    "freeze_trainable_layers": OurKeys(
        (LLAMA_FACTORY,), ("model.language.trainable_layers",), '"-2.." are the last two, "..1" the first two'
    ),
    "lora_target": OurKeys((LLAMA_FACTORY,), ("model.lora.target_modules",)),
    "target_modules": OurKeys((SWIFT,), ("model.lora.target_modules",)),
    "freeze_vision_tower": OurKeys((LLAMA_FACTORY, AUTOMODEL), ("model.encoder.trainable",), "false"),
    "freeze_vit": OurKeys((SWIFT,), ("model.encoder.trainable",), "false"),
    "freeze_multi_modal_projector": OurKeys((LLAMA_FACTORY,), ("model.projector.trainable",), "false"),
    "freeze_aligner": OurKeys((SWIFT,), ("model.projector.trainable",), "false"),
    "freeze_language_model": OurKeys((LLAMA_FACTORY, AUTOMODEL), ("model.language.trainable",), "false"),
    "freeze_llm": OurKeys((SWIFT,), ("model.language.trainable",), "false"),
    "quantization_bit": OurKeys((LLAMA_FACTORY,), (), "weights are float32, computed in float32 or bfloat16"),
    "quant_bits": OurKeys((SWIFT,), (), "weights are float32, computed in float32 or bfloat16"),
    "neftune_noise_alpha": OurKeys(_TRAINER, (), "embeddings get no noise"),
    "trust_remote_code": OurKeys(_FINETUNING, (), "code of a model's folder is never run"),
    # Data
    "dataset": OurKeys(
        (*_FINETUNING, TITAN), ("data.source",), "or data.split, an entry of the dataset_info.json in data.source"
    ),
    "dataset_dir": OurKeys((LLAMA_FACTORY,), ("data.source",), "its dataset_info.json"),
    "path_or_dataset": OurKeys((AUTOMODEL,), ("data.source",)),
    "validation_dataset": OurKeys((AUTOMODEL,), ("data.validation_split",), "a split of data.source"),
    "interleave_probs": OurKeys((LLAMA_FACTORY,), ("data.sources",), "weight of an entry"),
    "interleave_prob": OurKeys((SWIFT,), ("data.sources",), "weight of an entry"),
    "media_dir": OurKeys((LLAMA_FACTORY,), ("data.source",), "paths of media start at the file that names them"),
    "max_samples": OurKeys((LLAMA_FACTORY,), (), "name a file with fewer records"),
    "columns": OurKeys((SWIFT,), (), "columns are told by their names (docs/data.md#records)"),
    "dataset_path": OurKeys((TITAN,), ("data.source",)),
    "val_dataset": OurKeys((SWIFT,), ("data.validation_split",), "a split of data.source"),
    "eval_dataset": OurKeys((LLAMA_FACTORY,), ("data.validation_split",), "a split of data.source"),
    "val_size": OurKeys((LLAMA_FACTORY,), ("data.validation_part",), "a part of the samples, below 1"),
    "split_dataset_ratio": OurKeys((SWIFT,), ("data.validation_part",)),
    "template": OurKeys(_FINETUNING, ("tokenizer.chat_template",), "by default the tokenizer's own"),
    "cutoff_len": OurKeys((LLAMA_FACTORY,), ("training.seq_len", "data.too_long")),
    "max_length": OurKeys((SWIFT,), ("training.seq_len", "data.too_long")),
    "max_seq_length": OurKeys((HUGGING_FACE,), ("training.seq_len", "data.too_long")),
    "packed_sequence": OurKeys((AUTOMODEL,), ("training.seq_len", "data.too_long"), "samples are always packed"),
    "packed_sequence_size": OurKeys((AUTOMODEL,), ("training.seq_len",), "samples are always packed"),
    "packing_length": OurKeys((SWIFT,), ("training.seq_len",), "samples are always packed"),
    "group_by_length": OurKeys(
        (HUGGING_FACE, SWIFT), ("assignment.policy",), "samples are packed, and dealt by their cost"
    ),
    "train_on_prompt": OurKeys((LLAMA_FACTORY,), (), "answers alone are learned"),
    "mask_history": OurKeys((LLAMA_FACTORY,), (), "all answers of a conversation are learned"),
    "system": OurKeys((SWIFT,), (), "a message of the role system in the records"),
    "default_system": OurKeys((LLAMA_FACTORY,), (), "a message of the role system in the records"),
    "truncation_strategy": OurKeys((SWIFT,), ("data.too_long",)),
    "packing": OurKeys(_FINETUNING, (), "samples are always packed, and attention stays inside of each"),
    "neat_packing": OurKeys((LLAMA_FACTORY,), (), "samples are always packed, and attention stays inside of each"),
    "padding_free": OurKeys((SWIFT,), (), "samples are always packed, without padding"),
    "image_max_pixels": OurKeys((LLAMA_FACTORY,), ("data.max_pixels",)),
    "image_min_pixels": OurKeys((LLAMA_FACTORY,), ("data.min_pixels",)),
    "video_maxlen": OurKeys((LLAMA_FACTORY,), ("data.video_max_frames",)),
    "video_max_pixels": OurKeys((LLAMA_FACTORY,), ("data.video_max_pixels",)),
    "dataset_shuffle": OurKeys((SWIFT,), ("data.shuffle",)),
    "disable_shuffling": OurKeys((LLAMA_FACTORY,), ("data.shuffle",), "false"),
    "dataloader_drop_last": OurKeys(
        _TRAINER, (), "an epoch's last step has the samples that are left, none is dropped"
    ),
    "dataloader_prefetch_factor": OurKeys(_TRAINER, ("data.prefetch",)),
    "dataloader_pin_memory": OurKeys(_TRAINER, (), "batches are copied from pageable memory"),
    "remove_unused_columns": OurKeys(_TRAINER, (), "columns that nothing reads are ignored"),
    "dataloader_num_workers": OurKeys(_TRAINER, ("data.num_workers",)),
    "preprocessing_num_workers": OurKeys((LLAMA_FACTORY,), ("data.num_workers",), "samples are processed when read"),
    "dataset_num_proc": OurKeys((SWIFT,), ("data.num_workers",), "samples are processed when read"),
    # Run folder, checkpoints, reports
    "output_dir": OurKeys(_TRAINER, ("job.dump_folder",)),
    "run_name": OurKeys((HUGGING_FACE, SWIFT), ("job.description",)),
    "save_steps": OurKeys(_TRAINER, ("checkpoint.interval",)),
    "save_strategy": OurKeys(_TRAINER, ("checkpoint.enable", "checkpoint.interval")),
    "save_total_limit": OurKeys(_TRAINER, ("checkpoint.keep_latest_k",)),
    "save_only_model": OurKeys(_TRAINER, (), "`mmtrain export` writes the model alone"),
    "load_best_model_at_end": OurKeys(
        _TRAINER, ("checkpoint.keep_best",), "`mmtrain export` and `generate` take it by --step best"
    ),
    "metric_for_best_model": OurKeys(
        _TRAINER, ("checkpoint.keep_best",), '"loss", "accuracy", "exact_match" or a number of validation.metric'
    ),
    "best_metric_key": OurKeys((AUTOMODEL,), ("checkpoint.keep_best",)),
    "greater_is_better": OurKeys(_TRAINER, ("checkpoint.keep_best",), '"highest NAME" or "lowest NAME"'),
    "early_stopping_patience": OurKeys((HUGGING_FACE,), ("validation.patience",), "of checkpoint.keep_best"),
    "early_stopping_steps": OurKeys((LLAMA_FACTORY,), ("validation.patience",), "validations without a better value"),
    "early_stop_interval": OurKeys((SWIFT,), ("validation.patience",), "validations without a better value"),
    "early_stopping_threshold": OurKeys((HUGGING_FACE,), ("validation.patience",), "any better value counts"),
    "compute_metrics": OurKeys((HUGGING_FACE,), ("validation.metric",), "PATH:FUNCTION of answers and references"),
    "compute_accuracy": OurKeys((LLAMA_FACTORY,), ("validation.enable",), "accuracy is always reported"),
    "eval_metric": OurKeys((SWIFT,), ("validation.metric",), "PATH:FUNCTION of answers and references"),
    "predict_with_generate": OurKeys((HUGGING_FACE, LLAMA_FACTORY), ("validation.generate",), "how many questions"),
    "max_new_tokens": OurKeys(_FINETUNING, ("validation.generate_tokens",)),
    "checkpoint_dir": OurKeys((AUTOMODEL,), ("checkpoint.folder",)),
    "ckpt_every_steps": OurKeys((AUTOMODEL,), ("checkpoint.interval",), 'or epochs, as in "1 epoch"'),
    "val_every_steps": OurKeys((AUTOMODEL,), ("validation.freq",), 'or epochs, as in "1 epoch"'),
    "model_save_format": OurKeys((AUTOMODEL,), (), "`mmtrain export` writes safetensors for transformers"),
    "save_consolidated": OurKeys((AUTOMODEL,), (), "`mmtrain export` writes safetensors for transformers"),
    "is_async": OurKeys((AUTOMODEL,), ("checkpoint.async_mode",), '"async"'),
    "resume_from_checkpoint": OurKeys(
        _TRAINER, ("checkpoint.load_step",), "a run in the same job.dump_folder resumes by itself"
    ),
    "overwrite_output_dir": OurKeys(
        (HUGGING_FACE, LLAMA_FACTORY), ("job.dump_folder",), "another folder is another run"
    ),
    "initial_load_path": OurKeys((TITAN,), ("model.pretrained",), "`mmtrain export` makes a folder of a run"),
    "eval_steps": OurKeys(_TRAINER, ("validation.freq",)),
    "eval_strategy": OurKeys(_TRAINER, ("validation.enable", "validation.freq")),
    "logging_steps": OurKeys(_TRAINER, ("metrics.log_freq",)),
    "logging_dir": OurKeys((HUGGING_FACE,), ("job.dump_folder",), "tensorboard's files are in its tb/"),
    "logging_first_step": OurKeys(_TRAINER, (), "the first step is always logged"),
    "disable_tqdm": OurKeys(_TRAINER, ("metrics.progress_bar",), "false"),
    "push_to_hub": OurKeys(_TRAINER, (), "`mmtrain export RUN hf --push ID`"),
    "hub_model_id": OurKeys(_TRAINER, (), "`mmtrain export RUN hf --push ID`"),
    "wandb": OurKeys((AUTOMODEL,), ("metrics.enable_wandb",)),
    "export_dir": OurKeys((LLAMA_FACTORY,), (), "`mmtrain export RUN FOLDER`"),
    "do_train": OurKeys((HUGGING_FACE, LLAMA_FACTORY), (), "`mmtrain train` does"),
    "do_eval": OurKeys((HUGGING_FACE, LLAMA_FACTORY), ("validation.enable",)),
    "stage": OurKeys((LLAMA_FACTORY,), (), "`mmtrain finetune` is supervised; there is no other stage"),
    "full_determinism": OurKeys((HUGGING_FACE, SWIFT), ("debug.deterministic",)),
    "rng": OurKeys((AUTOMODEL,), ("debug.seed",)),
    "report_to": OurKeys(_TRAINER, ("metrics.enable_tensorboard", "metrics.enable_wandb")),
    "plot_loss": OurKeys((LLAMA_FACTORY,), (), "`mmtrain report` draws it"),
    "data_seed": OurKeys((HUGGING_FACE, SWIFT), ("debug.seed",)),
    "seed": OurKeys((*_TRAINER, TITAN), ("debug.seed",)),
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
        if hint := instead(error.key) or ours(error.key):
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
