"""Adapters that `peft` wrote of whole models: their values in a job, and what is refused before it starts."""

import dataclasses
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mmtrain.commands.cli import main
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import ConfigError
from mmtrain.models.adapter_weights import stored_adapters
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.whole import in_class
from mmtrain.spec.builders import model_spec
from tests.llava import job_model, save_llava
from tests.lora import ALPHA, RANK, with_lora
from tests.whole_models import named, tiny_whole

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

OLD_NAMES = {
    "qwen2_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
    "clip, llama": {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.language_model.": "language_model.model.",
    },
}
"""How names begin in the classes of transformers 5.23 -> in those of 4.51."""
PREFIX = "base_model.model."
"""What `peft` writes before the name of a layer."""


def tuned(name: str, folder: Path, targets: str, **settings):
    """The model of a job whose base and adapters `peft` wrote, and the adapters' values under the class's names."""
    if name == "qwen2_vl":
        whole = tiny_whole(name)
        whole.save_pretrained(folder / "whole")
        model = named(folder / "whole")
    else:
        whole, model = save_llava(name, folder / "whole"), job_model(folder / "whole")
    theirs = get_peft_model(whole, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, **settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    theirs.save_pretrained(folder / "adapter")
    model = with_lora(model, ["encoder", "language"] if "fc1" in targets else ["language"], ["q_proj", "fc1"])
    if "fc1" not in targets:
        model = dataclasses.replace(model, lora=dataclasses.replace(model.lora, target_modules=["q_proj"]))
    lora = dataclasses.replace(model.lora, pretrained=str(folder / "adapter"))
    values = {key: value for key, value in theirs.base_model.model.named_parameters() if ".lora_" in key}
    return dataclasses.replace(model, lora=lora), values


def job_values(model, kind: str) -> dict[str, torch.Tensor]:
    weights = ReferenceModel(model, model_spec(model), seed=1).weights()
    return {in_class(kind, name): value for name, value in weights.items() if ".lora_" in name}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("qwen2_vl", "qwen2_vl"), ("clip, llama", "llava")])
def test_values_are_those_that_peft_wrote_with_each_release_of_transformers(tmp_path, name, kind, old):
    model, theirs = tuned(name, tmp_path, r".*(blocks.*fc1|encoder.*(q_proj|fc1)|language_model.*q_proj)")
    if old:
        path = tmp_path / "adapter/adapter_model.safetensors"
        tensors = load_file(path)
        for new, before in OLD_NAMES[name].items():
            tensors = {key.replace(PREFIX + new, PREFIX + before): value for key, value in tensors.items()}
        assert not tensors.keys() & load_file(path).keys()
        save_file(tensors, path)
    ours = job_values(model, kind)
    assert ours
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    unused = {key for key in theirs if key not in ours}  # of the block behind the features that LLaVA reads
    assert all(".encoder.layers.3." in key for key in unused), unused
    assert bool(unused) == (kind == "llava")


def test_a_tensor_that_no_parameter_takes_is_refused_by_name(tmp_path):
    model, _ = tuned("qwen2_vl", tmp_path, r".*language_model.*(q_proj|v_proj)")
    with pytest.raises(
        ConfigError, match=r"takes base_model\.model\.model\.language_model\.layers\.0\.self_attn\.v_proj"
    ):
        stored_adapters(model)
    path = tmp_path / "adapter/adapter_model.safetensors"
    kept = {key: value for key, value in load_file(path).items() if "v_proj" not in key}
    save_file(kept, path)
    stored_adapters(model)
    save_file(kept | {"base_model.model.lm_head.weight": torch.zeros(96, 48)}, path)
    with pytest.raises(ConfigError, match=r"takes base_model\.model\.lm_head\.weight"):
        stored_adapters(model)


def test_a_scale_is_refused_before_the_job_starts(tmp_path, capsys):
    tuned("qwen2_vl", tmp_path, r".*language_model.*q_proj", use_rslora=True)
    load_tokenizer(TokenizerConfig()).save_pretrained(tmp_path / "whole")
    (tmp_path / "job.toml").write_text(
        f'[model]\npretrained = "{tmp_path}/whole"\n[model.language]\ntrainable = "lora"\n[model.lora]\n'
        f'rank = {RANK}\nalpha = {ALPHA}\ntarget_modules = ["q_proj"]\npretrained = "{tmp_path}/adapter"\n'
        '[data]\nsource = "charts"\n[training]\nsteps = 1\nseq_len = 64\nglobal_batch_size = 1\n'
        "[lr_scheduler]\nwarmup_steps = 0\n"
    )
    assert main(["config", "--config", str(tmp_path / "job.toml")]) == 2
    assert f"set model.lora.alpha = {ALPHA * RANK**0.5:.9g}" in capsys.readouterr().err
