"""The model: shapes, padding invariance, and transferred weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import masks

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra.model import Architecture, Classifier, keys_per_query, layout_of, load_fitting, lookup, pool
from benchmarks.lra.tasks import TASKS, Sizes, Task
from blocksparse_flash import BlockLayout

TINY = Architecture(embed_dim=16, num_heads=2, n_layers=2, hidden_dim=16, mask="butterfly", block_size=16)
WORDS = Task("words", 20, 3, 64, Sizes(1, 1, 1))
PAIRS = dataclasses.replace(WORDS, n_documents=2)
PICTURE = Task("picture", 20, 2, 64, Sizes(1, 1, 1), grid=(8, 8))


def model(task: Task, **changes: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(task, dataclasses.replace(TINY, **changes))


def tokens(task: Task, batch: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 20, (batch, task.n_documents, 64), generator=generator).short()


@pytest.mark.parametrize("task", [WORDS, PAIRS], ids=["one", "two"])
@pytest.mark.parametrize("pooling", ["mean", "max", "mean+max", "cls", "first"])
@pytest.mark.parametrize("positions", ["rope", "alibi", "rope+alibi", "learned", "none"])
def test_padding_is_not_seen(task: Task, pooling: str, positions: str) -> None:
    classifier = model(task, pooling=pooling, positions=positions)
    x = tokens(task)
    lengths = torch.full((3, task.n_documents), 40, dtype=torch.int32)
    filled = x.clone()
    filled[:, :, 40:] = 7
    logits = classifier(filled, lengths)
    torch.testing.assert_close(logits, classifier(x, lengths))
    # nor is it missed
    torch.testing.assert_close(logits, classifier(x[:, :, :48], lengths), atol=1e-5, rtol=1e-5)
    assert logits.shape == (3, 3)


def test_documents_are_compared_in_four_ways() -> None:
    classifier = model(PAIRS, pooling="mean")
    x, lengths = tokens(PAIRS), torch.full((3, 2), 64, dtype=torch.int32)
    one, other = (pool(classifier.encode(x[:, i], lengths[:, i]), lengths[:, i], "mean") for i in range(2))
    expected = classifier.head(torch.cat([one, other, one * other, one - other], dim=1))
    torch.testing.assert_close(classifier(x, lengths), expected)


def test_pooling_takes_real_tokens() -> None:
    x = torch.tensor([[[1.0], [5.0], [9.0], [100.0]]])
    lengths = torch.tensor([3])
    expected = {"mean": [[5.0]], "max": [[9.0]], "mean+max": [[5.0, 9.0]], "first": [[1.0]], "padded mean": [[3.75]]}
    assert {name: pool(x, lengths, name).tolist() for name in expected} == expected


def test_the_mask_is_the_one_that_is_named() -> None:
    layout = model(PICTURE).encoder.blocks[0].attention.layout
    assert layout == masks.butterfly(64, block_size=16)
    of_length = model(WORDS).encoder.blocks[0].attention.layout
    assert of_length(48) == masks.butterfly(48, block_size=16)
    assert of_length(48) is of_length(48)
    with pytest.raises(ValueError, match="butterflu"):
        model(PICTURE, mask="butterflu")


def test_rotary_positions_of_an_image_are_its_pixels() -> None:
    classifier = model(PICTURE, rope_base=50.0)
    assert classifier.cos is not None
    assert classifier.sin is not None
    # pairs 0, 1 of 4 turn by the row, 2, 3 by the column
    angles = torch.tensor([2.0, 2.0 / 50.0**0.5, 3.0, 3.0 / 50.0**0.5])
    torch.testing.assert_close(classifier.cos[19], angles.cos())
    torch.testing.assert_close(classifier.sin[19], angles.sin())


def test_scaled_positions_are_those_of_larger_strokes() -> None:
    plain, halved = model(PICTURE), model(PICTURE, rope_scale=0.5)
    assert plain.cos is not None
    assert halved.cos is not None
    # the pixel at (2, 4) is where (1, 2) was
    torch.testing.assert_close(halved.cos[2 * 8 + 4], plain.cos[8 + 2])
    assert not torch.allclose(halved.cos[1], plain.cos[1])


@pytest.mark.parametrize("task", [WORDS, PICTURE], ids=["words", "picture"])
@pytest.mark.parametrize("positions", ["rope", "alibi", "rope+alibi", "learned", "none"])
def test_positions_tell_apart_what_differs_in_order_alone(task: Task, positions: str) -> None:
    """Only "none" cannot, and "alibi", which sees distances alone, cannot tell a document from its reverse."""
    classifier = model(task, mask=None, pooling="mean", positions=positions)
    assert classifier.encoder.blocks[0].attention.alibi == ("alibi" in positions)
    x, lengths = tokens(task), torch.full((3, 1), 64, dtype=torch.int32)
    swapped = x.clone()
    swapped[..., [3, 40]] = x[..., [40, 3]]
    logits = classifier(x, lengths)
    for other, is_same in ((swapped, positions == "none"), (x.flip(-1), positions in ("none", "alibi"))):
        assert torch.allclose(logits, classifier(other, lengths), atol=1e-5) is is_same


def test_slopes_replace_those_of_alibi() -> None:
    slopes = tuple(2.0**-head for head in range(model(WORDS).encoder.blocks[0].attention.num_heads))
    classifier = model(WORDS, positions="rope+alibi", slopes=slopes)
    assert all(block.attention.alibi_slopes.tolist() == [*slopes] for block in classifier.encoder.blocks)
    with pytest.raises(ValueError, match="slopes must be None with positions 'rope', got"):
        model(WORDS, positions="rope", slopes=slopes)


def test_the_order_of_pixels_changes_nothing_but_what_the_mask_keeps() -> None:
    """Dense attention with positions that go along does not see an order."""
    x, lengths = tokens(PICTURE), torch.full((3, 1), 64, dtype=torch.int32)
    raster, morton = model(PICTURE, mask=None), model(PICTURE, mask=None, order="morton")
    torch.testing.assert_close(raster(x, lengths), morton(x, lengths), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(PICTURE)(x, lengths), model(PICTURE, order="morton")(x, lengths), atol=1e-4)
    with pytest.raises(ValueError, match="order must be raster"):
        model(WORDS, order="morton")


@pytest.mark.parametrize("order", ["raster", "morton"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_hidden_tokens_are_hidden_and_asked_for(order: str, pooling: str) -> None:
    classifier = model(PICTURE, order=order, pooling=pooling)
    x, lengths = tokens(PICTURE), torch.full((3, 1), 64, dtype=torch.int32)
    is_hidden = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    guesses, truth = classifier.guess_hidden(x, lengths, is_hidden)
    assert guesses.shape == (int(is_hidden.sum()), 20)
    # what is hidden does not matter
    others, _ = classifier.guess_hidden(torch.where(is_hidden, 3, x), lengths, is_hidden)
    torch.testing.assert_close(guesses, others)
    # guesses and truth are in one order: of the pixels of one image, in the model's
    places = torch.arange(64) if classifier.order is None else classifier.order
    assert truth[: int(is_hidden[0].sum())].tolist() == [int(x[0, 0, p]) for p in places if is_hidden[0, 0, p]]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_weights_go_to_a_larger_image(pooling: str) -> None:
    larger = dataclasses.replace(PICTURE, length=256, grid=(16, 16))
    small, large = (model(task, pooling=pooling) for task in (PICTURE, larger))
    torch.nn.init.zeros_(large.head[0].weight)
    assert load_fitting(large, small.state_dict()) == []
    assert torch.equal(large.head[0].weight, small.head[0].weight)


def test_another_head_starts_afresh_and_is_named() -> None:
    other = dataclasses.replace(WORDS, n_classes=7)
    first, second = model(WORDS), model(other)
    assert load_fitting(second, first.state_dict()) == ["head.2.bias", "head.2.weight"]


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder\..* has shape"):
        load_fitting(model(WORDS, hidden_dim=32), model(WORDS).state_dict())
    longer = dataclasses.replace(WORDS, length=128)
    with pytest.raises(ValueError, match=r"positions\.weight has shape \(64, 16\), but \(128, 16\) is needed"):
        load_fitting(model(longer, positions="learned"), model(WORDS, positions="learned").state_dict())


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_model(name: str) -> None:
    with torch.device("meta"):
        classifier = Classifier(TASKS[name], Architecture(embed_dim=16, n_layers=1, hidden_dim=16))
    assert classifier.head[-1].out_features == TASKS[name].n_classes


def test_repeated_layers_are_the_same_layers() -> None:
    """Twice through two layers is what four layers with those weights do."""
    task = TASKS["listops-small"]
    once, twice = (
        Classifier(task, Architecture(embed_dim=16, num_heads=1, n_layers=n_layers, repeats=repeats))
        for n_layers, repeats in ((4, 1), (2, 2))
    )
    once.load_state_dict(twice.state_dict())
    tokens, lengths = torch.randint(1, 16, (2, 1, 32)), torch.tensor([[32], [20]])
    assert torch.equal(once(tokens, lengths), twice(tokens, lengths))
    sizes = [sum(weight.numel() for weight in model.encoder.parameters()) for model in (once, twice)]
    assert sizes[0] > 1.9 * sizes[1]


def test_neighboring_grays_begin_alike() -> None:
    torch.manual_seed(0)
    architecture = Architecture(embed_dim=64, num_heads=1, n_layers=1, first_tokens="smooth")
    grays = Classifier(TASKS["pathfinder32"], architecture).tokens.weight[:-1]
    near = torch.cosine_similarity(grays[:-1], grays[1:]).min()
    assert near > 0.99
    assert torch.cosine_similarity(grays[0], grays[255], dim=0) < 0.5
    assert grays.std().item() == pytest.approx(1.0, abs=0.1)


def test_gradients_of_tokens_are_those_of_a_lookup() -> None:
    classifier, x = model(WORDS), tokens(WORDS)
    lengths = torch.full((3, 1), 64, dtype=torch.int32)
    weight = classifier.tokens.weight
    looked_up = classifier.tokens(x[:, 0].int())
    x_gradient = torch.randn(looked_up.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(looked_up, weight, x_gradient)
    found = lookup(weight, x[:, 0].int())
    assert torch.equal(found, looked_up)
    torch.testing.assert_close(torch.autograd.grad(found, weight, x_gradient)[0], expected)
    classifier(x, lengths).sum().backward()
    assert weight.grad is not None
    assert not weight.grad[-1].any()
    assert weight.grad[int(x[0, 0, 0])].any()


def test_heads_have_masks_of_their_own_and_keys_are_counted() -> None:
    of_heads = ["butterfly", "local(window=8)"]
    architecture = Architecture(embed_dim=16, num_heads=2, mask=of_heads, block_size=16)
    layout = layout_of(architecture, 64)
    assert isinstance(layout, BlockLayout)
    # 3 of 4 blocks of 16 keys, and 9 to 17 of the keys of partial blocks
    attends = layout.to_dense()[0].sum(dim=-1)
    assert attends[:, 0].tolist() == [48, 9]
    assert keys_per_query(architecture, 64) == attends.double().mean().item()
    assert keys_per_query(dataclasses.replace(architecture, mask=None), 64) == 64
    with pytest.raises(ValueError, match="mask must be one, or one for each of 2 heads, got 3"):
        layout_of(dataclasses.replace(architecture, mask=[*of_heads, "butterfly"]), 64)
