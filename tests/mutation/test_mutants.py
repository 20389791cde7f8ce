"""Which faults are put into a source, and that each changes nothing else."""

import pytest
from mutants import mutants_of


def changes(line: str, head: str = "def f(a, b):\n    ") -> set[str]:
    """What becomes of a statement in a function, without what becomes of `head`."""
    source = f"{head}{line}\n"
    found = mutants_of(source)
    assert all(mutant.source.startswith(head) for mutant in found)
    return {mutant.source.removeprefix(head).rstrip("\n") for mutant in found}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a >= b", {"x = a > b", "x = a < b"}),
        ("x = a == b", {"x = a != b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = a"}),
        ("x = a // b", {"x = a / b"}),
        ("x = -a", {"x = a"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = True", {"x = False"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = any(a)", {"x = all(a)"}),
        ("x = a if b else a", {"x = a if not b else a"}),
        ("x = [c for c in a if c.ok]", {"x = [c for c in a if not c.ok]"}),
        ("return a", {"return None"}),
        ("return False", {"return True"}),
        ("x += a", {"x -= a", "pass"}),
        ("a.x = b", {"pass"}),
        ("a[b] = b", {"pass"}),
        ("del a[b]", {"pass"}),
        ("a(b)", {"pass"}),
        ("raise a", {"pass"}),
    ],
)
def test_each_operator_changes_one_place(line: str, expected: set[str]) -> None:
    assert changes(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "x: int | None = a",
        '"""Text and 1 < 2."""',
        "assert a < b",
        "zip_ = zip(a, b, strict=True)",
        "log.info(a, 1)",
        'x = f"{a + 1}"',
        "return None",
    ],
)
def test_what_no_behaviour_depends_on_is_left_alone(line: str) -> None:
    assert changes(line) == set()


def test_a_loop_is_left_or_gone_on_with() -> None:
    head = "def f(a):\n    for _ in a:\n        "
    assert changes("break", head) == {"continue"}
    assert changes("continue", head) == {"break"}


def test_brackets_comments_and_text_beyond_ascii_keep_their_place() -> None:
    line = 'x = "é" in (a)  # a < b\n    y = (a  # less <\n        < b)'
    assert 'x = "é" not in (a)  # a < b\n    y = (a  # less <\n        < b)' in changes(line)
    assert 'x = "é" in (a)  # a < b\n    y = (a  # less <\n        <= b)' in changes(line)


def test_the_order_of_a_module_constant_matters_and_the_defaults_of_fields_do_not() -> None:
    assert changes("ORDER = (a, b)", "") == {"ORDER = (b, a)"}
    assert changes("x: float = 2.0", "class C:\n    ") == set()
    assert changes("x: bool = True", "class C:\n    ") == {"x: bool = False"}
    assert changes("KIND = 2", "class C:\n    ") == {"KIND = 3", "KIND = 1"}


def test_a_mutant_names_the_lines_that_run_when_it_does() -> None:
    source = "LIMIT = 1\ndef f(a, b):\n    if a < b:\n        return b\n    a(\n        1,\n    )\n"
    found = {(m.line, m.operator): m for m in mutants_of(source)}
    assert found[1, "number"].is_import_time
    condition = found[3, "comparison"]
    assert (condition.first_line, condition.last_line) == (3, 3)
    assert not condition.is_import_time
    argument = found[6, "number"]
    assert (argument.first_line, argument.last_line) == (5, 7)
