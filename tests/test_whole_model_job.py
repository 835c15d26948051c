"""A job of a whole vision-language model by one folder: layouts, resuming, export, and training on from the export."""

import pytest
import torch

from mmtrain.checkpoint.run_folder import load_module, open_run
from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.data import TokenizerConfig
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.export.folder import export
from mmtrain.inference.answering import Answerer, Sampling, asked
from mmtrain.local.driven_steps import gradients
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from mmtrain.training.trainer import Trainer
from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks
from tests.whole_models import FAMILIES, VISION, config_classes, in_our_names, tiny_text, truth, whole_model

SAVED = ["checkpoint.enable=true", "checkpoint.interval=2"]


def nth_batch(rank, path, overrides, step):
    """The batch of a step of a job of one rank, and its metadata."""
    items = [item for item, _ in gradients(Trainer(config.load(path, overrides)), torch.device("cpu"), step)]
    return items[-1].batch, items[-1].meta


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_job_of_a_whole_model(tmp_path, charts, capsys, family):
    text = tiny_text(family, vocab_size=512, max_position_embeddings=512)
    vision = VISION[family] | {"patch_size": 14} | ({"window_size": 56} if family == "qwen2_5_vl" else {})
    whole_model(family, text, vision, tied=True).save_pretrained(tmp_path / "whole")
    load_tokenizer(TokenizerConfig()).save_pretrained(tmp_path / "whole")
    whole = [f"model.pretrained={tmp_path}/whole", "model.encoder.config={}", "model.language.config={}"]
    whole.append("data.min_pixels=3136")  # charts stay small, whatever the family takes at least
    path, degrees = write_config(tmp_path / "parity", charts), layout(pp=2, tp=2)
    assert main(["check-parity", "--config", str(path), *(f"--{change}" for change in (*degrees, *whole))]) == 0
    printed = capsys.readouterr().out
    assert f"truth   the class of transformers for the whole {family}, one call a document" in printed
    assert "\nPASS: " in printed
    curves = {}
    for name, world, degrees, steps in (
        ("one", 1, layout(), 5),  # learning rates follow from the number of steps
        ("one", 1, layout(), 6),
        ("four", 4, layout(pp=2, shard=2), 5),
        ("four", 4, layout(pp=2, cp=2), 6),  # resumed on another layout
    ):
        path = write_config(tmp_path / name, charts)
        run_ranks(train, world, path, [*degrees, *whole, *SAVED, f"training.steps={steps}"])
        curves[name] = metrics(path.parent)
        assert sorted(curves[name]) == list(range(1, steps + 1))
        if degrees == layout(pp=2, shard=2):
            assert export(tmp_path / name / "run", tmp_path / "exported").model.endswith("ForConditionalGeneration")
    for step, loss in curves["one"].items():
        assert curves["four"][step] == pytest.approx(loss, rel=1e-5)

    run, out = tmp_path / "four" / "run", tmp_path / "out"
    stored, theirs = open_run(run, 5), config_classes(family)[1].from_pretrained(tmp_path / "exported")
    found = in_our_names(theirs, dict(theirs.named_parameters(remove_duplicate=False)))
    for module in ("vision", "language"):
        for name, tensor in load_module(stored, module).state_dict().items():
            assert torch.equal(found[name], tensor), name
    (batch,) = run_ranks(nth_batch, 1, write_config(tmp_path / "sixth", charts), [*layout(), *whole], 6)
    with torch.no_grad():
        loss, _ = truth(theirs, [batch])
    assert curves["four"][6] == pytest.approx(loss.item() / batch[1].num_targets, rel=1e-5)

    job = config.load(run / "config.toml")
    assert (job.tokenizer.path, job.model.projector.kind) == (f"{tmp_path}/whole", "native")
    assert export(run, tmp_path / "last").model.endswith("ForConditionalGeneration")
    record, sampling = asked("what?", []), Sampling(max_new_tokens=4)
    assert len({Answerer.of(source).answer(record, sampling) for source in (run, tmp_path / "last")}) == 1
    assert export(run, out, parts=True).folders == ("language", "vision")
    again = [f"model.encoder.pretrained={out}/vision", f"model.language.pretrained={out}/language"]
    parts = [*again, "model.encoder.config={}", "model.language.config={}", "model.projector.kind=native", whole[-1]]
    exported = config.load(write_config(tmp_path / "again", charts), parts).model
    spec = model_spec(exported)
    trained = ReferenceModel(exported, spec, seed=0).weights()
    first = ReferenceModel(job.model, spec, seed=0).weights()
    assert trained.keys() == first.keys()
    assert not any(torch.equal(trained[name], first[name]) for name in first)
    run_ranks(train, 2, write_config(tmp_path / "again", charts), [*layout(pp=2), *parts, "training.steps=2"])
    assert metrics(tmp_path / "again")[1] < curves["one"][1]
