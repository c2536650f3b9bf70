"""What the package uses that TensorFlow, Keras and Python do not publish."""

import re

_TABLE = """
context.context, its op_callbacks and remove_op_callback; op_callbacks.add_op_callback;
    Tensor._id | op_callbacks.py | the state of the step decides; reports cannot say
    where an infinity came from
_gradient_function and imperative_grad, names on Python's stack | derivatives.py |
    reports take a fault on the way back for one of the forward pass
context.get_function_def, function_def_to_graph | graphs.py | the state of the step
    decides
_agg_helper, of Horovod's optimizers | optimizer/wrappers.py | backward_passes_per_step
    above 1 is not refused
strategy_supports_no_merge_call | replicas.py | one more merge call
context._seed, context._rng; global_state.get_global_attribute, set_... |
    random_streams.py | a seeded program draws other numbers
outer_graph, is_control_flow_graph, captures | graphs.py, mode.py, provenance/walk.py |
    tensors of outer graphs are unknown
_get_control_flow_context, outer_context, IsXLAContext | graphs.py, mode.py | a slower
    step
CondBranchFuncGraph | graphs.py | one step is counted twice
_flatten_layers, _autocast, _random_generator | keras_versions.py, ranges/ | errors or
    fewer rows in reports
_dtype_policy, _compute_dtype_object, _dtype, _functional, _seed | ranges/ | errors in
    reports
_keras_mask, _compute_output_and_mask_jointly | keras_versions.py | masks are lost
_trackable_children, _list_extra_dependencies_for_serialization | saved_models.py | a
    training step cannot be exported
_track_trackable, _lookup_dependency | optimizer/, compat/, scales/ | other names; one
    warning is missing; what a checkpoint of 3.0.0 lacks keeps its value
_coalesced_children | optimizer/keras2.py | checkpoints keep a replaced loss scale
_flatten of a tf.Module | optimizer/files.py | names in Keras's files
_noinline, an attribute of functions | runtime/control.py | a slower tiny step
_self_unconditional_deferred_dependencies | simulation/ | a larger copy
_transform_unaggregated_gradients, _aggregate_gradients, _all_reduce_sum_gradients |
    optimizer/keras2.py, optimizer/keras3.py | no sums in float16
_raise_if_strategy_unsupported, _create_all_weights, track_variable,
    _is_wrapped_by_loss_scale_optimizer, _built | optimizer/keras2.py,
    optimizer/dialect.py | later errors
_trainable_variables, _variables, Variable._initialize, _value | optimizer/keras3.py,
    runtime/float16_weights.py, runtime/keras_versions.py | Keras's error
_steps_per_execution | monitor/ | the monitor names a batch of several that run at once
_num_good_steps, _current_loss_scale | scales/ | loss scales start afresh
"""
#: The names, where they are used (below runtime/ if no package is named), and what
#: happens without them.
PRIVATE_NAMES = [
    row.split(" | ") for row in re.sub(r"\n {4}", " ", _TABLE).strip().splitlines()
]
