"""Arguments of a head as users first write them: names, positions, the wrong kind of optimizer, no device."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from megaclass import AdaFace, ArcFace, CombinedMargin, CosFace, PartialFC, RowAdagrad, RowAdamW, RowSGD, UserError
from megaclass.head.margins import MARGINS


def test_a_margin_may_be_named_and_its_numbers_may_be_positional():
    for name, (margin, _) in MARGINS.items():
        assert PartialFC(8, 10, margin=name, class_counts=torch.ones(10)).margin == margin()
    assert ArcFace(64, 0.5) == ArcFace(scale=64, margin=0.5)
    assert CosFace(30, 0.35) == CosFace(scale=30, margin=0.35)
    assert CombinedMargin(64, 1, 0.3, 0.2) == CombinedMargin(scale=64, multiplier=1, angle=0.3, cosine=0.2)
    assert AdaFace(64, 0.4, 0.333) == AdaFace(scale=64, margin=0.4, concentration=0.333)
    assert PartialFC(8, 10, margin="ArcFace").margin == ArcFace()


def test_a_row_optimizer_may_be_named():
    for name, optimizer in (("sgd", RowSGD()), ("adamw", RowAdamW()), ("adagrad", RowAdagrad())):
        assert PartialFC(8, 10, optimizer=name).optimizer == optimizer


PARAMETER = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"margin": "arcfac"}, "PartialFC margin is 'arcfac'; it must be one of softmax, .* Did you mean 'arcface'?"),
        ({"margin": ArcFace}, r"margin is the class ArcFace; .* Write ArcFace\(\), with parentheses."),
        ({"margin": 0.5}, r"margin is an object of builtins.float; .* ArcFace\(scale=64, margin=0.5\)"),
        ({"optimizer": "sgdd"}, "optimizer is 'sgdd'; it must be one of sgd, adamw, adagrad. Did you mean 'sgd'?"),
        ({"optimizer": RowSGD}, r"the class RowSGD; .* Write RowSGD\(\), with parentheses."),
        (
            {"optimizer": torch.optim.SGD([PARAMETER], lr=0.1)},
            r"torch.optim.sgd.SGD; it must be RowSGD\(\), .* optimizer=RowSGD\(\) here, .* head.step\(lr=…\)",
        ),
        ({"optimizer": torch.optim.AdamW}, r"the class AdamW; .* Use optimizer=RowAdamW\(\) here"),
        ({"device": "gpu"}, "device 'gpu': expected cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_argument_is_answered_with_what_to_write(given, words):
    with pytest.raises(UserError, match=words):
        PartialFC(8, 10, **given)


def test_lists_and_arrays_are_answered_with_how_to_make_a_tensor():
    head = PartialFC(8, 10)
    with pytest.raises(
        UserError, match=r"labels are an object of builtins.list; .* torch.as_tensor\(labels\) makes one"
    ):
        head(torch.randn(2, 8), [1, 2])
    with pytest.raises(UserError, match=r"embeddings are an object of numpy.ndarray"):
        head(np.zeros((2, 8)), torch.tensor([1, 2]))
    with pytest.raises(UserError, match=r"labels are an object of builtins.list"):
        head.begin_step([1, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_cuda_without_a_gpu_is_one_line():
    with pytest.raises(UserError, match=r"PartialFC was asked for device 'cuda', but torch .* sees no GPU") as raised:
        PartialFC(8, 10, device="cuda")
    assert "\n" not in str(raised.value)


def test_a_head_without_a_device_moves_to_that_of_the_first_embeddings():
    """No GPU here: a device of another kind stands for it, on which only the move itself is possible."""
    head, other = PartialFC(8, 10), torch.device("meta")
    moves = []
    head.to = lambda device: moves.append(device)
    with pytest.raises(UserError, match="embeddings on meta, the head is on cpu: build the head with device='meta'"):
        head.logits(torch.zeros(2, 8, device=other))
    assert moves == [other], "the head followed the embeddings"
    with pytest.raises(UserError, match="embeddings on meta"):
        head.logits(torch.zeros(2, 8, device=other))
    assert moves == [other], "only the first ones are followed"
    chosen = PartialFC(8, 10, device="cpu")
    chosen.to = lambda device: moves.append(device)
    with pytest.raises(UserError, match="embeddings on meta"):
        chosen(torch.zeros(2, 8, device=other), torch.zeros(2, dtype=torch.int64))
    assert moves == [other], "a device that was given is kept"


def _backward_twice(head: PartialFC) -> None:
    for _ in range(2):
        head(torch.randn(4, 8, requires_grad=True), torch.arange(4)).backward()


def test_accumulation_without_begin_step_says_how():
    with pytest.raises(UserError, match=r"begin_step\(\) first. Lightning's accumulate_grad_batches .*own-loop.md"):
        _backward_twice(PartialFC(8, 10))


@pytest.mark.parametrize("num_subcentres", [1, 3])
def test_logits_and_predictions_are_those_of_the_normalised_centres(num_subcentres):
    head = PartialFC(8, 50, margin=ArcFace(32, 0.5), num_subcentres=num_subcentres, seed=3)
    embeddings = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    centres = head.centres(torch.arange(50)).reshape(50, num_subcentres, 8)
    expected = torch.einsum("bd,cmd->bcm", normalize(embeddings.float()), normalize(centres, dim=2)).amax(2)
    assert torch.allclose(head.logits(embeddings), 32 * expected, atol=1e-4)
    ids, cosines = head.predict(embeddings, k=5)
    assert torch.equal(ids, expected.topk(5).indices)
    assert torch.allclose(cosines, expected.topk(5).values, atol=1e-6)
    for bad in (torch.zeros(2, 9), torch.zeros(2, 8, dtype=torch.int64)):
        with pytest.raises(UserError, match="the head expects"):
            head.logits(bad)
    with pytest.raises(UserError, match=r"k=51: it must lie in \[1, 50\]"):
        head.predict(embeddings, k=51)


def _logits_of_rank(parts: list[int]) -> tuple[torch.Tensor, torch.Tensor, bool]:
    import torch.distributed as dist

    rank = dist.get_rank()
    # With a group of its own, which cannot be pickled or copied as such.
    head = PartialFC(8, 11, seed=3, group=dist.new_group())
    embeddings = torch.randn(sum(parts), 8, generator=torch.Generator().manual_seed(1)).split(parts)[rank]
    # An empty batch on one rank trains, too.
    head(embeddings.clone().requires_grad_(), torch.zeros(len(embeddings), dtype=torch.int64)).backward()
    head.step(lr=0.0)
    copied = copy.deepcopy(head).group is head.group
    try:
        pickle.dumps(head)
    except UserError as error:
        copied = copied and "whole_state_dict" in str(error)
    return head.logits(embeddings), head.predict(embeddings, k=3)[0], copied


def test_logits_are_the_same_on_three_ranks_of_which_one_brings_no_image(run_ranks):
    parts = [2, 0, 3]
    logits, ids, is_copied = zip(*run_ranks(3, _logits_of_rank, parts), strict=True)
    alone = PartialFC(8, 11, seed=3)
    embeddings = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    assert [len(one) for one in logits] == parts
    assert torch.allclose(torch.cat(logits), alone.logits(embeddings), atol=1e-5)
    assert torch.equal(torch.cat(ids), alone.predict(embeddings, k=3)[0])
    assert all(is_copied)
