"""Pictures: PNG files, of one run and of several."""

import struct

import pytest
from matplotlib.figure import Figure

from lockstep.report.events import EpochDone
from lockstep.report.plots import draw_curve, draw_curves

PNG = b"\x89PNG\r\n\x1a\n"


def history(*accuracies):
    return [EpochDone(epoch, 1.0, 0.5, accuracy) for epoch, accuracy in enumerate(accuracies, 1)]


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert content.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("accuracies", [(0.5, 0.7, 0.8), (0.5,), (0.5, float("nan"), 0.1)])
def test_a_curve_is_a_png_for_any_file_name(tmp_path, accuracies):
    draw_curve(history(*accuracies), tmp_path / ".part-curve.png")
    draw_curve(history(*accuracies), tmp_path / "curve")
    assert size_of(tmp_path / ".part-curve.png") == size_of(tmp_path / "curve") == (630, 450)


def test_the_picture_depends_on_the_history_only(tmp_path):
    for name, last in (("one", 0.8), ("same", 0.8), ("other", 0.3)):
        draw_curve(history(0.5, 0.7, last), tmp_path / name)
    one, same, other = ((tmp_path / name).read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_several_curves_are_in_one_picture_with_their_names(tmp_path, num_epochs):
    curves = {f"{k} devices": history(*[0.1 * k] * num_epochs) for k in range(1, 6)}
    draw_curves(curves, tmp_path / "all.png")
    assert size_of(tmp_path / "all.png") == (960, 600)
    draw_curves({f"{label}!": curve for label, curve in curves.items()}, tmp_path / "renamed.png")
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "renamed.png").read_bytes()


def test_curves_of_different_length_are_drawn(tmp_path):
    draw_curves({"short": history(0.5), "long": history(0.5, 0.6, 0.7)}, tmp_path / "all.png")
    assert size_of(tmp_path / "all.png") == (960, 600)


@pytest.fixture
def drawn(monkeypatch):
    """The lines of every picture that is drawn."""
    pictures, save = [], Figure.savefig

    def note_and_save(figure, *args, **kwargs):
        pictures.append(figure.axes[0].get_lines())
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", note_and_save)
    return pictures


def test_the_curve_is_accuracy_against_epoch(tmp_path, drawn):
    draw_curve(history(0.5, 0.7, 0.8), tmp_path / "curve.png")
    ((line,),) = drawn
    assert line.get_xydata().tolist() == [[1, 0.5], [2, 0.7], [3, 0.8]]


@pytest.mark.parametrize(("metrics", "values"), [({"loss": 0.25}, [[1, 0.25], [2, 0.25]]), ({}, [[1, 0.5], [2, 0.5]])])
def test_without_accuracy_the_curve_is_a_loss(tmp_path, drawn, metrics, values):
    draw_curve([EpochDone(epoch, 1.0, 0.5, None, metrics) for epoch in (1, 2)], tmp_path / "curve.png")
    ((line,),) = drawn
    assert line.get_xydata().tolist() == values
    assert line.axes.get_ylabel() == ("test loss" if metrics else "train loss")
    assert line.axes.get_legend() is None


def test_two_equal_curves_are_both_visible(tmp_path, drawn):
    draw_curves({"one": history(0.5, 0.7), "two": history(0.5, 0.7)}, tmp_path / "two.png")
    ((one, two),) = drawn
    assert one.get_xydata().tolist() == two.get_xydata().tolist() == [[1, 0.5], [2, 0.7]]
    assert one.get_linestyle() != two.get_linestyle()
    assert (one.get_label(), two.get_label()) == ("one", "two")


def test_drawing_needs_no_display_and_leaves_no_figure_open(tmp_path, monkeypatch):
    import matplotlib.pyplot

    monkeypatch.delenv("DISPLAY", raising=False)
    draw_curve(history(0.5, 0.6), tmp_path / "curve.png")
    assert matplotlib.pyplot.get_fignums() == []
