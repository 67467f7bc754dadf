"""Pictures of schedules: every pass is a box at its time; those in the documentation are up to date."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.report.schedule_picture import BACKWARD, COLOURS, FORWARD, LEFT, ROW, UNIT, Box, draw_schedule, idle_share

ROOT = Path(__file__).parent.parent.parent
BOXES = [Box(0, FORWARD, 3, 0, 0, 1), Box(1, FORWARD, 3, 1, 1, 2), Box(1, BACKWARD, 3, 1, 2, 4)]


def load_tool():
    spec = importlib.util.spec_from_file_location("schedule_pictures", ROOT / "tools" / "schedule_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def elements(picture, name):
    return list(ElementTree.fromstring(picture).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_a_box_is_where_its_time_is_in_the_colour_of_its_stage():
    rects = elements(draw_schedule(BOXES, "two"), "rect")
    fills = {fill for pair in COLOURS for fill in pair}
    passes = [rect for rect in rects if rect.get("fill") in fills and rect.get("height") == str(ROW)]
    assert [float(r.get("x")) for r in passes] == [LEFT + UNIT * box.start + 0.5 for box in BOXES]
    assert [float(r.get("width")) for r in passes] == [UNIT - 1, UNIT - 1, 2 * UNIT - 1]
    assert [r.get("fill") for r in passes] == [COLOURS[0][0], COLOURS[1][0], COLOURS[1][1]]
    assert passes[0].get("y") < passes[1].get("y") == passes[2].get("y")


def test_it_says_what_devices_hold_and_how_long_they_are_idle():
    texts = [text.text for text in elements(draw_schedule(BOXES, "a < b"), "text")]
    assert texts[0] == "a < b: 50 % idle" == f"a < b: {100 * idle_share(BOXES):.0f} % idle"
    assert {"device 0", "device 1", "stage 0", "stage 1", "forward", "backward", "idle"} <= set(texts)
    assert texts.count("3") == 3
    assert "stage 0" not in draw_schedule([Box(0, FORWARD, 0, 0, 0, 1)], "one stage")


def test_a_picture_is_wide_enough_for_its_title():
    title = "a long title, " * 10
    (root,) = elements(draw_schedule(BOXES, title), "svg")
    assert float(root.get("width")) > LEFT + 6 * len(title)


@pytest.mark.parametrize("name", load_tool().PICTURES)
def test_the_pictures_in_the_documentation_are_up_to_date_and_shown(name):
    tool = load_tool()
    made = tool.picture(tool.PICTURES[name].split())
    assert (ROOT / "docs" / name).read_text() == made, "run python tools/schedule_pictures.py"
    assert f"({name})" in (ROOT / "docs" / "splits.md").read_text()


def test_one_schedule_is_drawn_on_request(capsys):
    assert load_tool().main(["network=2", "--shards", "3", "--pipeline", "gpipe"]) == 0
    assert "network=2, gpipe, 3 shards" in capsys.readouterr().out
