from jaxpipe.schedules.partition import StageCut, cut_stages


def sizes(cuts: tuple[StageCut, ...]) -> list[tuple[int, int, int]]:
    return [(len(cut.prologue), len(cut.trunk), len(cut.epilogue)) for cut in cuts]


def test_the_longest_common_run_is_the_trunk() -> None:
    for layers, parts, wanted in [
        ("ebbbbh", [0, 3, 6], [(1, 2, 0), (0, 2, 1)]),
        ("ebbbbh", [0, 4, 6], [(3, 1, 0), (0, 1, 1)]),
        ("ebbbbh", [0, 2, 6], [(1, 1, 0), (2, 1, 1)]),
        ("bbbb", [0, 2, 4], [(0, 2, 0), (0, 2, 0)]),
        ("bbbbbb", [0, 2, 4, 6], [(0, 2, 0), (0, 2, 0), (0, 2, 0)]),
        ("ebbbbbbh", [0, 3, 5, 8], [(1, 2, 0), (0, 2, 0), (0, 2, 1)]),
        ("abcd", [0, 2, 4], [(2, 0, 0), (1, 0, 1)]),
        ("abcd", [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 0, 1)]),
        ("abab", [0, 2, 4], [(0, 2, 0), (0, 2, 0)]),
        ("xabyabz", [0, 3, 7], [(1, 2, 0), (1, 2, 1)]),
        ("abba", [0, 2, 4], [(1, 1, 0), (0, 1, 1)]),
        ("abcab", [0, 5], [(0, 0, 5)]),
    ]:
        cuts = cut_stages(layers, parts)
        assert sizes(cuts) == wanted, layers
        covered = [
            i for cut in cuts for part in (cut.prologue, cut.trunk, cut.epilogue) for i in part
        ]
        assert covered == list(range(len(layers))), layers
        trunks = {tuple(layers[i] for i in cut.trunk) for cut in cuts}
        assert len(trunks) == 1, layers
