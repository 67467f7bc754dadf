"""Convolutions on CPUs: PyTorch's numbers, and its own function where ours is not for."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lockstep.backends.torch import convolution_cpu  # noqa: E402
from lockstep.backends.torch.convolution_cpu import gradient_of_weight, our_conv2d  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
CASES = {  # images, input and output channels, kernel, stride, padding, size of images
    "3 x 3": (8, 64, 128, (3, 3), (1, 1), (1, 1), (4, 4)),
    "strided": (8, 64, 128, (3, 3), (2, 2), (1, 1), (7, 7)),
    "1 x 1, strided": (8, 256, 256, (1, 1), (2, 2), (0, 0), (7, 7)),
    "unequal": (4, 64, 128, (3, 5), (2, 1), (0, 2), (9, 6)),
    "one image": (1, 192, 192, (3, 3), (1, 1), (1, 1), (9, 9)),
    "one image of one channel": (1, 1, 128, (3, 300), (1, 1), (0, 0), (60, 300)),
}


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each gradient that was ours."""
    found: list[int] = []
    monkeypatch.setattr(
        convolution_cpu, "gradient_of_weight", lambda *args: found.append(1) or gradient_of_weight(*args)
    )
    return found


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_pytorchs(counted: list[int], case: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    num_images, num_in, num_out, kernel, stride, padding, size = CASES[case]
    values = channels_last(num_images, num_in, *size), channels_last(num_out, num_in, *kernel), torch.randn(num_out)
    values = values if has_bias else values[:2]
    how = {"stride": stride, "padding": padding}

    def computed(conv2d, dtype):
        inputs = [value.to(dtype).requires_grad_() for value in values]
        out = conv2d(*inputs, **how)
        given = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(out, inputs, given.to(dtype))
        assert [one.stride() for one in gradients] == [one.stride() for one in inputs]
        return [out, *gradients]

    expected = computed(F.conv2d, torch.float64)
    assert not counted
    for ours, right in zip(computed(our_conv2d(F.conv2d), torch.float32), expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-3)
    assert counted == [1]


def test_only_what_is_asked_for_is_computed(counted: list[int]) -> None:
    images, weight = channels_last(8, 64, 4, 4), channels_last(128, 64, 3, 3).requires_grad_()
    conv2d = our_conv2d(F.conv2d)
    conv2d(images, weight, None, 1, 1).sum().backward()
    assert counted == [1]
    assert images.grad is None
    conv2d(images.requires_grad_(), weight.detach(), None, 1, 1).sum().backward()
    assert counted == [1]
    assert images.grad is not None


def test_a_gradient_has_a_gradient() -> None:
    images, weight = (0.1 * channels_last(*shape) for shape in ((8, 64, 4, 4), (128, 64, 3, 3)))
    for tensor in (images, weight):
        tensor.requires_grad_()

    def second(conv2d):
        loss = conv2d(images, weight, None, 1, 1).square().sum()
        (first,) = torch.autograd.grad(loss, images, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    torch.testing.assert_close(second(our_conv2d(F.conv2d)), second(F.conv2d), rtol=1e-4, atol=1e-3)


OTHERS = {
    "many pixels": lambda conv: conv(channels_last(8, 64, 14, 14), channels_last(128, 64, 3, 3).requires_grad_()),
    "little work": lambda conv: conv(channels_last(2, 8, 4, 4), channels_last(128, 8, 3, 3).requires_grad_()),
    "groups": lambda conv: conv(
        channels_last(8, 128, 4, 4), channels_last(128, 64, 3, 3).requires_grad_(), None, 1, 1, 1, 2
    ),
    "dilation": lambda conv: conv(
        channels_last(8, 64, 6, 6), channels_last(256, 64, 3, 3).requires_grad_(), None, 1, 0, 2
    ),
    "a name": lambda conv: conv(
        channels_last(8, 64, 4, 4), channels_last(128, 64, 3, 3).requires_grad_(), padding="same"
    ),
    "channels first": lambda conv: conv(
        torch.randn(8, 64, 4, 4), torch.randn(128, 64, 3, 3).requires_grad_(), None, 1, 1
    ),
    "one image without a batch": lambda conv: conv(torch.randn(64, 4, 4), torch.randn(512, 64, 3, 3).requires_grad_()),
    "double": lambda conv: conv(
        channels_last(8, 64, 4, 4).double(), channels_last(128, 64, 3, 3).double().requires_grad_(), None, 1, 1
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_left_to_pytorch(counted: list[int], other: str) -> None:
    torch.manual_seed(0)
    expected = OTHERS[other](F.conv2d)
    torch.manual_seed(0)
    out = OTHERS[other](our_conv2d(F.conv2d))
    assert torch.equal(out, expected)
    out.sum().backward()
    assert not counted


@pytest.mark.parametrize("wrong", [(8, 32, 4, 4), (32, 64, 1, 1), (8, 64, 4)])
def test_errors_are_those_of_pytorch(wrong: tuple[int, ...]) -> None:
    weight, images, said = channels_last(256, 64, 3, 3).requires_grad_(), torch.randn(wrong), []
    images = images.to(memory_format=torch.channels_last) if images.ndim == 4 else images
    for conv2d in (F.conv2d, our_conv2d(F.conv2d)):
        with pytest.raises(RuntimeError) as raised:
            conv2d(images, weight)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_no_images_are_left_to_pytorch() -> None:
    weight = channels_last(256, 64, 3, 3).requires_grad_()
    assert our_conv2d(F.conv2d)(channels_last(0, 64, 4, 4), weight).shape == (0, 256, 2, 2)


def test_layers_under_autocast_are_left_to_pytorch(counted: list[int]) -> None:
    layer = nn.Conv2d(64, 128, 3, padding=1).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        out = our_conv2d(F.conv2d)(channels_last(8, 64, 4, 4), layer.weight, layer.bias, 1, 1)
    assert out.dtype == torch.bfloat16
    assert not counted


def test_images_of_one_line_may_have_any_order_in_memory() -> None:
    images = torch.randn(8, 16, 64).unsqueeze(-1).permute(0, 2, 3, 1)  # channels-last and not, where a line is all
    weight, given = channels_last(128, 64, 3, 3), torch.randn(8, 128, 1, 16)
    found = gradient_of_weight(given, images, weight, (1, 1), (1, 1))
    expected = torch.nn.grad.conv2d_weight(images.double(), weight.shape, given.double(), 1, 1)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("how", [{"stride": 0}, {"stride": (1, 1, 1)}, {"padding": ()}, {"pading": 1}], ids=str)
def test_odd_arguments_get_the_error_of_pytorch(how: dict[str, object]) -> None:
    weight, images, said = channels_last(256, 64, 3, 3).requires_grad_(), channels_last(8, 64, 4, 4), []
    for conv2d in (F.conv2d, our_conv2d(F.conv2d)):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            conv2d(images, weight, **how)
        said.append(str(raised.value))
    assert said[0] == said[1]
