"""Row optimizers against torch.optim on the same rows, and the promise that other rows stay as they are."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from megaclass import PartialFC, RowAdagrad, RowAdamW, RowSGD
from megaclass.errors import HeadError
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.head.sampling import sample_classes

NUM_ROWS, WIDTH = 6, 4


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _rows_of_step(step: int) -> Tensor:
    """A different handful of rows each step, as sampling gives them; row 0 in every step, row 5 in few."""
    return torch.tensor([[0, 1, 2, 3, 4, 5], [0, 2], [0, 1, 4], [0, 3, 4], [0, 1, 2, 5], [0]][step])


def _train_rows(optimizer: RowOptimizer, lr: float | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Six steps that hand over some rows and their state, and write them back."""
    weight_RD = _random(NUM_ROWS, WIDTH, seed=0)
    state = optimizer.new_state(weight_RD)
    for step in range(6):
        rows = _rows_of_step(step)
        part, part_state = weight_RD[rows], {name: tensor[rows] for name, tensor in state.items()}
        optimizer.update_(part, part_state, _random(NUM_ROWS, WIDTH, seed=step + 1)[rows], lr)
        weight_RD[rows] = part
        for name, tensor in state.items():
            tensor[rows] = part_state[name]
    return weight_RD, state


def _train_with_torch(optimizer_class: type[torch.optim.Optimizer], **settings: float | bool) -> Tensor:
    """The same steps with one parameter a row; torch leaves parameters without a gradient alone."""
    rows = [row.clone().requires_grad_() for row in _random(NUM_ROWS, WIDTH, seed=0)]
    optimizer = optimizer_class(rows, lr=0.1, **settings)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        grad_RD = _random(NUM_ROWS, WIDTH, seed=step + 1)
        for row in _rows_of_step(step).tolist():
            rows[row].grad = grad_RD[row]
        optimizer.step()
    return torch.stack(rows).detach()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["lr a number", "lr a tensor"])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.0, "weight_decay": 0.05},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
    ],
    ids=["plain", "decay", "momentum", "momentum and decay", "nesterov"],
)
def test_row_sgd_is_torch_s_sgd_with_each_row_a_parameter(settings, lr):
    weight_RD, _ = _train_rows(RowSGD(**settings), lr)
    torch.testing.assert_close(weight_RD, _train_with_torch(torch.optim.SGD, **settings), rtol=0, atol=1e-13)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["lr a number", "lr a tensor"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_row_adamw_is_torch_s_adamw_with_each_row_a_parameter(weight_decay, lr):
    weight_RD, state = _train_rows(RowAdamW(weight_decay=weight_decay, beta1=0.8, beta2=0.95), lr)
    truth = _train_with_torch(torch.optim.AdamW, weight_decay=weight_decay, betas=(0.8, 0.95))
    torch.testing.assert_close(weight_RD, truth, rtol=0, atol=1e-13)
    assert state["count"].tolist() == [6, 3, 3, 2, 3, 2], "steps each row took part in"


def test_the_first_step_of_adamw_moves_every_element_by_the_learning_rate():
    # Bias-corrected, mean / sqrt(square) = g / |g|: the sign of the gradient, whatever its size.
    weight_RD = torch.zeros(1, 3, dtype=torch.float64)
    optimizer = RowAdamW(weight_decay=0.0)
    grad_RD = torch.tensor([[5.0, -0.001, 300.0]], dtype=torch.float64)
    optimizer.update_(weight_RD, optimizer.new_state(weight_RD), grad_RD, 0.1)
    torch.testing.assert_close(weight_RD, torch.tensor([[-0.1, 0.1, -0.1]]).double(), rtol=0, atol=2e-6)


def test_row_adagrad_divides_by_the_root_of_the_summed_mean_squares_of_the_row():
    weight_RD = torch.zeros(1, 2, dtype=torch.float64)
    optimizer = RowAdagrad(eps=0.0)
    state = optimizer.new_state(weight_RD)
    # (1 + 49) / 2 = 25, root 5: 0.5 * (1, 7) / 5 = (0.1, 0.7)
    optimizer.update_(weight_RD, state, torch.tensor([[1.0, 7.0]]).double(), 0.5)
    torch.testing.assert_close(weight_RD, torch.tensor([[-0.1, -0.7]]).double(), rtol=0, atol=1e-7)
    # 25 + 144 = 169, root 13: another 0.5 * (12, 12) / 13
    optimizer.update_(weight_RD, state, torch.tensor([[12.0, 12.0]]).double(), 0.5)
    assert state["square"].tolist() == [169.0]
    hand = torch.tensor([[-0.1 - 6 / 13, -0.7 - 6 / 13]], dtype=torch.float64)
    torch.testing.assert_close(weight_RD, hand, rtol=0, atol=1e-14)


def test_row_adagrad_adds_decay_to_the_gradient():
    weight_RD = torch.tensor([[10.0, 10.0]], dtype=torch.float64)
    optimizer = RowAdagrad(weight_decay=0.1, eps=0.0)
    # Gradient (3, 3) + 0.1 * (10, 10) = (4, 4); root of the mean square 4: a step of lr.
    optimizer.update_(weight_RD, optimizer.new_state(weight_RD), torch.tensor([[3.0, 3.0]]).double(), 0.5)
    assert weight_RD.tolist() == [[9.5, 9.5]]


def test_row_adagrad_keeps_one_number_a_row():
    state = RowAdagrad().new_state(torch.zeros(7, 512))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} == {
        "square": ((7,), torch.float32)
    }


def test_sgd_without_momentum_keeps_no_state():
    assert RowSGD(momentum=0.0).new_state(torch.zeros(7, 512)) == {}


# ---- clipping -------------------------------------------------------------------------------------------------------


def test_clip_value_holds_every_element():
    grad_RD = RowSGD(clip_value=1.0).clip_(torch.tensor([[3.0, -4.0], [0.3, -0.4]]))
    assert grad_RD.tolist() == torch.tensor([[1.0, -1.0], [0.3, -0.4]]).tolist()


def test_clip_row_norm_shortens_long_rows_and_leaves_short_and_empty_ones():
    rows = torch.tensor([[3.0, -4.0], [0.3, -0.4], [0.0, 0.0]], dtype=torch.float64)
    clipped = RowSGD(clip_row_norm=1.0).clip_(rows.clone())
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, -0.8]).double(), rtol=0, atol=1e-7)
    assert torch.equal(clipped[1:], rows[1:])


def test_elements_are_clipped_before_rows():
    # (30, 4) -> (4, 4) -> length 1
    clipped = RowSGD(clip_value=4.0, clip_row_norm=1.0).clip_(torch.tensor([[30.0, 4.0]], dtype=torch.float64))
    torch.testing.assert_close(clipped, torch.full((1, 2), math.sqrt(0.5)).double(), rtol=0, atol=1e-7)


def test_clipping_acts_on_the_gradient_of_the_centres_before_decay_and_momentum():
    head = PartialFC(8, 20, optimizer=RowSGD(momentum=0.0, clip_row_norm=1e-3), storage="float64")
    before = head.rows()["weight"].clone()
    head(_random(5, 8, seed=1), torch.arange(5)).backward()
    head.step(lr=2.0)
    lengths_R = (head.rows()["weight"] - before).norm(dim=1)
    assert lengths_R.max().item() == pytest.approx(2e-3, rel=1e-9)
    assert (lengths_R[:5] > 1.9e-3).all(), "the images' own classes have long gradients"


# ---- rows that do not take part -------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": RowSGD(momentum=0.9, weight_decay=0.01),
    "Nesterov": RowSGD(momentum=0.9, weight_decay=0.01, nesterov=True),
    "AdamW": RowAdamW(),
    "Adagrad": RowAdagrad(weight_decay=0.01),
}


def _bits(rows: dict[str, Tensor], is_wanted_R: Tensor) -> dict[str, bytes]:
    return {name: tensor[is_wanted_R].contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in rows.items()}


@pytest.mark.parametrize("storage", ["float32", "float64", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_rows_that_were_not_sampled_stay_to_the_bit(optimizer, storage):
    num_classes, num_images, seed = 200, 6, 3
    head = PartialFC(8, num_classes, sample_rate=0.2, optimizer=optimizer, seed=seed, storage=storage)
    # From the second step on some of the rows left out have momentum, which must not move them.
    for step in range(4):
        labels_B = torch.arange(num_images) * 7 + step
        drawn_S = sample_classes(labels_B, 0, num_classes, 0.2, seed, step).classes_S
        is_left_out_R = torch.ones(num_classes, dtype=torch.bool).index_fill_(0, drawn_S, False)
        old = {name: tensor.clone() for name, tensor in head.rows().items()}
        head(_random(num_images, 8, seed=step).float(), labels_B).backward()
        head.step(lr=0.1)
        assert _bits(head.rows(), is_left_out_R) == _bits(old, is_left_out_R)
        moved_S = (head.rows()["weight"] != old["weight"]).any(1)[drawn_S]
        # bfloat16 may round a small move away; otherwise every row that took part has moved.
        assert moved_S.double().mean() > 0.5 if storage == "bf16" else moved_S.all()
        assert 0.1 * num_classes < len(drawn_S) < 0.4 * num_classes


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_sub_centres_that_are_closest_to_no_image_stay_to_the_bit(optimizer):
    head = PartialFC(8, 30, num_subcentres=4, optimizer=optimizer, storage="float64")
    embeddings_BD = _random(3, 8, seed=0)
    old = {name: tensor.clone() for name, tensor in head.rows().items()}
    cosines_BCM = (normalize(embeddings_BD) @ normalize(old["weight"]).T).unflatten(1, (30, 4))
    won_R = one_hot(cosines_BCM.argmax(2), 4).any(0).flatten()
    head(embeddings_BD, torch.tensor([3, 4, 4])).backward()
    head.step(lr=0.1)
    assert _bits(head.rows(), ~won_R) == _bits(old, ~won_R)
    assert (head.rows()["weight"] != old["weight"])[won_R].any(1).all()


# ---- bad values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "settings", "text"),
    [
        (RowSGD, {"momentum": 1.0}, r"RowSGD.momentum is 1.0; it must lie in \[0, 1\)"),
        (RowSGD, {"momentum": -0.1}, r"RowSGD.momentum is -0.1"),
        (RowSGD, {"momentum": 0.0, "nesterov": True}, "RowSGD.nesterov is True, but momentum is 0"),
        (RowSGD, {"weight_decay": -1e-4}, "RowSGD.weight_decay is -0.0001; it must be 0 or more"),
        (RowSGD, {"weight_decay": math.nan}, "RowSGD.weight_decay is nan"),
        (RowAdamW, {"beta1": 1.0}, r"RowAdamW.beta1 is 1.0; it must lie in \[0, 1\)"),
        (RowAdamW, {"beta2": 1.5}, r"RowAdamW.beta2 is 1.5; it must lie in \[0, 1\)"),
        (RowAdamW, {"eps": -1e-8}, "RowAdamW.eps is -1e-08; it must be 0 or more"),
        (RowAdagrad, {"eps": -1.0}, "RowAdagrad.eps is -1.0; it must be 0 or more"),
        (RowAdagrad, {"clip_value": -1.0}, "RowAdagrad.clip_value is -1.0; it must be 0 or more"),
        (RowAdamW, {"clip_row_norm": -2.0}, "RowAdamW.clip_row_norm is -2.0; it must be 0 or more"),
    ],
)
def test_a_bad_value_is_named(optimizer, settings, text):
    with pytest.raises(HeadError, match=text):
        optimizer(**settings)
