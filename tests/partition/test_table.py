from jaxpipe.partition import format_partition


def test_the_table() -> None:
    table = format_partition([0, 2, 4], ["Embed", "Block", "Block", "Head"], [50, 200, 2000, 0])
    assert table.split("\n") == [
        "stage  layers  names         parameters  of largest",
        "    0  [0, 2)  Embed, Block         250        12 %",
        "    1  [2, 4)  Block, Head        2,000       100 %",
        "total       4                     2,250",
    ]


def test_equal_neighbours_are_counted_and_many_names_shortened() -> None:
    names = ["A", "B", "B", "B", "C", "D", "E"]
    table = format_partition([0, 4, 7], names)
    assert "[0, 4)  A, B x 3" in table
    assert "[4, 7)  C, D, E" in table
    assert "parameters" not in table
    assert "A, B x 3, ..., E" in format_partition([0, 7], names)


def test_layers_without_parameters() -> None:
    assert (
        format_partition([0, 1, 2], ["f", "g"], [0, 0]).split("\n")[1] == "    0  [0, 1)  f               0           -"
    )
