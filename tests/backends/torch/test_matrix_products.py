"""Matrix products by oneDNN: the numbers of PyTorch's own, for every order in memory, and nothing left behind."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

import lockstep  # noqa: E402
from lockstep.backends.torch import cpu_kernels, matrix_products  # noqa: E402
from lockstep.backends.torch.cpu_kernels import CpuKernels  # noqa: E402
from lockstep.backends.torch.replacing import REPLACED  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here"),
    pytest.mark.filterwarnings(f"ignore:{REPLACED}"),  # a session does
]

LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda rows, columns: torch.randn(rows, columns),
    "columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "part of rows": lambda rows, columns: torch.randn(rows, columns + 37)[:, 5 : 5 + columns],
    "part of columns": lambda rows, columns: torch.randn(columns, rows + 3)[:, 1 : 1 + rows].t(),
    "every other row": lambda rows, columns: torch.randn(2 * rows, columns)[::2],
    "one row": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "gaps": lambda rows, columns: torch.randn(2 * rows, 2 * columns)[::2, ::2],
}
PAIRS = list(product(LAYOUTS, LAYOUTS))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Those that oneDNN has computed; on every processor, as if it were the one that they are for."""
    found, ours = [], matrix_products.product

    def counted(*args: Tensor) -> Tensor:
        found.append(ours(*args))
        return found[-1]

    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: True)
    monkeypatch.setattr(matrix_products, "product", counted)
    asked = CpuKernels()
    with asked.session():
        asked.use()
        yield found


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=[" x ".join(pair) for pair in PAIRS])
def test_products_are_right_for_every_order_in_memory(products: list[Tensor], left: str, right: str) -> None:
    A, B, bias = LAYOUTS[left](190, 230), LAYOUTS[right](230, 170), torch.randn(340)[::2]
    expected = A.double() @ B.double()
    torch.testing.assert_close(torch.mm(A, B), expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.addmm(bias, A, B), (expected + bias).float(), rtol=1e-4, atol=1e-4)
    assert len(products) == (0 if "gaps" in (left, right) else 2)


def test_layers_and_their_gradients_take_them(products: list[Tensor]) -> None:
    layer, X = torch.nn.Linear(256, 128), torch.randn(4, 128, 256, requires_grad=True)
    layer(X).backward(torch.ones(4, 128, 128))
    assert len(products) == 3  # the layer, the gradients of its input and of its weight
    gradients = X.grad, layer.weight.grad, layer.bias.grad
    ones = torch.ones(512, 128, dtype=torch.double)
    rows, weight = X.detach().double().view(512, 256), layer.weight.detach().double()
    expected = (ones @ weight).view(4, 128, 256), ones.t() @ rows, ones.sum(0)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right.float(), rtol=1e-4, atol=1e-3)


def test_the_bits_do_not_depend_on_where_matrices_are_in_memory(products: list[Tensor]) -> None:
    A, B = torch.randn(190, 230), torch.randn(230, 170)

    def moved(matrix: Tensor, by: int) -> Tensor:
        return torch.empty(matrix.numel() + 64)[by : by + matrix.numel()].view(matrix.shape).copy_(matrix)

    for by in (1, 3, 8, 16):
        torch.testing.assert_close(torch.mm(moved(A, by), moved(B, 64 - by)), torch.mm(A, B), rtol=0, atol=0)
    assert len(products) == 8


def test_what_they_are_not_for_is_as_before(products: list[Tensor]) -> None:
    large, small = torch.ones(300, 400), torch.ones(3, 4)
    assert torch.mm(small, small.t()).tolist() == [[4.0] * 3] * 3
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        assert torch.equal(torch.mm(large.to(dtype), large.t().to(dtype)), torch.full((300, 300), 400, dtype=dtype))
    assert torch.addmm(torch.ones(300), large, large.t(), beta=0.5, alpha=2)[0, 0] == 800.5
    assert torch.addmm(torch.ones(300, 1), large, large.t())[0, 0] == 401
    assert torch.mm(torch.ones(0, 400), large.t()).shape == (0, 300)
    assert not products


@pytest.mark.parametrize("shapes", [((300, 400), (300, 400)), ((2, 300, 400), (400, 300))])
def test_errors_are_those_of_pytorch(products: list[Tensor], shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|must be a matrix"):
        torch.mm(*map(torch.ones, shapes))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(300, 400), torch.ones(400, 300).double())


def test_afterwards_they_are_those_of_pytorch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.randn(300, 400)
    before = torch.mm(X, X.t())
    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: True)
    monkeypatch.setattr(matrix_products, "product", lambda left, right: torch.zeros(1))
    asked = CpuKernels()
    for _ in range(2):
        with asked.session():
            assert torch.equal(torch.mm(X, X.t()), before)  # nobody has asked for them
            for _rank in range(2):
                asked.use()
            assert torch.mm(X, X.t()).tolist() == [0]
        asked.use()  # too late
        assert torch.equal(torch.mm(X, X.t()), before)


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


def test_runs_of_modules_take_them_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ours = [], matrix_products.product
    monkeypatch.setattr(cpu_kernels, "multiplies_with_onednn", lambda: True)
    monkeypatch.setattr(matrix_products, "product", lambda *args: found.append(args[0].shape) or ours(*args))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 3))
    X, y = torch.randn(500, 300), torch.randint(3, (500,))
    runs = [
        lockstep.train(model=net, data=(X, y), lr=0.1, batch_size=500, epochs=2, shards=4, devices=devices, quiet=True)
        for devices in (1, 2, 3)
    ]
    assert len({run.weights_sha256 for run in runs}) == 1
    assert (125, 300) in found
    found.clear()
    with lockstep.Trainer(net, lr=0.1, shards=4, devices=2) as trainer:
        for epoch in range(2):
            for start in range(0, 500, 500):
                trainer.step((X[start:], y[start:]))
            assert (125, 300) in found, epoch
            found.clear()
            torch.mm(X, X.t())  # between the calls, PyTorch's settings are the user's
            assert not found
