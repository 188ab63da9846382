import torch
import torch.distributed as dist

from megaclass_launch.ranks.collectives import exchanges_reported, gather_blocks, scatter_sum, sum_over_ranks_


def _all_three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2, 3), float(rank))
    blocks = torch.arange(size, dtype=torch.float32)[:, None] * 10 + rank
    return gather_blocks(mine, None), sum_over_ranks_(mine.clone(), None), scatter_sum(blocks.expand(size, 4), None)


def test_what_travels_arrives_rank_by_rank(run_ranks):
    for rank, (gathered, summed, scattered) in enumerate(run_ranks(3, _all_three)):
        assert gathered.shape == (3, 2, 3)
        assert [float(block.mean()) for block in gathered] == [0, 1, 2]
        assert summed.unique().tolist() == [3]
        assert scattered.unique().tolist() == [3 * 10 * rank + 3]


def test_without_a_process_group_the_world_is_one_and_nothing_travels():
    assert not dist.is_initialized()
    block = torch.arange(4.0)
    assert torch.equal(gather_blocks(block, None), block[None])
    assert torch.equal(sum_over_ranks_(block.clone(), None), block)
    assert torch.equal(scatter_sum(block[None], None), block)


def _exchanges() -> tuple[list[bool], list[list[float]]]:
    reported: list[bool] = []
    with exchanges_reported(reported.append):
        results = _all_three()
    return reported, [result.flatten().tolist() for result in results]


def test_a_group_of_one_rank_sends_nothing(run_ranks):
    assert run_ranks(1, _exchanges) == [([], [[0.0] * 6, [0.0] * 6, [0.0] * 4])]
    assert len(run_ranks(2, _exchanges)[0][0]) == 6
