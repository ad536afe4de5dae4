from zerotune.trial_lib.rank.endings import (
    ENDED,
    FAILED,
    WAITS,
    RankEnd,
    are_uneven,
    too_little_data,
    uneven_note,
    waits_for_ever,
)


def waits(micro_batches, where="train.py:46", steps=3):
    return RankEnd(WAITS, micro_batches, steps, 1, "all_reduce", where)


def test_ranks_that_have_all_ended_are_even_whatever_each_had():
    assert not are_uneven([RankEnd(ENDED, 10), RankEnd(ENDED, 12)])


def test_ranks_are_uneven_where_one_has_ended_or_had_fewer_batches_and_others_go_on():
    assert are_uneven([waits(11), RankEnd(ENDED, 10)])
    assert are_uneven([waits(11), waits(10)])
    assert are_uneven([RankEnd(FAILED, 11), waits(10)])


def test_ranks_that_have_had_as_many_batches_and_wait_are_not_uneven():
    assert not are_uneven([waits(10), waits(10)])


def test_too_little_data_names_the_steps_and_the_batch_that_needs_more():
    said = too_little_data([RankEnd(ENDED, 8, 2, 0)] * 2, 5, (64, 4))
    assert said == (
        "The program ended after 2 optimizer steps, before enough of them were measured. A trial with micro-batch 64 "
        "x accumulation 4 needs 5. Give it more data, or let it train longer."
    )


def test_uneven_ranks_are_named_with_their_batches_and_lines():
    said = too_little_data([waits(4, "train.py:42", 3), waits(3, steps=3)], 5, (8, 1))
    assert "rank 0 had 4 micro-batches and waits in all_reduce at train.py:42" in said
    assert "rank 1 had 3 micro-batches and waits in all_reduce at train.py:46" in said
    assert "All ranks have 3 optimizer steps in common" in said
    assert "rank 0 had 11 micro-batches; rank 1 had 10 micro-batches." in uneven_note([waits(11), waits(10)])


def test_ranks_that_do_the_same_are_named_together():
    said = waits_for_ever([waits(4), waits(4), RankEnd(WAITS, 4, 3, 1, "barrier", "save.py:9")], has_engine=True)
    assert "ranks 0, 1 waits in all_reduce at train.py:46; rank 2 waits in barrier at save.py:9" in said
    assert "skipped" in said


def test_a_rendezvous_to_which_not_all_come_is_told_of_as_such():
    alone = RankEnd(WAITS, waits_in="init_process_group", where="launch.py:7")
    said = waits_for_ever([alone], has_engine=False)
    assert said.startswith("The program waits for ranks that do not exist: rank 0 waits in init_process_group")


def test_uneven_ranks_that_wait_forever_are_told_to_share_the_batches_evenly():
    said = waits_for_ever([waits(4), waits(3)], has_engine=True)
    assert said.endswith(
        "Give every rank equally many batches: make the data divisible by the ranks, or drop the rest."
    )
