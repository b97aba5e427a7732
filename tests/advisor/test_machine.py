import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.advisor.machines import PART, make_machine

from longshore.advisor.machine import (
    MachineProfile,
    ProductTime,
    ProductTimes,
    load_machine,
    memory_gib,
    parse_machine,
    profile_names,
    read_cost,
)
from longshore.arch.costs import vendor_peak
from longshore.plan.cost import BUILT_IN

GRID = tuple(
    ProductTime(rows, k, n, rows * k * n * 1e-12, 3 * rows * k * n * 1e-12)
    for rows in (64, 1024)
    for k in (16, 256)
    for n in (32, 128)
)
MEASURED = replace(make_machine(), products=ProductTimes(origin="measured", flop=5e-13, grid=GRID))


def as_data(machine):
    return json.loads(json.dumps(machine.as_json()))


@pytest.mark.parametrize("machine", [make_machine(), MEASURED], ids=["rate", "grid"])
def test_json_round_trip(machine, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine.as_json()))
    assert load_machine(path) == machine
    assert read_cost(str(path)) == machine


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_say_where_every_entry_comes_from(name):
    machine = load_machine(name)
    assert isinstance(read_cost(name), MachineProfile)
    assert set(machine.origins().values()) <= {"measured", "derived", "arithmetic"}
    assert machine.origins()[f"gather at CP size {machine.node}"] == "arithmetic"
    assert machine.peak is not None


def test_derived_profiles_follow_the_data_sheets():
    """An A100 has 312 of the H200's 989.5 TFLOP/s and 2.039 of its 4.8 TB/s."""
    assert profile_names() == ("a100", "b200", "cpu", "h100", "h200")
    h200, a100 = load_machine("h200"), load_machine("a100")
    assert (h200.basis, set(a100.origins().values())) == ("", {"derived", "arithmetic"})
    assert a100.basis == "NVIDIA A100: derived from data sheets, not measured"
    flops, moved = 989.5 / 312, 4.8 / 2.039
    assert a100.products.flop == pytest.approx(h200.products.flop * flops)
    large = [m.products.seconds(32768, 12288, 12288)[0] for m in (h200, a100)]
    assert large[1] / large[0] == pytest.approx(flops, rel=1e-3), "products are FLOPs"
    small = [m.products.seconds(64, 64, 64)[0] for m in (h200, a100)]
    assert small[1] < 1.2 * small[0], "or a launch, which takes as long"
    assert a100.fixed.optimizer.seconds == pytest.approx(h200.fixed.optimizer.seconds * moved)
    assert a100.fixed.block_host == replace(h200.fixed.block_host, origin="derived")
    core, byte = a100.parts[0].core / h200.parts[0].core, a100.parts[0].value / h200.parts[0].value
    assert (core, byte) == pytest.approx((flops, moved))
    inside, across = (
        a100.byte_gathered(across=far) / h200.byte_gathered(across=far) for far in (False, True)
    )
    assert (inside, across) == pytest.approx((900 / 600, 1))


def test_a_cpu_launches_nothing_and_computes_in_float32():
    cpu = load_machine("cpu")
    assert (cpu.dtype, cpu.node, memory_gib("cpu")) == ("float32", 2, None)
    assert {part.host for part in cpu.parts} == {0.0}
    assert cpu.fixed.step_host.seconds == 0


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA H20", None),
    ],
)
def test_the_vendors_peak(device, tflops):
    assert vendor_peak(device, "bfloat16") == (tflops and tflops * 1e12)
    assert vendor_peak(device, "float32") is None


def changed(data, path, value):
    *parents, last = path
    place = data
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", 'has no "format": "longshore machine 1"'),
        (["device"], 3, "device must be a text, not 3"),
        (["node"], 1.5, "node must be a whole number, not 1.5"),
        (["fixed", "norm"], None, "fixed: norm is missing; it must have exactly byte, block"),
        (["fixed", "norm", "seconds"], -1, "fixed.norm.seconds is -1; it must be 0 or more"),
        (["fixed", "norm", "origin"], "guess", "it must be measured or derived or arithmetic"),
        (["parts", 0, "kind"], "x", "unknown kind of part 'x'; known are attention"),
        (["parts", 0, "call"], True, "parts[0].call must be a number, not True"),
        (["parts"], {}, "parts must be a list"),
        (["more"], 1, "'more' is unknown"),
        (["products", "flop"], 0, "products: flop is 0.0; it must be a number above 0"),
        (["products", "grid", 0], [1, 2], "a product must be [rows, k, n, forward, backward]"),
        (["products", "grid", 0, 0], 65, "every combination of its rows, k and n once"),
        (["products", "grid", 0, 3], 0, "takes no time"),
    ],
)
def test_faults_are_named(path, value, message):
    with pytest.raises(ValueError, match="machine profile mine") as error:
        parse_machine(changed(as_data(MEASURED), path, value), "mine")
    assert message in str(error.value)


def test_files_that_are_no_profile(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"cannot be read .* known names are a100, .* h200"):
        load_machine(path)
    with pytest.raises(ValueError, match=r"cannot be read .* known names are a100, .* h200"):
        read_cost(str(path))
    path.write_text("{")
    for read in (load_machine, read_cost):
        with pytest.raises(ValueError, match="is not JSON"):
            read(str(path))
    path.write_text(json.dumps(BUILT_IN.as_json()))
    assert read_cost(str(path)) == BUILT_IN


def test_products_between_and_beyond_measured_ones():
    """Seconds are proportional to rows · k · n on this grid, so logarithms are linear."""
    products = MEASURED.products
    for rows, k, n in [(64, 16, 32), (1024, 256, 128), (100, 50, 77), (4096, 512, 128)]:
        forward, backward = products.seconds(rows, k, n)
        assert forward == pytest.approx(rows * k * n * 1e-12)
        assert backward == pytest.approx(3 * rows * k * n * 1e-12)
    assert products.seconds(1, 16, 32) == pytest.approx(products.seconds(64, 16, 32))


def test_products_at_one_rate():
    assert ProductTimes(origin="arithmetic", flop=1e-12).seconds(3, 4, 5) == pytest.approx(
        (120e-12, 240e-12)
    )


@pytest.mark.property
@given(
    st.lists(st.integers(1, 5000), min_size=3, max_size=3),
    st.integers(0, 2),
    st.integers(1, 1000),
)
def test_a_larger_product_takes_no_less(sizes, place, more):
    larger = [size + more * (i == place) for i, size in enumerate(sizes)]
    for a, b in zip(
        MEASURED.products.seconds(*sizes), MEASURED.products.seconds(*larger), strict=True
    ):
        assert a <= b * (1 + 1e-12)


def test_the_nearest_part_is_taken_by_head_dim_first():
    near = replace(PART, head_dim=64, channels=4096, reference="near")
    wide = replace(PART, head_dim=128, channels=2048, reference="wide")
    machine = replace(make_machine(), parts=(near, wide))
    assert machine.part("attention", head_dim=64, channels=2048).reference == "near"
    assert machine.part("attention", head_dim=256, channels=4096).reference == "wide"
    assert machine.part("mlp", head_dim=1, channels=1) is None
