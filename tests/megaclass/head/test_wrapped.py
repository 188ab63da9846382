"""A head inside a module that something else wraps, moves, copies and saves: DDP, FSDP, a user's own broadcast."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megaclass import AdaFace, ArcFace, CurricularFace, PartialFC, RowAdagrad, RowAdamW, RowSGD
from megaclass.errors import HeadError

WIDTH = 16


class Model(nn.Module):
    """A backbone and a head in one module, as Lightning, Accelerate and HF Trainer expect it."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Linear(WIDTH, WIDTH)
        defaults = {"margin": ArcFace(scale=16, margin=0.3), "seed": 3}
        self.head = PartialFC(WIDTH, num_classes, **{**defaults, **options})

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


class BackboneInDDP(nn.Module):
    """The head next to DDP, as the documentation has always shown it: the truth."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.parallel, self.head = DistributedDataParallel(model.backbone), model.head

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.parallel(inputs), labels)
        return loss


def _fully_shard(model: Model) -> nn.Module:
    return fully_shard(model)


def _fsdp(model: Model) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _prototypes(num_classes: int) -> Tensor:
    return torch.randn(num_classes, WIDTH, generator=torch.Generator().manual_seed(7))


def _train(wrap: Callable[[Model], nn.Module], num_classes: int, options: dict[str, Any]) -> dict[str, Any]:
    """60 steps; each rank brings other images. Top-1: prototypes whose own centre is the closest of all."""
    model = Model(num_classes, **options)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    prototypes, losses = _prototypes(num_classes), []
    for _ in range(60):
        labels = torch.randint(num_classes, (24,), generator=generator)
        inputs = prototypes[labels] + 0.05 * torch.randn(24, WIDTH, generator=generator)
        loss = wrapped(inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.head.step(lr=0.05)
        losses.append(loss.item())
    centres = model.head.centres(torch.arange(num_classes))
    is_fsdp = isinstance(wrapped, FullyShardedDataParallel)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(wrapped) if is_fsdp else nullcontext():
        weight = nn.utils.parameters_to_vector(
            [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.backbone.parameters()]
        )
        embeddings = nn.functional.linear(
            prototypes, weight[: WIDTH * WIDTH].view(WIDTH, WIDTH), weight[WIDTH * WIDTH :]
        )
        cosines = nn.functional.normalize(embeddings) @ nn.functional.normalize(centres).T
    top_1 = (cosines.argmax(1) == torch.arange(num_classes)).double().mean().item()
    return {"losses": losses, "weight": weight, "rows": model.head.rows(), "top_1": top_1}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"margin": AdaFace(scale=16), "optimizer": RowAdamW(), "sample_rate": 0.7}],
    ids=["arcface", "adaface, adamw, sampled"],
)
@pytest.mark.parametrize("num_classes", [24, 25], ids=["equal shards", "unequal shards"])
def test_a_head_inside_ddp_trains_as_one_beside_it_bit_for_bit(run_ranks, world_size, num_classes, options):
    beside = run_ranks(world_size, _train, BackboneInDDP, num_classes, options)
    inside = run_ranks(world_size, _train, DistributedDataParallel, num_classes, options)
    for truth, ours in zip(beside, inside, strict=True):
        assert ours["losses"] == truth["losses"]
        assert torch.equal(ours["weight"], truth["weight"])
        assert all(torch.equal(ours["rows"][name], truth["rows"][name]) for name in truth["rows"])
    if not options:
        assert [rank["top_1"] for rank in inside] == [1.0] * world_size


@pytest.mark.parametrize("wrap", [_fully_shard, _fsdp])
def test_fsdp_leaves_the_shards_alone(run_ranks, wrap):
    beside = run_ranks(2, _train, BackboneInDDP, 25, {})
    inside = run_ranks(2, _train, wrap, 25, {})
    for truth, ours in zip(beside, inside, strict=True):
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(truth["losses"]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours["rows"], truth["rows"], rtol=1e-3, atol=1e-4)
        assert ours["top_1"] == 1.0


def test_nothing_of_a_head_is_a_parameter_or_a_buffer():
    head = Model(24, margin=CurricularFace()).head
    assert not list(head.parameters()) and not list(head.buffers()) and not list(head.children())


# ---- something else writes to the shard ------------------------------------------------------------------------------


def _broadcast(head: PartialFC) -> None:
    for tensor in head.rows().values():
        dist.broadcast(tensor, 0)


def _broadcast_data(head: PartialFC) -> None:
    dist.broadcast(head.state_dict()["store.weight_RD"].data, 1)


def _average(head: PartialFC) -> None:
    dist.all_reduce(head.rows()["weight"])


def _noise_on_one_rank(head: PartialFC) -> None:
    if dist.get_rank() == 1:
        head.rows()["weight"].normal_()


def _forward(head: PartialFC) -> Tensor:
    loss: Tensor = head(torch.ones(2, WIDTH, requires_grad=True), torch.tensor([0, 1]))
    return loss


def _overwrite(write: Callable[[PartialFC], None], moment: str) -> list[str]:
    """Messages of the two forwards after it."""
    head = Model(24).head
    _forward(head).backward()
    if moment == "before step":
        write(head)
    head.step(lr=0.1)
    if moment == "after step":
        write(head)
    messages = []
    for _ in range(2):
        with pytest.raises(HeadError) as raised:
            _forward(head)
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("moment", ["before step", "after step"])
@pytest.mark.parametrize(
    ("write", "count", "first"),
    [(_broadcast, 2, 1), (_broadcast_data, 2, 0), (_average, 3, 0), (_noise_on_one_rank, 1, 1)],
)
def test_a_write_by_something_else_is_raised_by_the_next_forward_of_every_rank(run_ranks, write, count, first, moment):
    for messages in run_ranks(3, _overwrite, write, moment):
        for message in messages:
            assert f"centres of {count} rank(s), the first of them rank {first}, were written to" in message
            assert "before step 1" in message
            assert "a broadcast, an average over ranks" in message and "load_rows()" in message


def _write_own(kind: str) -> bool:
    head = Model(24).head
    if kind == "every rank its own":
        head.rows()["weight"].normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
    elif kind == "one rank, accepted":
        if dist.get_rank() == 1:
            head.rows()["weight"].mul_(2)
            head.accept_rows()
    elif kind == "one class, loaded":
        head.load_rows(23, {name: tensor[-1:] * 0 + 1 for name, tensor in head.rows().items()})
    elif kind == "twice the same":
        head.load_state_dict(copy.deepcopy(head.state_dict()))
    for _ in range(2):
        _forward(head).backward()
        head.step(lr=0.1)
    return True


@pytest.mark.parametrize("kind", ["every rank its own", "one rank, accepted", "one class, loaded", "twice the same"])
def test_centres_that_were_written_on_purpose_are_used(run_ranks, kind):
    assert run_ranks(3, _write_own, kind) == [True] * 3


def test_one_rank_may_write_to_its_rows_as_it_likes():
    head = Model(24).head
    head.rows()["weight"].normal_()
    assert _forward(head).isfinite()


def _built_early() -> str:
    group = dist.group.WORLD
    dist.group.WORLD = None  # as before init_process_group
    head = Model(24).head
    dist.group.WORLD = group
    with pytest.raises(HeadError) as raised:
        _forward(head)
    return str(raised.value)


def test_a_head_built_before_the_process_group_says_so(run_ranks):
    messages = run_ranks(2, _built_early)
    assert "built as rank 0 of 1, but this process is now rank 1 of 2" in messages[1]
    assert "configure_model()" in messages[0]


# ---- saving and loading ---------------------------------------------------------------------------------------------


def _refusals() -> list[str]:
    model = DistributedDataParallel(Model(25))
    messages = []
    for save in (model.state_dict, lambda: torch.save(model.module, io.BytesIO()), lambda: pickle.dumps(model.module)):
        with pytest.raises(HeadError) as raised:
            save()
        messages.append(str(raised.value))
    return messages


def test_a_module_s_state_of_one_rank_is_refused_when_it_is_saved(run_ranks):
    first, second = run_ranks(2, _refusals)
    assert "contains this head as 'module.head' holds only the classes [0, 13) of 25" in first[0]
    assert "A pickled head holds only the classes [13, 25) of 25, those of rank 1 of 2" in second[1]
    assert all("module_state='whole'" in message for message in first + second)


def _trained(options: dict[str, Any]) -> Model:
    model = Model(25, **options)
    for _ in range(2):
        _forward(model.head).backward()
        model.head.step(lr=0.1)
    return model


CURRICULAR = {"margin": CurricularFace(scale=16), "optimizer": RowAdamW(), "num_subcentres": 2}


def _saved_whole(storage: str) -> dict[str, Tensor]:
    model = DistributedDataParallel(_trained({**CURRICULAR, "module_state": "whole", "storage": storage}))
    state = model.module.state_dict()
    separately = model.module.head.whole_state_dict()
    assert all(torch.equal(state[f"head.{name}"], tensor) for name, tensor in separately.items())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Tensor] = torch.load(buffer, weights_only=True)
    return loaded


def _load_whole(state: dict[str, Tensor], storage: str) -> tuple[int, float, dict[str, Tensor], float]:
    model = Model(25, **{**CURRICULAR, "seed": 99, "storage": storage, "module_state": "whole"})
    model.load_state_dict(state)
    rows = {name: tensor.clone() for name, tensor in model.head.rows().items()}
    return model.head.step_count, model.head.margin_state["t"].item(), rows, _forward(model.head).item()


@pytest.mark.parametrize("storage", ["float32", "bf16"])
def test_a_whole_state_saved_by_three_ranks_loads_on_any_number(run_ranks, storage):
    states = run_ranks(3, _saved_whole, storage)
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())
    whole = run_ranks(1, _load_whole, states[0], storage)[0]
    assert whole[0] == 2 and whole[1] != 0
    for size in (2, 3):
        ranks = run_ranks(size, _load_whole, states[0], storage)
        for name, tensor in whole[2].items():
            assert torch.equal(torch.cat([rank[2][name] for rank in ranks]), tensor)
        for step_count, t, _, loss in ranks:
            assert (step_count, t) == whole[:2]
            assert loss == pytest.approx(whole[3], rel=1e-5)


def _save_local() -> tuple[dict[str, Tensor], dict[str, Tensor], bytes]:
    model = _trained({"module_state": "local"})
    return model.state_dict(), model.head.state_dict(), pickle.dumps(model)


def _load_local(state: dict[str, Any], head_state: dict[str, Tensor], pickled: bytes) -> bool:
    model, other = Model(25, seed=99), Model(25, seed=99)
    model.load_state_dict(state)
    other.head.load_state_dict(head_state)
    unpickled = pickle.loads(pickled)
    losses = [_forward(m.head).item() for m in (model, other, unpickled)]
    return len(set(losses)) == 1


def _load_own(saved: list[tuple[dict[str, Any], dict[str, Tensor], bytes]]) -> bool:
    return _load_local(*saved[dist.get_rank()])


def _load_first(state: dict[str, Any]) -> str:
    try:
        Model(25).load_state_dict(state, strict=False)
    except HeadError as error:
        return str(error)
    return "loaded"


def test_a_file_per_rank_loads_on_its_own_rank_only(run_ranks):
    saved = run_ranks(2, _save_local)
    assert run_ranks(2, _load_own, saved) == [True, True]
    outcomes = run_ranks(2, _load_first, saved[0][0])
    assert outcomes[0] == "loaded"
    assert "The state holds classes [0, 13) of 25, the part of one rank as state_dict() returns it" in outcomes[1]
    assert "but rank 1 of 2 holds [13, 25) of 25" in outcomes[1]
    # What head.state_dict() returned on one of two ranks is no head on one rank, whichever it was.
    for (_, shard, _), classes in zip(saved, ("[0, 13)", "[13, 25)"), strict=True):
        alone = Model(25).head
        before = alone.rows()["weight"].clone()
        with pytest.raises(HeadError) as raised:
            alone.load_state_dict(shard, strict=False)
        assert f"The state holds classes {classes} of 25, the part of one rank" in str(raised.value)
        assert "rank 0 of 1 holds [0, 25) of 25" in str(raised.value) and "whole_state_dict()" in str(raised.value)
        assert torch.equal(alone.rows()["weight"], before)


def _load_without_header() -> str:
    state = Model(24, module_state="local").state_dict()
    del state["head._extra_state"]
    with pytest.raises(HeadError) as raised:
        Model(24).load_state_dict(state, strict=False)
    return str(raised.value)


def test_centres_that_do_not_say_of_which_classes_they_are_do_not_load_on_several_ranks(run_ranks):
    for message in run_ranks(2, _load_without_header):
        assert "no head._extra_state, which names their classes" in message


def test_a_state_dict_of_an_older_version_loads():
    trained, other = _trained(CURRICULAR), Model(25, **{**CURRICULAR, "seed": 99})
    state = trained.state_dict()
    state["head._extra_state"] = {"step_count": 2, "class_start": 0, "class_stop": 25, "num_classes": 25}
    assert list(state)[2:] == [
        "head.margin_t", "head._extra_state", "head.store.weight_RD", "head.store.state_mean", "head.store.state_square",
        "head.store.state_count",
    ]  # fmt: skip
    other.load_state_dict(state)
    assert other.head.step_count == 2
    assert _forward(other.head).item() == _forward(trained.head).item()


def test_missing_unexpected_and_misshapen_entries_are_named():
    model = Model(25)
    state = model.state_dict()
    state["head.store.state_other"] = state.pop("head.store.state_momentum")
    with pytest.raises(RuntimeError, match=r"Missing key.*head.store.state_momentum") as raised:
        model.load_state_dict(state)
    assert 'Unexpected key(s) in state_dict: "head.store.state_other"' in str(raised.value)
    with pytest.raises(HeadError, match="num_subcentres or bias differ"):
        Model(25, num_subcentres=2).load_state_dict(model.state_dict())


# ---- copies, moves, conversions -------------------------------------------------------------------------------------


def test_a_copy_trains_on_by_itself_to_the_same_values():
    model = _trained(CURRICULAR)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    before = {name: tensor.clone() for name, tensor in model.head.rows().items()}
    for other in copies:
        _forward(other.head).backward()
        other.head.step(lr=0.1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.head.rows().items())
    _forward(model.head).backward()
    model.head.step(lr=0.1)
    for other in copies:
        assert all(torch.equal(other.head.rows()[name], tensor) for name, tensor in model.head.rows().items())
        assert torch.equal(other.head.margin_state["t"], model.head.margin_state["t"])


def _copy_in_group() -> bool:
    group = dist.new_group([0, 1])
    model = Model(24, group=group)
    other = copy.deepcopy(model)
    return other.head.group is group and torch.equal(_forward(model.head), _forward(other.head))


def test_a_copy_belongs_to_the_same_ranks(run_ranks):
    assert run_ranks(2, _copy_in_group) == [True, True]


@pytest.mark.parametrize(("convert", "storage"), [("float", "float32"), ("double", "float64"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("optimizer", [RowSGD(), RowAdamW(), RowAdagrad()], ids=lambda o: type(o).__name__)
def test_a_converted_head_is_one_of_that_storage(convert, storage, optimizer):
    options = {"margin": CurricularFace(scale=16), "optimizer": optimizer}
    head = getattr(_trained(options), convert)().head
    built = Model(25, **options, storage=storage).head
    built.load_rows(0, head.rows())
    built.step_count = head.step_count
    built.margin_state["t"].copy_(head.margin_state["t"])
    assert head.margin_state["t"].dtype == torch.float64
    for name, tensor in built.rows().items():
        assert tensor.dtype == head.rows()[name].dtype
    x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        losses = [each(x.clone().requires_grad_(), torch.arange(6)) for each in (head, built)]
        assert losses[0].dtype == losses[1].dtype == head.store.work_dtype
        for each, loss in zip((head, built), losses, strict=True):
            loss.backward()
            each.step(lr=0.1)
        assert torch.equal(*losses)
    assert all(torch.equal(head.rows()[name], tensor) for name, tensor in built.rows().items())


def test_half_is_refused_with_what_to_do_and_changes_nothing_of_the_head():
    head = Model(24).head
    before = head.rows()["weight"]
    for convert in (head.half, lambda: head.to(torch.float16)):
        with pytest.raises(HeadError) as raised:
            convert()
        assert "cannot become torch.float16" in str(raised.value)
        assert ".bfloat16()" in str(raised.value) and "autocast" in str(raised.value)
    assert head.rows()["weight"] is before
    assert _forward(head).isfinite()


def test_a_head_in_the_middle_of_a_step_is_not_converted():
    head = Model(24).head
    _forward(head).backward()
    with pytest.raises(HeadError, match=r"inside an open step: call step\(\) first"):
        head.double()
    head.float()
    head.step(lr=0.1)


def test_moves_to_where_the_head_is_change_nothing():
    head = Model(24).head
    assert head.to("cpu") is head and head.share_memory() is head
    assert head.rows()["weight"].is_shared()
    assert _forward(head).isfinite()


def test_the_meta_device_is_refused():
    with torch.device("meta"), pytest.raises(HeadError, match="meta device"):
        PartialFC(WIDTH, 24)
