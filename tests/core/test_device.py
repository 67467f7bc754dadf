"""Names of devices, and which devices `--devices` means on a machine with some GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.device import MAX_DEVICES, Device, check_devices, choose_devices
from lockstep.core.errors import DeviceError

TWO_GPUS = [Device("cuda:0"), Device("cuda:1")]


@pytest.mark.parametrize(
    ("name", "device", "kind", "number"),
    [
        ("cpu", "cpu:0", "cpu", 0),
        ("cpu:3", "cpu:3", "cpu", 3),
        ("cuda", "cuda:0", "cuda", 0),
        (" cuda:1\n", "cuda:1", "cuda", 1),
        ("cuda:0007", "cuda:7", "cuda", 7),
    ],
)
def test_a_device_has_one_name_however_it_is_written(name, device, kind, number):
    found = Device(name)
    assert found == device
    assert (found.kind, found.number) == (kind, number)
    assert hash(found) == hash(device)


def test_a_device_is_a_string_and_is_shown_without_quotes():
    assert isinstance(Device("cpu:0"), str)
    assert f"{[Device('cpu:0'), Device('cpu:1')]}" == "[cpu:0, cpu:1]"
    assert Device(Device("cuda:1")) == "cuda:1"


@pytest.mark.parametrize(
    "name", ["", "gpu-0", "CPU:0", "cpu:", "cpu:-1", "cpu:1.5", "cuda:12345", "cpu 0", "xcuda:0", "cpu:0 cpu:1"]
)
def test_other_names_are_refused(name):
    with pytest.raises(DeviceError) as refused:
        Device(name)
    assert str(refused.value) == f"{name!r} is not the name of a device. Write cpu:0, cpu:1, cuda:0, ..."


def test_gpu_is_refused_with_the_name_cuda():
    for name, right in (("gpu", "cuda"), ("gpu:1", "cuda:1")):
        with pytest.raises(DeviceError, match=f"'{name}' is not the name of a device. Did you mean {right}[?] Write"):
            Device(name)


@given(st.text(max_size=12) | st.from_regex(r"(cpu|cuda):?\d{0,6}", fullmatch=True))
def test_any_text_is_a_device_or_an_error_with_the_text(name):
    try:
        device = Device(name)
    except DeviceError as refused:
        sentence = str(refused)
    else:
        assert device == f"{device.kind}:{device.number}"
        return
    assert sentence.startswith(repr(name))


@pytest.mark.parametrize("wanted", [3, "3", " 3 ", "+3"])
def test_a_number_without_gpus_means_logical_cpu_devices(wanted):
    assert choose_devices(wanted, gpus=[]) == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [(1, ["cuda:0"]), (2, ["cuda:0", "cuda:1"]), (3, ["cuda:0", "cuda:1", "cuda:0"])],
)
def test_a_number_means_gpus_and_each_more_than_once_where_there_are_fewer(wanted, devices):
    assert choose_devices(wanted, TWO_GPUS) == devices
    assert choose_devices(str(wanted), TWO_GPUS) == devices


def test_the_list_of_gpus_is_copied():
    gpus = list(TWO_GPUS)
    choose_devices(2, gpus).append(Device("cpu:0"))
    assert gpus == TWO_GPUS


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("cpu:0,cpu:1", ["cpu:0", "cpu:1"]),
        (" cpu:5 , cpu:2 ", ["cpu:5", "cpu:2"]),
        (["cpu:1"], ["cpu:1"]),
        ("cuda:1,cuda:0", ["cuda:1", "cuda:0"]),
        ("cuda:0,cuda:0,cuda", ["cuda:0", "cuda:0", "cuda:0"]),
        (["cuda:1", "cuda:1"], ["cuda:1", "cuda:1"]),
    ],
)
def test_a_list_names_devices_in_its_order_and_a_gpu_may_come_twice(wanted, devices):
    found = choose_devices(wanted, TWO_GPUS)
    assert found == devices
    assert all(isinstance(device, Device) for device in found)


@pytest.mark.parametrize("wanted", [0, -1, 4097, "0", "-2", "999999999"])
def test_an_impossible_number_is_refused(wanted):
    with pytest.raises(DeviceError) as refused:
        choose_devices(wanted, TWO_GPUS)
    assert str(refused.value) == f"{wanted} devices: give a number from 1 to 4096, or a list like cpu:0,cpu:1."


def test_the_largest_number_is_accepted():
    assert MAX_DEVICES == 4096
    assert choose_devices(4096, gpus=[])[-1] == "cpu:4095"


@pytest.mark.parametrize("wanted", [2.0, None, ("cpu:0", "cpu:1"), {"cpu:0"}, b"cpu:0"], ids=repr)
def test_what_is_neither_a_number_nor_a_list_is_refused(wanted):
    with pytest.raises(DeviceError) as refused:
        choose_devices(wanted, TWO_GPUS)
    assert str(refused.value) == f"{wanted!r} is neither a number of devices nor a list like cpu:0,cpu:1."


@pytest.mark.parametrize("name", [0, None, 1.5])
def test_a_list_of_other_things_is_refused(name):
    with pytest.raises(DeviceError) as refused:
        choose_devices([name], TWO_GPUS)
    assert str(refused.value) == f"{name!r} is not the name of a device. Write cpu:0, cpu:1, cuda:0, ..."


@pytest.mark.parametrize("check", [choose_devices, check_devices])
def test_an_empty_list_is_refused(check):
    with pytest.raises(DeviceError) as refused:
        check([], TWO_GPUS)
    assert str(refused.value) == "The list of devices is empty. Give a number, or a list like cpu:0,cpu:1."


@pytest.mark.parametrize("wanted", ["", "cpu:0,", ",cpu:0", "cpu:0,,cpu:1"])
def test_an_empty_name_is_refused(wanted):
    with pytest.raises(DeviceError, match="'' is not the name of a device"):
        choose_devices(wanted, TWO_GPUS)


@pytest.mark.parametrize("check", [choose_devices, check_devices])
def test_cpu_and_gpu_together_are_refused(check):
    with pytest.raises(DeviceError) as refused:
        check([Device("cpu:0"), Device("cuda:1")], TWO_GPUS)
    assert str(refused.value) == (
        "cpu:0, cuda:1 mixes CPU and GPU: their kernels round differently, so the weights would depend on which device "
        "computes a shard. List devices of one kind."
    )


@pytest.mark.parametrize(
    ("gpus", "has"),
    [([], "no GPU is visible on this machine"), (TWO_GPUS, "this machine has cuda:0, cuda:1")],
)
@pytest.mark.parametrize("check", [choose_devices, check_devices])
def test_a_missing_gpu_is_refused_with_those_that_exist(gpus, has, check):
    with pytest.raises(DeviceError) as refused:
        check([Device("cuda:2")], gpus)
    hint = "Use what there is, also twice: cuda:0,cuda:0" if gpus else "Use logical CPU devices: cpu:0,cpu:1"
    assert str(refused.value) == f"There is no cuda:2: {has}. {hint}."


def test_a_logical_device_listed_twice_is_refused_with_a_list_that_works():
    with pytest.raises(DeviceError) as refused:
        choose_devices("cpu:1,cpu,cpu:1", TWO_GPUS)
    assert str(refused.value) == ("cpu:1 is listed 2 times. Number logical CPU devices apart: cpu:0,cpu:1,cpu:2.")


@pytest.mark.parametrize(
    ("names", "gpus"),
    [(["cpu:0", "cpu:0"], []), (["cpu:7"], TWO_GPUS), (["cuda:1", "cuda:0", "cuda:1"], TWO_GPUS)],
)
def test_devices_that_exist_pass_the_check_however_often_they_are_listed(names, gpus):
    check_devices([Device(name) for name in names], gpus)
