"""Rates that change from round to round, and images that are moved: chosen, they do what they say; else nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines._federations import make_federation, make_model

from fedup import LocalTraining, federate, fingerprint
from fedup.errors import SettingError
from fedup.tasks.recipe import Recipe
from fedup.training.augment import augmented

few = settings(max_examples=40, deadline=None)


@few
@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from(["constant", "cosine"]))
def test_rates_rise_over_the_warm_up_then_never_rise_again_and_are_full_after_the_schedule(rounds, warmup, schedule):
    warmup = min(warmup, rounds)
    local = LocalTraining(lr=0.2, schedule=schedule, warmup_rounds=warmup, schedule_rounds=rounds)
    rates = [local.in_round(number).lr for number in range(rounds)]
    assert all(0 < rate <= 0.2 for rate in rates) and local.in_round(rounds).lr == 0.2
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert (len(set(rates)) > 1) <= local.is_scheduled


def test_a_scheduled_training_is_round_after_round_with_its_own_rate():
    federation, start = make_federation((64, 33)), make_model("layernorm")
    local = LocalTraining(batch_size=16, schedule="cosine", warmup_rounds=2, schedule_rounds=4)
    by_hand = start
    for number in range(4):
        rate = local.in_round(number).lr
        by_hand = federate(by_hand, federation, rounds=[number], local=LocalTraining(batch_size=16, lr=rate)).model
    assert fingerprint(federate(start, federation, rounds=4, local=local).model) == fingerprint(by_hand)
    plain = federate(start, federation, rounds=4, local=LocalTraining(batch_size=16)).model
    assert fingerprint(plain) != fingerprint(by_hand)


def test_settings_that_are_not_chosen_leave_names_and_bits_as_they_were():
    recipe = Recipe.suited_to("digits", rounds=3)
    assert not {"schedule", "warmup_rounds", "augment"} & recipe.settings().keys()
    assert list(recipe.local.settings()) == ["epochs", "batch_size", "lr", "momentum", "weight_decay", "optimizer"]
    chosen = Recipe.suited_to("digits", rounds=3, schedule="cosine", augment="flip_crop")
    assert chosen.local.schedule_rounds == 3 and chosen.local.in_round(2).lr < chosen.lr
    assert Recipe.from_about({**chosen.settings(), "schedule": "cosine"}) == chosen


def test_augmented_images_are_the_images_mirrored_or_moved_and_drawn_anew_with_each_batch():
    images = torch.arange(1.0, 1 + 6 * 2 * 9 * 9).view(6, 2, 9, 9)
    torch.manual_seed(3)
    first, second = augmented(images), augmented(images)
    torch.manual_seed(3)
    assert torch.equal(augmented(images), first) and not torch.equal(first, second)
    kinds = set()
    for image, found in zip(images.repeat(9, 1, 1, 1), torch.cat([augmented(images) for _ in range(9)]), strict=True):
        wide = [torch.nn.functional.pad(one, (4,) * 4) for one in (image, image.flip(2))]
        matches = [
            (side, top, left)
            for side in (0, 1)
            for top in range(9)
            for left in range(9)
            if torch.equal(wide[side][:, top : top + 9, left : left + 9], found)
        ]
        assert len(matches) == 1
        kinds.add(matches[0])
    assert len({side for side, _, _ in kinds}) == 2 and len(kinds) > 25
    with pytest.raises(SettingError, match="images"):
        augmented(torch.zeros(3, 128, dtype=torch.long))


def test_augmentation_changes_a_training_and_its_seed_repeats_it():
    federation, start = make_federation((40, 30), images=True), make_model("convolution")
    plain, moved = LocalTraining(batch_size=16), LocalTraining(batch_size=16, augment="flip_crop")
    prints = [fingerprint(federate(start, federation, rounds=2, local=how).model) for how in (plain, moved, moved)]
    assert prints[0] != prints[1] == prints[2]
