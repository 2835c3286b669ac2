from jaxpipe.partition import partition_uniform


def test_lengths_differ_by_at_most_one_and_the_longer_parts_come_first() -> None:
    for num_items in range(1, 30):
        for num_parts in range(1, num_items + 1):
            boundaries = partition_uniform(num_items, num_parts)
            sizes = [b - a for a, b in zip(boundaries, boundaries[1:], strict=False)]
            assert boundaries[0] == 0
            assert boundaries[-1] == num_items
            assert len(sizes) == num_parts
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_the_remainder_goes_to_the_first_parts() -> None:
    assert partition_uniform(38, 8) == [0, 5, 10, 15, 20, 25, 30, 34, 38]
