from functools import partial

import pytest
from _refusals import check_refused

from jaxpipe.errors import LaunchError
from jaxpipe.launch._layout import Layout, Node, read_slots

UNEVEN = (Node("a", (1, 3)), Node("b", (0, 1, 2, 3)))


def test_one_process_a_slot() -> None:
    layout = Layout(UNEVEN)
    assert layout.num_processes == 6
    assert layout.devices(0) == {0: (1,), 1: (3,)}
    assert layout.devices(1) == {2: (0,), 3: (1,), 4: (2,), 5: (3,)}


def test_one_process_a_node() -> None:
    layout = Layout(UNEVEN, 1)
    assert layout.num_processes == 2
    assert [layout.devices(rank) for rank in (0, 1)] == [{0: (1, 3)}, {1: (0, 1, 2, 3)}]


def test_processes_share_the_slots() -> None:
    layout = Layout(UNEVEN, 2)
    assert layout.devices(1) == {2: (0, 1), 3: (2, 3)}


@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_text_and_back(per_node: int | None) -> None:
    layout = Layout(UNEVEN, per_node)
    assert str(layout) == "a:1,3@b:0,1,2,3"
    assert Layout(read_slots(str(layout), "--layout"), per_node) == layout


def test_nodes_by_number_and_name() -> None:
    layout = Layout(UNEVEN)
    assert [layout.rank_of(text, "--node-rank") for text in ("0", "1", "a", "b")] == [0, 1, 0, 1]
    assert Layout((Node("7", (0,)), Node("3", (0,)))).rank_of("3", "--node-rank") == 1


def test_refused() -> None:
    table = [
        (
            r"must divide the slots of every node, but got 3 and a has slots=2\. Use 2",
            partial(Layout, UNEVEN, 3),
        ),
        (
            r"--layout 'a:0@b', in which 'b' comes without slots\. Write for instance",
            partial(read_slots, "a:0@b", "--layout"),
        ),
        *(
            (
                rf"RANK must be a number in \[0, 2\) or the name.*{text!r}\. The nodes are a, b",
                partial(Layout(UNEVEN).rank_of, text, "RANK"),
            )
            for text in ("2", "-1", "c", "", "²")
        ),
    ]
    check_refused(LaunchError, table)
