from stats import Stats, link_shapes, measured, stats, table

LINK = '''"""A link."""

from dataclasses import dataclass


@dataclass
class LinkView:
    """What it carries."""

    rtt_s: float
    # Nobody measured it yet: None.
    available_bytes_per_s: float | None = None

    def is_idle(self) -> bool:
        return not self.rtt_s  # noqa: SIM103


class LinkConfig:
    rtt_s: float = 0.1
    loss: float = 0.1
'''


def test_code_is_what_is_neither_empty_nor_a_comment_nor_a_docstring():
    file = measured("netmon/link.py", LINK)
    assert file.num_lines == LINK.count("\n")
    assert file.num_code == 10
    # What speaks to a linter explains nothing to a reader.
    assert file.num_comments == 1
    assert file.functions == [2]
    assert [one.name for one in file.classes] == ["LinkView", "LinkConfig"]


def test_a_link_shape_declares_two_measures_and_is_no_setting():
    assert link_shapes(measured("netmon/link.py", LINK).classes) == ["LinkView"]
    assert link_shapes(measured("deploy/plan/link.py", LINK).classes) == []


def test_a_name_or_a_knob_of_two_packages_is_counted_once():
    counted = stats({"netmon/a.py": LINK, "transport/b.py": LINK, "tests/test_a.py": "x = 1\n"})
    assert counted.rows["lines of tests"] == 1
    assert counted.rows["source files"] == 2
    assert counted.names["public class names used twice"] == ["LinkConfig", "LinkView"]
    assert counted.names["knobs declared more than once"] == ["rtt_s x2", "loss x2"]
    assert counted.rows["most files in a folder"] == 1


def test_revisions_stand_side_by_side():
    lines = table(
        {"old": Stats({"classes": 12}, {}), "new": Stats({"classes": 9}, {})}
    ).splitlines()
    assert [line.split() for line in lines] == [["old", "new"], ["classes", "12", "9"]]
