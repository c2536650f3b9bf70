"""Which combinations of a test's parameters run where: `TABLE`, and what it rests on.

A quick test takes so many combinations that each value of each parameter is in one of
them (`left_over`), a slow test so many more that any two values meet (`beyond_pairs`).
Where Keras 2 has two kinds of optimizers, a quick test takes one of them, in turn, and
beside Keras 3 only where it is not the newest TensorFlow (conftest.py). In the table:

    smoke           runs with `pytest -m smoke`, too: in a minute, between two edits
    slow-on-newest  takes seconds: slow on the newest TensorFlow, quick on all others
    quick           not so, though its file is
    every           quick tests take all combinations, since many of them are skipped
    one-xla         XLA compiles the graph, which each Keras has: one Keras is enough
    one-keras2      nothing in it asks which Keras 2 it is: beside Keras 3 a quick test
                    takes none, a slow one takes one

A line names a file, and what is said of all of its tests. The lines below it name tests
of it, with parameters in brackets if it is said of these only. `*` is any text.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import defaultdict
from fnmatch import fnmatchcase

TABLE = """
compat/test_programs_of_1.py: slow-on-newest
compat/test_worlds.py:
    test_it_trains_as_the_bare_optimizer: slow-on-newest
gradients/test_arithmetic.py:
    test_a_float16_loss_is_scaled_in_float32: smoke
gradients/test_rows.py: smoke
monitor/test_activations.py: one-keras2
    test_the_first_layer_is_named_with_what_it_was_before: slow-on-newest
monitor/test_bad_batches.py: one-keras2
monitor/test_callback.py: one-keras2
    test_a_scale_stuck_at_its_floor_is_told_of_during_the_search: slow-on-newest
    test_a_tracker_behind_the_monitor*: slow-on-newest
    test_each_fault_is_named_once: slow-on-newest
monitor/test_spikes.py: one-keras2
    test_a_record_tells_which_steps_a_guard_would_skip: slow-on-newest
    test_without_spikes_and_without_a_guard_nothing_is_said: slow-on-newest
monitor/test_statistics.py: one-keras2
monitor/test_underflow.py: slow-on-newest one-keras2
monitor/test_watched.py: one-keras2
    test_gradients_that_are_added_up_in_variables_are_told_of[*-True]: smoke
    test_those_that_are_given_are_watched: slow-on-newest
optimizer/test_aggregation.py:
    test_it_is_called_at_every_step_and_what_it_returns_is_looked_at: slow-on-newest
optimizer/test_between_gradients_and_apply.py: one-keras2
optimizer/test_communication.py: one-keras2
    test_a_loop[*-graph-keras2]: smoke
    test_a_subclass_that_looks_itself_is_given_the_sum: slow-on-newest
    test_fit: slow-on-newest
    test_two_optimizers_share_a_loss_scale: slow-on-newest
optimizer/test_composition.py:
    test_conversion_to_a_legacy_optimizer: every
    test_every_optimizer_of_every_keras: slow-on-newest every
    test_fit_with_a_step_of_its_own_and_a_frozen_layer: slow-on-newest
    test_settings_of_every_optimizer: every
    test_variables_excluded_from_weight_decay: every
optimizer/test_fault_record.py: one-xla one-keras2
    test_each_gradient_at_fault_is_told_and_how[*-graph]: smoke
optimizer/test_fit.py:
    test_converges_under_mixed_float16: slow-on-newest
optimizer/test_foreign_loops.py: one-xla one-keras2
    test_an_inner_optimizer_that_was_built_before: every
    test_gradients_that_are_all_new_values: every
optimizer/test_forwarding.py:
    test_each_method_answers_as_the_bare_optimizers: every
optimizer/test_golden.py:
    test_a_file_of_an_older_lossscale_goes_on: slow-on-newest
optimizer/test_gpu_ready.py: slow-on-newest one-keras2
optimizer/test_impossible.py:
    test_keras3_always_aggregates: every
optimizer/test_keras_arguments.py:
    test_a_name_is_a_name_in_any_order: one-keras2
    test_arguments_of_keras_own_are_taken: one-keras2
    test_it_goes_on_as_if_keras_own_had_gone_on: slow-on-newest
    test_keras_own_wrapper_and_its_config_are_taken: smoke
    test_what_is_no_wrapper_of_keras_is_told: one-keras2
    test_wrong_arguments_are_told_before_anything_exists: one-keras2
optimizer/test_keras_calls.py:
    test_learning_rates_that_are_properties_are_forwarded: every
    test_rows_of_a_wrong_length_are_no_good_step: one-keras2
    test_weights_of_other_optimizers_are_taken: slow-on-newest
optimizer/test_kills_and_damage.py:
    test_a_killed_run*: one-keras2
    test_a_very_long_run: one-xla one-keras2
optimizer/test_kinds.py:
    test_what_is_said_of_a_value_is_so: slow-on-newest
optimizer/test_looking.py: slow-on-newest one-xla one-keras2
    test_the_largest_on_the_last_replica: quick
    test_the_largest_on_the_last_replica[*-eager-*]: smoke
optimizer/test_loops.py: one-xla
    test_what_is_finite_is_applied_though_its_sum_is_not: every
    test_clipping_cannot_hide_an_overflow[*-graph]: smoke
optimizer/test_nonfinite_loss.py: one-xla one-keras2
    test_the_rule_is_told_nothing_and_the_step_is_counted[*-dynamic*-graph]: smoke
optimizer/test_overflows.py: one-xla one-keras2
    test_an_overflow_counts_once[*-graph]: smoke
    test_an_overflow_waits_over_any_number_of_losses: smoke
    test_the_rest_of_a_list_is_of_the_same_step: smoke
optimizer/test_overwriting.py: slow-on-newest one-xla one-keras2
optimizer/test_pending.py: one-xla one-keras2
    test_a_function_returns_them_and_their_norm_is_asked: smoke
    test_each_row_of_the_table: smoke
    test_gradients_of_no_kind_are_unscaled_by_what_multiplied_their_loss: smoke
    test_it_crosses_functions[*-graph]: smoke
    test_mixed_values_are_divided_and_told: smoke
    test_one_adds_up_unscaled_gradients_while_the_other_takes_steps[*-False]: smoke
    test_one_unscales_a_list_of_which_t*: smoke
    test_the_loss_scale_unscales_for_the_one_that_waits: smoke
    test_what_was_given_to_be_unscaled_is_scaled_whatever_is_made_of_it: smoke
optimizer/test_persistence.py:
    test_a_checkpoint[*-before-build]: smoke
    test_a_config_through_json: smoke
    test_a_keras_file_holds_everything: every
    test_a_keras_file_loads_where_only_lossscale_was_imported: one-keras2
optimizer/test_processes.py: one-keras2
optimizer/test_random_programs.py:
    test_none_is_wrong_in_silence: every
optimizer/test_rebased.py:
    test_it_goes_on_from_keras_own: one-keras2
    test_others_are_called_as_they_are: one-keras2
    test_what_cannot_be_is_told_with_the_line_to_change: one-keras2
optimizer/test_reduction.py: smoke
optimizer/test_sharing.py: one-xla one-keras2
    test_in_a_graph_and_session: every
    test_one_adjustment_per_step[*-eager]: smoke
optimizer/test_spike_record.py: slow-on-newest one-xla one-keras2
    test_a_spike_changes_nothing_and_is_named: quick
    test_a_spike_changes_nothing_and_is_named[*-graph]: smoke
    test_a_spike_on_the_last_replica_is_skipped_on_all: quick
optimizer/test_step.py: one-xla one-keras2
    test_a_step_is_applied_if_the_unscaled_gradients_are_finite: smoke
optimizer/test_strategies.py:
    test_strategy_run_without_the_optimizers_aggregation: slow-on-newest every
optimizer/test_two_replicas.py:
    test_clipping_on_one_replica_hides_nothing[*-in one run-*]: smoke
    test_large_gradients_of_a_finite_sum_are_applied: smoke
    test_settings_for_which_keras3_meets_in_a_branch: every
    test_sparse_gradients_on_replicas: slow-on-newest
optimizer/test_zoo_of_expressions.py: slow-on-newest
    test_trains_as_the_bare_optimizer: one-keras2
optimizer/test_zoo_of_layers.py:
    test_trains_as_the_bare_optimizer: slow-on-newest one-xla one-keras2
ranges/test_advice.py: slow-on-newest
    test_what_forward_ranges_says_of_data_that_the_model_casts_helps: every
ranges/test_forward.py:
    test_it_trains_with_the_policies_that_it_gives: slow-on-newest
    test_no_layer_needs_float32_where_nothing_overflows: every
    test_the_layer_that_overflows_needs_float32: every
ranges/test_measuring.py:
    test_autograph_converts_a_layer_as_in_fit: every
ranges/test_model_state.py: slow-on-newest
    test_a_seeded_fit_gives_the_same_weights: every
ranges/test_nonfinite.py:
    test_nothing_is_named_where_nothing_overflows: every
    test_the_layer_that_overflows_is_named: every
runtime/test_mode.py:
    test_a_session_and_xla_in_it_are_seen: slow-on-newest
scales/test_conformance.py:
    test_a_checkpoint_holds_the_whole_state: smoke
    test_a_restored_value_that_is_no_loss_scale_is_replaced: smoke
    test_adjust_is_update_with_the_flag_known: smoke
    test_config_through_json_is_the_constructors_arguments: smoke
    test_every_mode_gives_what_eager_gives[*spike*]: slow-on-newest
    test_its_rule: smoke
    test_the_whole_state_goes_on_where_it_is_compiled: slow-on-newest
scales/test_dynamic.py:
    test_follows_the_rule: smoke
    test_four_families_of_hysteresis: smoke
    test_growth_catches_up_with_a_restored_counter: smoke
scales/test_headroom.py:
    test_a_ceiling_holds_what_gradients_do_not_announce: smoke
    test_every_step_is_the_references: slow-on-newest
    test_zero_gradients_move_nothing: smoke
scales/test_reference.py:
    test_each_argument_as_the_reference: smoke
    test_every_step_of_every_run_is_the_references: slow-on-newest
scales/test_spike_guard.py:
    test_every_step_of_every_run_is_the_references: slow-on-newest
    test_spikes_zeros_overflows_and_a_new_level_as_the_reference: smoke
simulation/test_replay.py:
    test_a_loss_that_is_not_finite_is_an_event_of_its_own: slow-on-newest
    test_it_is_the_objects_own_run*: slow-on-newest
test_fuzzing.py:
    test_an_object_that_stays_finite_or_an_error_that_names: slow-on-newest
test_public_api.py:
    test_names_of_variables_and_of_config_keys: smoke
test_questions.py: one-keras2
    test_a_loss_scale_below_1_trains_what_overflows_at_1: slow-on-newest
    test_a_model_trained_in_float16_becomes_int8: slow-on-newest
    test_a_record_leads_to_the_batch_and_to_its_row: slow-on-newest
    test_a_skipped_step_does_not_move_the_learning_rate: slow-on-newest
    test_float16_goes_on_from_float32_and_back: slow-on-newest
    test_the_norm_of_the_gradients_is_a_metric_and_in_tensorboard: slow-on-newest
test_recipes.py: one-keras2
    test_an_overflow_of_either_loss*: slow-on-newest
    test_an_overflowed_batch_is_repeated_and_counted_once: slow-on-newest
    test_fit_gives_up_a_batch_that_always_overflows: slow-on-newest
test_rooms.py: smoke
"""
#: The runs of test_kills_and_damage.py with LOSSSCALE_SOAK=1 are with each Keras 2.
IS_SOAK = bool(os.environ.get("LOSSSCALE_SOAK"))


@functools.lru_cache(maxsize=None)
def rules():
    """Returns file -> pairs of a pattern of tests, "*" for all, and a set of words."""
    found, file = defaultdict(list), ""
    for line in TABLE.split("\n")[1:-1]:
        name, _, words = line.rpartition(":")
        is_of_all = not name.startswith(" ")
        file = name if is_of_all else file
        found[file].append(("*" if is_of_all else name.strip(), {*words.split()}))
    return found


def words_of(item):
    """Returns what the table says of a test."""
    file, _, test = item.nodeid.partition("::")
    test, _, parameters = test.partition("[")
    words = set()
    for pattern, said in rules().get(file.partition("tests/")[2], ()):
        name, _, wanted = pattern.partition("[")
        if fnmatchcase(test, name) and fnmatchcase(parameters, wanted or "*"):
            words |= said
    without = {"one-keras2"} if IS_SOAK and "_kills_" in file else set()
    return words - without - ({"slow-on-newest"} if "quick" in words else set())


def left_over(items):
    """Returns tests that only combine what other tests of their function have, too.

    The others hold each value of each parameter: of three Kerases in three modes, three
    on a diagonal. Values that are given together, as a table's rows, are one.
    """
    found = []
    for group in _functions(items, {"slow", "every"}):
        needed = _needed(group, set().union(*(values for _, values in group)))
        found.extend(item for item, values in group if values and item not in needed)
    return found


def beyond_pairs(items):
    """Returns slow tests without which any two values still are in one test.

    Only of tests with three parameters or more there are such.
    """
    found = []
    for group in _functions(items, {"every"}):
        pairs = [(item, _pairs(values)) for item, values in group]
        quick = [values for item, values in pairs if not is_slow(item)]
        slow = [each for each in pairs if is_slow(each[0])]
        wanted = set().union(*(values for _, values in slow)).difference(*quick)
        needed = _needed(slow, wanted)
        found.extend(item for item, values in slow if values and item not in needed)
    return found


def is_slow(item):
    return item.get_closest_marker("slow") is not None


def _functions(items, but):
    """Returns the tests of each function with their values, without those of `but`."""
    functions = defaultdict(list)
    for item in items:
        words = words_of(item) | ({"slow"} if is_slow(item) else set())
        if not words & but:
            functions[function_of(item)].append((item, _values(item)))
    return functions.values()


def function_of(item):
    """Returns the name of a test's function, with its file."""
    return item.nodeid.partition("[")[0]


def _needed(group, wanted):
    """Returns few tests of a group that together have all that is wanted."""
    needed, rest = set(), list(group)
    while wanted:
        best = max(rest, key=lambda one: len(wanted & one[1]))
        wanted = wanted - best[1]
        needed.add(best[0])
        rest.remove(best)
    return needed


def _pairs(values):
    """Returns all sets of two values; of fewer, the one of all."""
    return set(map(frozenset, itertools.combinations(values, min(2, len(values)))))


def _values(item):
    parameters = getattr(item, "callspec", None)
    if parameters is None:
        return set()
    together = {name: name for name in parameters.params}
    for marker in item.iter_markers("parametrize"):
        names = marker.kwargs.get("argnames", marker.args[0] if marker.args else ())
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        together.update(dict.fromkeys(names, names[0]))
    values = defaultdict(list)
    for name, value in parameters.params.items():
        values[together[name]].append(id(value))
    return {(name, *ids) for name, ids in values.items()}
