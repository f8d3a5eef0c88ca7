"""A block of live objects, in pieces of any size: what arrives is what was sent, in place where it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE  # noqa: E402
from elasticjob.training.replicated.live.live_block import LiveBlock, Place, Receive, receive_into  # noqa: E402
from elasticjob.training.snapshot_values.state_tree import PackedTree  # noqa: E402
from elasticjob.training.state_parts import state_of  # noqa: E402

VALUES = {
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(100, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
    "transposed": torch.arange(300, dtype=torch.int16).view(20, 15).T,
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "nested": [{"a": (torch.arange(3), "text")}, None, 7],
}


def module(value: float, *, bias: bool = True) -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(31, 17, bias=bias), torch.nn.BatchNorm1d(17))
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(value)
    return made


def sent(objects: dict[str, Any], size: int) -> tuple[Any, list[Any]]:
    packed = PackedTree({name: state_of(part) for name, part in objects.items()}, VALUES)
    block = LiveBlock((3, 7), json.dumps({"tree": packed.json}).encode(), packed)
    assert (block.header.sequence, block.header.step) == (3, 7)
    pieces = [piece.clone() for piece in block.pieces(size)]
    assert sum(map(len, pieces)) == block.header.size - HEADER_SIZE
    begins = range(HEADER_SIZE, block.header.size, size)
    return block.header, list(zip(begins, pieces, strict=True))


def arriving(pieces: list[Any]) -> Receive:
    """Return a `Receive` of these pieces: as in a transfer, one is on its way while the one before it is used."""

    def receive(place: Place) -> Iterator[tuple[int, Any]]:
        under_way: list[tuple[int, Any]] = []
        for begin, piece in pieces:
            found = place(begin, len(piece), torch.device("cpu"))
            under_way.append((begin, piece.clone() if found is None else found.copy_(piece)))
            if len(under_way) == 2:
                yield under_way.pop(0)
        yield from under_way

    return receive


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 1 << 20])
def test_what_arrives_is_what_was_sent(size: int) -> None:
    header, pieces = sent({"model": module(2.0)}, size)
    content, tree = receive_into({"model": module(0.0)}, header, arriving(pieces), lambda: None)
    assert set(content) == {"tree"}
    assert torch.equal(tree["objects"]["model"]["0.weight"], torch.full((17, 31), 2.0))
    values = tree["values"]
    for name in ("empty", "scalar", "flags", "half", "complex", "transposed", "conjugated"):
        assert values[name].dtype == VALUES[name].dtype
        assert torch.equal(values[name], VALUES[name]), name
    assert values["nested"][1:] == [None, 7]
    assert torch.equal(values["nested"][0]["a"][0], torch.arange(3))


def test_parameters_and_buffers_are_received_in_place() -> None:
    target = module(0.0)
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    header, pieces = sent({"model": module(2.0)}, 100)
    _, tree = receive_into({"model": target}, header, arriving(pieces), lambda: None)
    assert {name: tensor.data_ptr() for name, tensor in tree["objects"]["model"].items()} == places
    assert all(bool((tensor == 2).all()) for tensor in target.state_dict().values())


def test_pieces_inside_a_tensor_are_not_copied() -> None:
    """Neither where they are sent, nor where they are received, unless the tensor is on another device."""
    source, target, size = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100), 1000

    def is_part(piece: Any, module_: Any) -> bool:
        first = module_.weight.data_ptr()
        return bool(first <= piece.data_ptr() and piece.data_ptr() + len(piece) <= first + 40_000)

    packed = PackedTree({"model": state_of(source)}, {})
    block = LiveBlock((3, 7), json.dumps({"tree": packed.json}).encode(), packed)
    assert sum(is_part(piece, source) for piece in block.pieces(size)) >= 38
    assert not any(is_part(piece, source) for piece in block.pieces(size, torch.device("cuda")))
    assert not any(is_part(piece, source) for piece in block.pieces(size, torch.device("cpu", 1)))
    header, pieces = sent({"model": source}, size)
    received = []

    def receive(place: Place) -> Iterator[tuple[int, Any]]:
        for begin, piece in arriving(pieces)(place):
            received.append(piece)
            yield begin, piece

    receive_into({"model": target}, header, receive, lambda: None)
    assert sum(is_part(piece, target) for piece in received) >= 37, "the first may come before its place is known"
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


def test_a_model_of_another_type_or_shape_keeps_its_content_until_it_is_loaded() -> None:
    """It is then refused, or converted, by `load_state_dict`."""
    other = module(0.0, bias=False).double()
    header, pieces = sent({"model": module(2.0)}, 100)
    _, tree = receive_into({"model": other, "new": module(1.0)}, header, arriving(pieces), lambda: None)
    assert bool((other[0].weight == 0).all())
    assert "0.bias" in tree["objects"]["model"]
    assert "new" not in tree["objects"]
