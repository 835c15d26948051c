import pytest
import torch

from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import Batch, Microbatch
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec


def batch(packed: bool) -> tuple[Batch, IterationMeta]:
    """A microbatch of two documents with two images, and one of text alone."""
    torch.manual_seed(2)
    grids = ((1, 4, 4), (1, 2, 4)) if packed else ((1, 4, 4),) * 2
    images = tuple(
        ImageMeta(sample=i, index=0, grid=g, num_tokens=g[1] * g[2] // 4, start=1) for i, g in enumerate(grids)
    )
    pixels = [torch.randn(i.num_patches, 96) if packed else torch.randn(1, 3, 32, 32) for i in images]
    microbatches, metas = [], []
    for shown in (images, ()):
        documents, slots, start = [], [], 0
        for n, length in enumerate((8, 6)):
            own = shown[n : n + 1]
            slots += [start + 1 + i for image in own for i in range(image.num_tokens)]
            documents.append(DocumentMeta(sample=n, num_tokens=length, num_targets=2, images=own, prefix=length - 2))
            start += length
        labels = torch.full((14,), -100)
        labels[[5, 6, 11, 12]] = torch.randint(0, 96, (4,))
        microbatches.append(
            Microbatch(
                input_ids=torch.randint(0, 96, (14,)),
                labels=labels,
                image_slots=torch.tensor(slots, dtype=torch.int64),
                pixel_values=pixels if shown else [],
                image_names=[(image.sample, image.index) for image in shown],
            )
        )
        metas.append(MicrobatchMeta(documents=tuple(documents)))
    return Batch(microbatches=microbatches), IterationMeta(microbatches=tuple(metas))


@pytest.mark.parametrize("encoder", ["qwen2_vl", "siglip", "clip", "vit"])
def test_images_reach_the_loss_and_every_weight_gets_a_gradient(tiny, encoder):
    model = tiny.model(encoder)
    reference = ReferenceModel(model, model_spec(model), seed=0)
    tensors, meta = batch(encoder == "qwen2_vl")
    loss = reference.loss_sum(tensors, meta)
    loss.backward()
    weights = reference.weights()
    assert all(name.split(".")[0] in ("vision", "projector", "language") for name in weights)
    assert all(param.grad is not None for param in weights.values())
    outputs = reference(tensors, meta, want_predictions=True)
    assert sum(o.loss_sum for o in outputs).item() == pytest.approx(loss.item(), rel=1e-6)
    assert [len(o.predictions) for o in outputs] == [4, 4]

    with torch.no_grad():
        tensors.microbatches[0].pixel_values[1].add_(1.0)
        changed = reference(tensors, meta)
    assert changed[0].loss_sum != outputs[0].loss_sum
    assert changed[1].loss_sum == outputs[1].loss_sum


def test_a_language_model_alone(tiny):
    model = tiny.model(None, "llama")
    reference = ReferenceModel(model, model_spec(model), seed=0)
    tensors, meta = batch(packed=True)
    text = Batch(microbatches=tensors.microbatches[1:]), IterationMeta(microbatches=meta.microbatches[1:])
    assert reference.loss_sum(*text) > 0
