from zerotune.trial_lib.rank.engine_watch import Followers, trains

CANDIDATE = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}


def test_an_engine_trains_where_deepspeed_would_give_it_an_optimizer():
    assert trains(object(), {})
    assert trains(None, {"optimizer": {"type": "AdamW"}})
    assert not trains(None, {"zero_optimization": {"stage": 3}})
    assert not trains(None, {"optimizer": None})


def test_all_engines_that_train_on_the_same_batch_follow_the_candidate():
    followers = Followers()
    generator = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    discriminator = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    assert followers.overrides_for(generator, CANDIDATE) == CANDIDATE
    assert followers.overrides_for(discriminator, CANDIDATE) == CANDIDATE


def test_a_second_engine_with_another_batch_of_its_own_keeps_that():
    followers = Followers()
    followers.overrides_for({"train_micro_batch_size_per_gpu": 4}, CANDIDATE)
    critic = {"train_micro_batch_size_per_gpu": 16}
    assert followers.overrides_for(critic, CANDIDATE) == {"zero_optimization": {"stage": 2}}


def test_one_dictionary_for_two_engines_is_followed_though_the_first_has_changed_it():
    followers = Followers()
    shared = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    followers.overrides_for(shared, CANDIDATE)
    assert followers.overrides_for({**shared, **CANDIDATE}, CANDIDATE) == CANDIDATE
    derived = {**shared, **CANDIDATE, "train_batch_size": 16}
    assert followers.overrides_for(derived, CANDIDATE) == CANDIDATE


def test_the_first_engine_of_a_program_that_is_run_again_follows_whatever_its_batch():
    followers = Followers()
    followers.overrides_for({"train_micro_batch_size_per_gpu": 4}, CANDIDATE)
    followers.start_over()
    assert followers.overrides_for({"train_micro_batch_size_per_gpu": 2}, CANDIDATE) == CANDIDATE
