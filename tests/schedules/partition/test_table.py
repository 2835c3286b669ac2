from jaxpipe.schedules.partition import LayerCost, Profile, StageMemory, Tie, format_partition


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
        format_partition([0, 1, 2], ["f", "g"], [0, 0]).split("\n")[1]
        == "    0  [0, 1)  f               0           -"
    )


def test_chunks_show_part_and_stage() -> None:
    table = format_partition([0, 1, 2, 3, 4], ["A", "B", "C", "D"], stages=[0, 1, 1, 0])
    assert table.split("\n") == [
        " part  stage  layers  names",
        "    0      0  [0, 1)  A",
        "    1      1  [1, 2)  B",
        "    2      1  [2, 3)  C",
        "    3      0  [3, 4)  D",
        "total              4",
    ]


def test_costs_add_times_and_memory() -> None:
    layers = (LayerCost(0.001, 0.002, 0.001, 50, 10), LayerCost(0.0015, 0.003, 0.001, 1000, 2**20))
    profile = Profile(layers, "measured on cpu")
    assert format_partition([0, 1, 2], ["A", "B"], profile=profile).split("\n") == [
        "stage  layers  names  forward ms  backward ms  of slowest",
        "    0  [0, 1)  A           1.000        2.000        67 %",
        "    1  [1, 2)  B           1.500        3.000       100 %",
        "total       2              2.500        5.000",
        "times: measured on cpu",
    ]
    split = Profile(
        (LayerCost(0.0, 0.0, num_params=70, is_stage_sharded=True), layers[1]), "measured on cpu"
    )
    assert format_partition([0, 1, 2], ["A", "B"], profile=split).endswith(
        "times: measured on cpu\nevery stage also holds 70 parameters of split layers"
    )
    known = Profile(layers, "measured on cpu", memory=StageMemory((3, 1)))
    lines = format_partition([0, 1, 2], ["A", "B"], profile=known).split("\n")
    assert [line[58:].split() for line in lines[:4]] == [
        ["memory", "in", "flight"],
        ["830", "B", "3"],
        ["1.0", "MiB", "1"],
        [],
    ]


def test_what_layers_share_counts_once() -> None:
    """Once in each part that holds it, and once in the total."""
    names, counts = ["Embed", "Block", "Block", "Head"], [1050, 200, 200, 1010]
    ties = [Tie("table", (0, 3), 1000)]
    assert format_partition([0, 2, 3, 4], names, counts, ties=ties).split("\n") == [
        "stage  layers  names         parameters  of largest",
        "    0  [0, 2)  Embed, Block      1,250*       100 %",
        "    1  [2, 3)  Block               200         16 %",
        "    2  [3, 4)  Head              1,010*        81 %",
        "total       4                    1,460",
        "* tied 'table': layers Embed, Head share 1,000 parameters, which count once in the total",
    ]
    assert "    0  [0, 4)  Embed, Block x 2, Head      1,460*       100 %" in format_partition(
        [0, 4], names, counts, ties=ties
    )
    assert "*" not in format_partition([0, 4], names, ties=ties)
