"""Pictures: PNG files, of one run and of several."""

import struct

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lockstep.report.events import EpochDone
from lockstep.report.plots import Caption, Curves, Line, TargetBar, Times, comparison_figure, curve_figure, draw_curve

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
    assert size_of(tmp_path / ".part-curve.png") == size_of(tmp_path / "curve") == (1140, 510)


def test_the_picture_depends_on_the_history_only(tmp_path):
    for name, last in (("one", 0.8), ("same", 0.8), ("other", 0.3)):
        draw_curve(history(0.5, 0.7, last), tmp_path / name)
    one, same, other = ((tmp_path / name).read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def lines(axes):
    return [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xydata())]


def test_the_picture_has_loss_and_accuracy_against_the_epoch():
    figure = curve_figure(history(0.5, 0.7, 0.8), Caption("lenet on data", "batch 256"), [(0.5, 2.0), (1.0, 1.5)])
    loss, accuracy = figure.axes
    assert lines(loss) == [[[0.5, 2.0], [1.0, 1.5]], [[1, 0.5], [2, 0.5], [3, 0.5]]]
    assert lines(accuracy) == [[[1, 0.5], [2, 0.7], [3, 0.8]]]
    assert accuracy.get_ylim() == (0.0, 1.0)
    assert (loss.get_title(loc="left"), accuracy.get_title(loc="left")) == (
        "training loss, 0.5 at the end",
        "test accuracy, 0.8 at the end",
    )
    assert figure.get_suptitle() == "lenet on data"
    assert figure.get_supxlabel() == "batch 256"


def test_one_epoch_is_an_axis_from_0_to_1():
    for axes in curve_figure(history(0.5)).axes:
        assert axes.get_xlim() == (0, 1)


@pytest.mark.parametrize(
    ("metrics", "titles"), [({"loss": 0.25}, ["training loss", "test loss"]), ({}, ["training loss"])]
)
def test_without_accuracy_there_are_losses(metrics, titles):
    figure = curve_figure([EpochDone(epoch, 1.0, 0.5, None, metrics) for epoch in (1, 2)])
    assert [axes.get_title(loc="left").partition(",")[0] for axes in figure.axes] == titles


def test_nothing_is_clipped(tmp_path):
    """The text of every picture lies within it, also a long caption."""
    caption = Caption("a model " * 8, "settings " * 40)
    lines = [Line(f"k={k}, batch 256", [0.1, 0.2, 0.4], [0.5, 0.6, 0.7]) for k in range(1, 8)]
    targets = [TargetBar(f"k={k}, batch 256, lr 0.2", None if k == 2 else 1.5 * k) for k in range(1, 8)]
    curves, times = Curves(lines, "learning rate", "test accuracy"), Times("time to training loss 0.1234", targets)
    comparison = comparison_figure(curves, times, caption)
    for figure in (curve_figure(history(0.5, 0.9), caption), curve_figure(history(1.0)), comparison):
        figure.savefig(tmp_path / "picture.png", format="png")
        box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
        width, height = figure.get_size_inches()
        assert box.x0 >= -0.02
        assert box.y0 >= -0.02
        assert box.x1 <= width + 0.02
        assert box.y1 <= height + 0.02


def test_a_comparison_has_a_line_for_each_setting_and_a_bar_until_it_is_good_enough():
    lines = [Line("k=1 and k=2, batch 16", [0.1, 0.4], [0.5, 0.6]), Line("batch 32", [0.1, 0.4], [0.4, 0.7])]
    targets = [TargetBar("batch 16", 3.0), TargetBar("batch 32", None)]
    curves = Curves(lines, "learning rate", "test accuracy")
    left, right = comparison_figure(curves, Times("time to 0.66", targets)).axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["k=1 and k=2, batch 16", "batch 32"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["0.1", "0.4"]
    assert left.get_ylim() == (0.0, 1.0)
    assert [bar.get_width() for bar in right.patches] == [3.0, 0.0]
    assert [text.get_text() for text in right.texts] == ["batch 16: 3 s", "batch 32: not reached"]
    assert "lower is better" in right.get_xlabel()


def test_drawing_needs_no_display_and_leaves_no_figure_open(tmp_path, monkeypatch):
    import matplotlib.pyplot

    monkeypatch.delenv("DISPLAY", raising=False)
    draw_curve(history(0.5, 0.6), tmp_path / "curve.png")
    assert matplotlib.pyplot.get_fignums() == []
