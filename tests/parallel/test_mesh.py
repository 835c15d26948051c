"""What ranks of a replica send each other."""

import pickle

import torch

from mmtrain.parallel.mesh import packed


def test_tensors_arrive_as_they_were() -> None:
    sent = {
        "numbers": torch.randn(2, 3).T,
        "ids": torch.arange(5),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "text": "a caption",
    }
    arrived = pickle.loads(packed(sent))
    assert arrived.pop("text") == "a caption"
    for name, tensor in arrived.items():
        assert tensor.dtype == sent[name].dtype, name
        torch.testing.assert_close(tensor, sent[name], rtol=0, atol=0)
    arrived["ids"][0] = 7  # it is no view of the message


def test_clips_that_share_a_storage_travel_once() -> None:
    storage = torch.randn(32, 1000)
    clips = list(storage)
    assert len(packed(clips)) < 1.05 * storage.nbytes
    assert len(pickle.dumps(clips)) > 32 * storage.nbytes, "what torch does by itself"
