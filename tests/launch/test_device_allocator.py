import pytest

from mmtrain.launch.device_allocator import SETTING, allocator_setting, set_allocator


def test_segments_are_expandable():
    environment = {}
    set_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": SETTING}
    assert allocator_setting(environment) == SETTING


@pytest.mark.parametrize("key", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["max_split_size_mb:64", ""])
def test_a_users_setting_stays(key, value):
    environment = {key: value}
    set_allocator(environment)
    assert environment == {key: value}
    assert allocator_setting(environment) == value
