import pytest

from mmtrain.costs.operators.hardware import hardware_names, hardware_of_device, load_hardware
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind, Phase
from mmtrain.errors import ConfigError
from mmtrain.schedule.option import Load

NAMES = ("a100", "a40", "a800", "b200", "cpu", "h100", "h20", "h200", "h800")


def test_all_profiles_can_be_read() -> None:
    assert hardware_names() == NAMES
    for name in NAMES:
        hardware = load_hardware(name)
        assert hardware.name == name
        assert 0 < hardware.fp32_flops_per_s <= hardware.bf16_flops_per_s
        assert set(hardware.links) == {DeviceKind.NVLINK, DeviceKind.NETWORK, DeviceKind.PCIE}


def test_a_profile_takes_over_what_it_extends() -> None:
    h800, h100 = load_hardware("h800"), load_hardware("h100")
    assert h800.efficiency == h100.efficiency
    assert h800.links[DeviceKind.NVLINK].bytes_per_s == 200e9
    assert h100.links[DeviceKind.NVLINK].bytes_per_s == 450e9
    assert h800.efficiency_of(OpKind.ATTENTION, Phase.BACKWARD_INPUT).compute == 0.36
    assert h800.efficiency_of(OpKind.ATTENTION, Phase.BACKWARD_INPUT).memory == 0.85
    assert h800.efficiency_of(OpKind.ATTENTION, Phase.FORWARD).compute == 0.5
    assert h800.efficiency_of(OpKind.EMBEDDING, Phase.FORWARD).compute == 1.0


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_known_by_a_word_of_its_name(device: str, name: str | None) -> None:
    hardware = hardware_of_device(device)
    assert (hardware.name if hardware else None) == name


def test_numbers_have_the_width_that_they_are_computed_in() -> None:
    assert load_hardware("a100").flops_per_s(2) == 312e12
    assert load_hardware("a100").flops_per_s(4) == 19.5e12


def test_contention_is_that_of_the_measured_products() -> None:
    """STP's table 11, in ms: a product, an all-reduce, both at one time. A CPU computes its exchanges itself."""
    contention = load_hardware("a800").contention
    for product, exchange, together in ((8.605, 3.364, 9.251), (0.334, 1.643, 1.685)):
        load = Load(forward_s=product, input_exchange_s=exchange, contention=contention)
        assert load.seconds == pytest.approx(together, rel=0.015)
    assert load_hardware("cpu").contention == 1.0


def test_a_file_of_ones_own(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text('extends = "h800"\nmemory_bytes = 40e9\n[efficiency.matmul]\ncompute = 0.5\n')
    found = load_hardware(str(tmp_path / "mine.toml"))
    assert (found.name, found.memory_bytes, found.bf16_flops_per_s) == ("mine", 40e9, 989e12)
    assert found.efficiency_of(OpKind.MATMUL, Phase.FORWARD).compute == 0.5
    assert found.efficiency_of(OpKind.MATMUL, Phase.FORWARD).memory == 0.85


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense = 1", "unknown key nonsense"),
        ("memory_bytes = 'x'", "memory_bytes = 'x'; it must be a finite number above 0"),
        ("memory_bytes = 0", "must be a finite number above 0"),
        ("memory_bytes = true", "must be a finite number"),
        ("memory_bytes = inf", "must be a finite number"),
        ("launch_s = -1.0", "must be a finite number at least 0"),
        ("[links.nvlink]\nbytes_per_s = 0.0", r"links.nvlink.bytes_per_s = 0.0; it must be a finite number above 0"),
        ("[tiles]\nunits = 0", "must be an integer above 0"),
        ("contention = 1.5", r"contention = 1.5; it must be between 0 .* and 1"),
        ("contention = -0.5", "must be a finite number at least 0"),
        ("gpus_per_node = 1.5", "must be an integer above 0"),
        ("compute = 'tpu'", "it is gpu or cpu"),
        ("name = 3", "it must be a string"),
        ("[links.token_ring]\nbytes_per_s = 1.0", "must have just"),
        ("[links.nvlink]\nlatency = 1.0", "unknown key latency"),
        ("[efficiency.sorting]\ncompute = 0.5", "name a section after one of"),
        ("[efficiency.matmul]\ncompute = 1.5", "nothing reaches more than 1"),
        ("[efficiency.matmul.backward_input]\nspeed = 1", "unknown key speed"),
        ("not toml", "not valid TOML"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, text, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "wrong.toml").write_text(f'extends = "h800"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(tmp_path / "wrong.toml"))


def test_a_key_that_is_missing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "short.toml").write_text(
        'extends = "defaults"\n[tiles]\nunits = 3\n[links.nvlink]\nbytes_per_s = 1.0\n'
    )
    with pytest.raises(ConfigError, match="the key bytes_per_s is missing"):
        load_hardware(str(tmp_path / "short.toml"))


@pytest.mark.parametrize("name", ["defaults", "h900", "nowhere.toml", "h" * 300])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="name one of a100, a40"):
        load_hardware(name)


def test_extends_must_lead_somewhere_and_not_in_a_circle(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.toml").write_text('extends = "b"')
    (tmp_path / "b.toml").write_text('extends = "a"')
    (tmp_path / "c.toml").write_text('extends = "nothing"')
    with pytest.raises(ConfigError, match=r"in a circle: a\.toml -> b\.toml -> a\.toml"):
        load_hardware(str(tmp_path / "a.toml"))
    with pytest.raises(ConfigError, match="name a profile in the same folder"):
        load_hardware(str(tmp_path / "c.toml"))
