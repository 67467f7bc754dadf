"""Linear layers on CPUs: PyTorch's numbers, PyTorch's own function where ours is not for, and nothing left behind."""

import sys
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import lockstep  # noqa: E402
from lockstep.backends import load_backend  # noqa: E402
from lockstep.backends.torch import cpu_kernels, linear_cpu, matrix_products  # noqa: E402
from lockstep.backends.torch.linear_cpu import our_linear  # noqa: E402
from lockstep.core.device import Device  # noqa: E402

kernel_choice = sys.modules["lockstep.backends.torch.kernel_choice"]  # in its package, the name is the function's

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")

ROWS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(190, 230),
    "columns": lambda: torch.randn(230, 190).t(),
    "part of rows": lambda: torch.randn(190, 300)[:, 5:235],
    "every other row": lambda: torch.randn(380, 230)[::2],
    "every other column": lambda: torch.randn(190, 460)[:, ::2],
    "one row": lambda: torch.randn(1, 230).expand(190, 230),
    "positions": lambda: torch.randn(19, 10, 230),
    "positions first": lambda: torch.randn(19, 10, 230).transpose(0, 1),
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Those that oneDNN has computed."""
    found: list[Tensor] = []

    def counted(*args: Tensor) -> Tensor:
        found.append(matrix_products.product(*args))
        return found[-1]

    monkeypatch.setattr(linear_cpu, "product", counted)
    return found


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", ROWS)
def test_layers_and_their_gradients_are_pytorchs(products: list[Tensor], rows: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    values = [ROWS[rows](), torch.randn(170, 230), torch.randn(170)][: 3 if has_bias else 2]

    def computed(linear, dtype):
        inputs = [value.to(dtype).requires_grad_() for value in values]
        out = linear(*inputs)
        given = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out, *torch.autograd.grad(out, inputs, given.to(dtype))]

    expected = computed(F.linear, torch.float64)
    assert not products
    for ours, right in zip(computed(our_linear(F.linear), torch.float32), expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-3)
    assert len(products) == 3


def test_only_what_is_asked_for_is_computed(products: list[Tensor]) -> None:
    layer, X = nn.Linear(256, 128), torch.randn(4, 128, 256)
    our_linear(F.linear)(X, layer.weight, layer.bias).sum().backward()  # whose gradient is one number, expanded
    assert len(products) == 2
    torch.testing.assert_close(layer.weight.grad, X.sum((0, 1)).expand(128, 256), rtol=1e-4, atol=1e-3)
    layer.requires_grad_(False)
    with torch.no_grad():
        our_linear(F.linear)(X, layer.weight, layer.bias)
    assert len(products) == 3


def test_gradients_have_gradients() -> None:
    inputs = [0.1 * torch.randn(shape) for shape in ((10, 19, 230), (170, 230), (170,))]
    for tensor in inputs:
        tensor.requires_grad_()

    def second(linear):
        loss = linear(*inputs).pow(3).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return [each for one in first for each in torch.autograd.grad(one.square().sum(), inputs, retain_graph=True)]

    for ours, right in zip(second(our_linear(F.linear)), second(F.linear), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("shape", [(190, 230), (19, 10, 230)])
def test_what_comes_out_can_be_changed_in_place(shape: tuple[int, ...]) -> None:
    X, weight = torch.randn(shape), torch.randn(170, 230, requires_grad=True)

    def gradient(linear):
        out = linear(X, weight)
        out += 1
        out[0].mul_(2)
        return torch.autograd.grad(F.relu(out, inplace=True).sum(), weight)[0]

    torch.testing.assert_close(gradient(our_linear(F.linear)), gradient(F.linear), rtol=1e-4, atol=1e-2)
    if len(shape) == 2:
        our_linear(F.linear)(X, weight).detach_()


def test_rows_that_overlap_are_copied(products: list[Tensor]) -> None:
    X, weight = torch.randn(4, 2000).unfold(-1, 256, 8), torch.randn(170, 256, requires_grad=True)
    for one in (X, X[:1]):
        found, right = ((linear(one, weight)) for linear in (our_linear(F.linear), F.linear))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)
        given = torch.randn_like(found)
        of_ours, of_right = (torch.autograd.grad(out, weight, given)[0] for out in (found, right))
        torch.testing.assert_close(of_ours, of_right, rtol=1e-4, atol=1e-2)
    assert len(products) == 4


def test_the_bits_do_not_depend_on_where_matrices_are_in_memory() -> None:
    A, B, bias = torch.randn(190, 230), torch.randn(170, 230), torch.randn(170)

    def moved(matrix: Tensor, by: int) -> Tensor:
        return torch.empty(matrix.numel() + 64)[by : by + matrix.numel()].view(matrix.shape).copy_(matrix)

    linear = our_linear(F.linear)
    for by in (1, 3, 8, 16):
        assert torch.equal(linear(moved(A, by), moved(B, 64 - by), moved(bias, by)), linear(A, B, bias))


OTHERS = {
    "little work": lambda linear: linear(torch.randn(32, 230), torch.randn(170, 230)),
    "one sample": lambda linear: linear(torch.randn(4096), torch.randn(2048, 4096)),
    "nothing": lambda linear: linear(torch.randn(0, 4096), torch.randn(2048, 4096)),
    "double": lambda linear: linear(torch.randn(190, 230).double(), torch.randn(170, 230).double()),
    "bf16": lambda linear: linear(torch.randn(190, 230).bfloat16(), torch.randn(170, 230).bfloat16()),
    "few outputs": lambda linear: linear(torch.randn(9000, 230), torch.randn(4, 230)),
    "one row": lambda linear: linear(torch.randn(1, 4096), torch.randn(2048, 4096)),
    "a weight with gaps": lambda linear: linear(torch.randn(190, 230), torch.randn(170, 460)[:, ::2]),
    "by name": lambda linear: linear(input=torch.randn(32, 230), weight=torch.randn(170, 230), bias=None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_left_to_pytorch(products: list[Tensor], other: str) -> None:
    torch.manual_seed(0)
    expected = OTHERS[other](F.linear)
    torch.manual_seed(0)
    assert torch.equal(OTHERS[other](our_linear(F.linear)), expected)
    assert not products


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_layers_under_autocast_and_transforms_are_left_to_pytorch(products: list[Tensor]) -> None:
    linear, weight = our_linear(F.linear), torch.randn(170, 230)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(190, 230), weight).dtype == torch.bfloat16
    many = torch.vmap(linear, in_dims=(0, None))(torch.randn(3, 190, 230), weight)
    assert many.shape == (3, 190, 170)
    torch.vmap(lambda scale: scale * linear(torch.ones(190, 230), weight).mean())(torch.randn(3))
    with torch.autograd.forward_ad.dual_level():
        linear(torch.autograd.forward_ad.make_dual(torch.randn(190, 230), torch.randn(190, 230)), weight)
    torch.jit.trace(lambda rows: linear(rows, weight), torch.randn(190, 230), check_trace=False)
    assert not products


@pytest.mark.parametrize("wrong", [((300, 400), (300, 401)), ((300, 400), (2, 300, 400))])
def test_errors_are_those_of_pytorch(wrong: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    said = []
    for linear in (F.linear, our_linear(F.linear)):
        with pytest.raises(RuntimeError) as raised:
            linear(*map(torch.ones, wrong))
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("pays", [True, False])
def test_functions_are_ours_in_a_session_and_pytorchs_after_it(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: pays)
    before = F.linear, F.conv2d, torch.conv2d
    with load_backend("torch").session([Device("cpu:0")]):
        assert (F.linear is not before[0]) is pays
        assert (F.conv2d is not before[1]) is pays
        assert F.conv2d is torch.conv2d
    assert before == (F.linear, F.conv2d, torch.conv2d)


def test_processors_of_others_and_portable_runs_keep_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = matrix_products.multiplies_with_onednn.__wrapped__
    for vendor, vectors, expected in [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),  # what --portable asks for
        ("GenuineIntel", "AVX512", False),
        ("", "DEFAULT", False),
    ]:
        monkeypatch.setattr(matrix_products, "cpu_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda vectors=vectors: vectors)
        assert chosen() is expected


def test_runs_of_modules_take_them_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, products: list[Tensor]
) -> None:
    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 3))
    X, y = torch.randn(500, 300), torch.randint(3, (500,))
    runs = [
        lockstep.train(model=net, data=(X, y), lr=0.1, batch_size=500, epochs=2, shards=4, devices=devices, quiet=True)
        for devices in (1, 2, 3)
    ]
    assert len({run.weights_sha256 for run in runs}) == 1
    assert {tuple(found.shape) for found in products} == {(125, 400), (400, 300)}
    products.clear()
    with lockstep.Trainer(net, lr=0.1, shards=4, devices=2) as trainer:
        for _ in range(2):
            trainer.step((X, y))
            assert products
            products.clear()
            F.linear(X, net[0].weight)  # between the calls, PyTorch's functions are the user's
            assert not products


class Tied(nn.Module):
    """Its output layer is its embedding; and a product that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.norm = nn.Embedding(40, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.free = nn.Parameter(0.1 * torch.randn(32, 32))
        self.out = nn.Linear(32, 40, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, X: Tensor) -> Tensor:
        Y = F.relu(self.inner(self.tokens(X)), inplace=True)
        return self.out(F.linear(self.norm(Y), self.free)).transpose(1, 2)


def test_stages_take_as_many_of_them_as_the_whole(monkeypatch: pytest.MonkeyPatch, products: list[Tensor]) -> None:
    """With products of this size the bits are the same by chance, whoever computes them: so they are counted."""
    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: True)
    monkeypatch.setattr(linear_cpu, "MIN_WORK", 1)
    torch.manual_seed(0)
    net, X = Tied(), torch.randint(40, (64, 10))
    how = {"model": net, "data": (X, X.roll(1, 1)), "batch_size": 32, "epochs": 2, "lr": 0.1, "shards": 4}
    hashes, numbers = set(), set()
    for split in ({"devices": 1}, {"devices": 3}, {"split": "network=2"}, {"split": "data=2,network=2"}):
        products.clear()
        run = lockstep.train(**how, **split, verify_every=0, check_every=0, quiet=True)
        hashes.add(run.weights_sha256)
        numbers.add(len(products))
    assert len(hashes) == 1
    assert len(numbers) == 1
    assert numbers.pop() >= 2 * 4 * 2 * 9  # epochs, shards, steps; three layers, forward and both gradients


@pytest.mark.parametrize(("pays", "library"), [(True, "oneDNN"), (False, "PyTorch's")])
def test_the_library_is_among_what_ranks_and_checkpoints_compare(
    monkeypatch: pytest.MonkeyPatch, pays: bool, library: str
) -> None:
    monkeypatch.setattr(kernel_choice, "multiplies_with_onednn", lambda: pays)
    found = kernel_choice.kernel_choice.__wrapped__(Device("cpu:0"))
    assert found["library for large matrix products"] == library
