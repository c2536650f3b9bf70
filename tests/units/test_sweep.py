"""Where gradients come from, by exponents of a graph: plain loops, no optimizer."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale
from lossscale.optimizer.provenance.history import History
from lossscale.units.unit import UNKNOWN as NOTHING_KNOWN

SCALED, CHANGED, UNTOUCHED = "scaled", "changed", "untouched"
UNSURE, UNKNOWN = "unsure", "unknown"


def origin(history, grad):
    """What is known of one gradient, and the checks of the unscalings it comes from."""
    (unit,) = history.values.units([grad])
    is_plain = unit.from_variable and unit.is_free and not unit.unscalings
    if unit is NOTHING_KNOWN or unit.is_zero or is_plain:
        return (UNKNOWN,)
    checks = [each.check for each in sorted(unit.unscalings, key=lambda u: u.time)]
    if not unit.is_sure:
        return (UNSURE, *checks)
    if unit.is_free:
        is_returned = history.unscaling_of(grad) is not None
        return (UNTOUCHED if is_returned else CHANGED, *checks)
    assert unit.low == 1.0
    return (SCALED, *checks)


class Loop:
    """What a training loop does, marked as an optimizer would, and what was seen."""

    def __init__(self):
        self.scale = DynamicLossScale(1024.0)
        self.history = History(self.scale)
        self.scale._noted_by = self.history
        self.weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
        self.seen = []

    def factor(self):
        """The loss scale as a tensor, as `loss * optimizer.loss_scale` reads it."""
        return tf.identity(self.scale())

    def loss(self, x=1.0):
        return sum(tf.reduce_sum(x * w**2) for w in self.weights)

    def scaled(self, x=1.0):
        with tf.GradientTape() as tape:
            scaled = self.loss(x) * self.factor()
        return tape.gradient(scaled, self.weights)

    def unscaled(self, grads, check="check"):
        units = self.history.values.units(grads)
        divisor = tf.convert_to_tensor(self.scale.current_loss_scale)
        grads = [each / divisor for each in grads]
        self.history.note_unscaled(grads, check, [], units)
        return grads

    def apply(self, grads):
        """Looks at gradients, and gives them to the program's result."""
        self.seen.append([origin(self.history, grad) for grad in grads])
        return tf.add_n([tf.reduce_sum(each) for each in grads])

    def origins(self):
        """What each `apply` saw: the same of all gradients."""
        for found in self.seen:
            assert len(set(found)) == 1, found
        return [found[0] for found in self.seen]


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture(params=["graph", "xla"])
def run(request):
    """Traces and runs a program. What it returns must be a number: it has run."""

    def run(program, *args):
        step = compiled(program, request.param)
        value = float(step(*(tf.constant(arg) for arg in args)))
        assert isinstance(value, float)
        return value

    return run


def clip(grads):
    return tf.clip_by_global_norm(grads, 1.0)[0]


def zeros(loop):
    return [tf.zeros(w.shape) for w in loop.weights]


def test_scaled_then_applied(loop, run):
    run(lambda: loop.apply(loop.scaled()))
    assert loop.origins() == [(SCALED,)]


def test_unscaled_then_applied(loop, run):
    run(lambda: loop.apply(loop.unscaled(loop.scaled())))
    assert loop.origins() == [(UNTOUCHED, "check")]


def test_unscaled_and_clipped(loop, run):
    run(lambda: loop.apply(clip(loop.unscaled(loop.scaled()))))
    assert loop.origins() == [(CHANGED, "check")]


def accumulated(loop, unscales):
    def program(count):
        total = zeros(loop)
        for i in tf.range(count):
            grads = loop.scaled(tf.cast(i, tf.float32))
            if unscales:
                grads = clip(loop.unscaled(grads))
            total = [a + b for a, b in zip(total, grads)]
        return loop.apply(total)

    return program


@pytest.mark.parametrize("unscales", [True, False])
def test_accumulated_in_a_loop(loop, run, unscales):
    run(accumulated(loop, unscales), 3)
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_accumulated_in_a_while_loop(loop, run, unscales):
    def body(i, total):
        grads = loop.scaled(tf.cast(i, tf.float32))
        grads = loop.unscaled(grads) if unscales else grads
        return i + 1, [a + b for a, b in zip(total, grads)]

    def program():
        _, total = tf.while_loop(lambda i, _: i < 3, body, (0, zeros(loop)))
        return loop.apply(total)

    run(program)
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


def test_what_goes_round_a_loop(loop, run):
    """Each of three values hands what it has to the next: three times round."""

    def program(count):
        a = b = c = tf.zeros([2])
        for _ in tf.range(count):
            c = b * 2.0
            b = a * 2.0
            a = loop.unscaled(loop.scaled())[0]
        return loop.apply([c])

    run(program, 4)
    assert loop.origins() == [(CHANGED, "check")]


def test_what_a_loop_begins_with_stays_what_it_is(loop, run):
    """Twice the same: what becomes of both in the loop differs."""

    def program(count):
        scaled = loop.scaled()
        one = other = scaled[0]
        for _ in tf.range(count):
            one, other = loop.unscaled([one])[0], one * 2.0 + other
        return loop.apply(scaled) + loop.apply([one]) + tf.reduce_sum(other)

    run(program, 2)
    (known, *_), (unsure,) = loop.seen
    assert known == (SCALED,)
    assert unsure == (UNSURE, "check")


@pytest.mark.parametrize("unscales", [True, False])
def test_both_branches(loop, run, unscales):
    def program(flag):
        if flag:
            grads = loop.scaled(1.0)
            if unscales:
                grads = loop.unscaled(grads, "then")
        else:
            grads = loop.scaled(2.0)
            if unscales:
                grads = loop.unscaled(grads, "else")
        return loop.apply(grads)

    run(program, True)
    assert loop.origins() == [(CHANGED, "then", "else") if unscales else (SCALED,)]


def test_a_branch_that_unscales(loop, run):
    """In one branch unscaled, in the other not: each applies in its branch."""

    def program(flag):
        grads = loop.scaled()
        value = 0.0
        if flag:
            value += loop.apply(clip(loop.unscaled(grads)))
        else:
            value += loop.apply(grads)
        return value

    run(program, False)
    assert loop.origins() == [(CHANGED, "check"), (SCALED,)]


def test_unscaled_in_a_branch_and_applied_after(loop, run):
    def program(flag):
        grads = loop.scaled()
        grads = tf.cond(flag, lambda: loop.unscaled(grads), lambda: zeros(loop))
        first = loop.apply(grads)
        return first + tf.cond(flag, lambda: loop.apply(grads), lambda: 0.0)

    run(program, True)
    assert loop.origins() == [(CHANGED, "check")] * 2


def test_a_branch_that_leaves_them_scaled(loop, run):
    """Which of the two ran is not known when the function is traced."""

    def program(flag):
        grads = loop.scaled()
        return loop.apply(tf.cond(flag, lambda: loop.unscaled(grads), lambda: grads))

    run(program, True)
    assert loop.origins() == [(UNSURE, "check")]


def in_two_ways(loop):
    """Functions that scale a loss, and whose gradients need different values."""

    def other():
        return tf.sqrt(loop.loss()) * loop.factor() * tf.tanh(loop.loss())

    return lambda: loop.loss() * loop.factor(), other


@pytest.mark.parametrize("calls", [False, True])
def test_each_side_of_a_branch_scales_in_its_own_way(loop, run, calls):
    """TensorFlow returns what their gradients need through the same results."""

    def grads(flag):
        with tf.GradientTape() as tape:
            scaled = tf.cond(flag, *in_two_ways(loop))
        return tape.gradient(scaled, loop.weights)

    function = tf.function(grads, autograph=False) if calls else grads
    run(lambda flag: loop.apply(function(flag)), True)
    assert loop.origins() == [(SCALED,)]


def test_each_of_three_sides_scales_in_its_own_way(loop):
    one, other = in_two_ways(loop)

    @tf.function(autograph=False)  # XLA on TensorFlow 2.4 does not compile its gradient
    def step(which):
        with tf.GradientTape() as tape:
            scaled = tf.switch_case(which, [one, other, lambda: one() * loop.loss()])
        return loop.apply(tape.gradient(scaled, loop.weights))

    step(tf.constant(1))
    assert loop.origins() == [(SCALED,)]


def test_two_gradients_of_sides_that_each_scale_in_their_own_way(loop, run):
    """The first gradient's branch assigns nothing to what the second one reads."""

    def program(flag):
        is_finite = tf.math.is_finite(tf.reduce_sum(loop.scaled()[0]))
        loss = tf.cond(tf.logical_and(is_finite, flag), *in_two_ways(loop))
        first = loop.apply(tf.gradients(loss, loop.weights))
        return first + loop.apply(tf.gradients(loss, loop.weights))

    run(program, True)
    assert loop.origins() == [(SCALED,), (SCALED,)]


def test_unscaled_outside_and_clipped_in_a_branch(loop, run):
    def program(flag):
        grads = loop.unscaled(loop.scaled())
        return tf.cond(flag, lambda: loop.apply(clip(grads)), lambda: loop.apply(grads))

    run(program, True)
    assert loop.origins() == [(CHANGED, "check"), (UNTOUCHED, "check")]


def test_logged_only(loop, run):
    """Row 3: a step that was unscaled and not applied says nothing of the next."""

    def program():
        norm = tf.linalg.global_norm(loop.unscaled(loop.scaled()))
        return norm + loop.apply(loop.scaled())

    run(program)
    assert loop.origins() == [(SCALED,)]


def test_a_dropped_batch(loop, run):
    def program():
        dropped = loop.unscaled(loop.scaled(), "dropped")
        kept = loop.unscaled(loop.scaled(), "kept")
        return tf.reduce_sum(dropped[0]) + loop.apply(clip(kept))

    run(program)
    assert loop.origins() == [(CHANGED, "kept")]


def test_two_lists_of_one_loss(loop, run):
    def program():
        first, second = loop.scaled()
        return loop.apply(loop.unscaled([first])) + loop.apply([second])

    run(program)
    assert loop.origins() == [(UNTOUCHED, "check"), (SCALED,)]


def test_one_optimizer_unscales_for_two(loop, run):
    """Row 8: clipped by the norm of all, each applies its part."""

    def program():
        first, second = loop.scaled()
        both = loop.unscaled([first], 1) + loop.unscaled([second], 2)
        both = clip(both)
        return loop.apply(both[:1]) + loop.apply(both[1:])

    run(program)
    assert loop.origins() == [(CHANGED, 1, 2), (CHANGED, 1, 2)]


@pytest.mark.parametrize("calls", [False, True])
def test_each_of_several_that_go_through_one_operation(loop, run, calls):
    """As `tf.custom_gradient` makes one of all that goes in and comes out."""

    def through(*values):
        return tf.identity_n(values)

    def program():
        scaled = loop.scaled()[0]
        number, kept = tf.constant(3.0), tf.constant([1.0, 1.0])
        free = scaled / loop.factor()
        function = tf.function(through) if calls else through
        first, _, number, free, kept = function(scaled, 2, number, free, kept)
        value = loop.apply([first * number * kept])
        return value + loop.apply([free * number]) + loop.apply([kept * number])

    run(program)
    assert loop.origins() == [(SCALED,), (CHANGED,), (UNKNOWN,)]


def test_a_function_traced_between(loop, run):
    """Row 9: another function that scales is traced between unscale and apply."""

    @tf.function
    def other():
        return tf.reduce_sum(loop.scaled()[0])

    def program():
        grads = loop.unscaled(loop.scaled())
        return other() + loop.apply(clip(grads))

    run(program)
    assert loop.origins() == [(CHANGED, "check")]


def test_applied_before_anything_was_scaled(loop, run):
    """Row 10: an argument comes from nowhere, before a loss was scaled and after."""
    run(lambda x: loop.apply([x]), 1.0)
    run(lambda: loop.apply(loop.scaled()))
    run(lambda x: loop.apply([x]), 1.0)
    assert loop.origins() == [(UNKNOWN,), (SCALED,), (UNKNOWN,)]


@pytest.mark.parametrize(
    "divide",
    [
        lambda grad, factor: grad / factor,
        lambda grad, factor: grad * (1.0 / factor),
        lambda grad, factor: tf.math.reciprocal(tf.cast(factor, grad.dtype)) * grad,
    ],
)
def test_unscaled_by_hand(loop, run, divide):
    def program():
        grads = loop.scaled()
        return loop.apply(clip([divide(each, loop.factor()) for each in grads]))

    run(program)
    assert loop.origins() == [(CHANGED,)]


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        (lambda grad, s: grad / (s / 1000.0), CHANGED),
        (lambda grad, s: grad / tf.maximum(s, 1.0), CHANGED),
        (lambda grad, s: grad * s**-1, CHANGED),
        (lambda grad, _: grad / tf.norm(grad), CHANGED),
        (lambda grad, s: grad * tf.norm(grad) / s**2, CHANGED),
        (lambda grad, _: tf.sign(grad), CHANGED),
        (lambda grad, s: grad * tf.norm(grad) / s, SCALED),
        (lambda grad, _: tf.clip_by_value(grad, -1.0, 1.0), UNSURE),
        (lambda grad, _: tf.clip_by_norm(grad, 1.0), UNSURE),
        (lambda grad, s: tf.clip_by_value(grad / s, -1.0, 1.0), CHANGED),
        (lambda grad, s: tf.clip_by_value(grad, -s, s) / s, CHANGED),
        (lambda grad, s: grad + tf.stop_gradient(grad / s), UNSURE),
        (lambda grad, _: tf.tanh(grad), UNSURE),
        (lambda grad, s: tf.tanh(grad / s), CHANGED),
    ],
)
def test_by_hand_in_every_form(loop, run, divide, expected):
    def program():
        return loop.apply([divide(each, loop.factor()) for each in loop.scaled()])

    run(program)
    assert loop.origins() == [(expected,)]


def test_arguments_constants_and_none(loop, run):
    def program(x):
        loop.scaled()
        assert loop.history.values.units([None]) == [NOTHING_KNOWN]
        return loop.apply([x, tf.constant(2.0)])

    run(program, 1.0)
    assert loop.origins() == [(UNKNOWN,)]


def test_only_numbers_that_can_be_scaled_count(loop, run):
    """A gradient's shape, its zeros, and whether it is finite are not scaled."""

    def program():
        scaled = loop.scaled()
        grads = loop.unscaled(scaled)
        grads = [tf.reshape(g, tf.shape(s)) for g, s in zip(grads, scaled)]
        flags = [tf.reduce_all(tf.math.is_finite(each)) for each in scaled]
        grads = [tf.where(f, g, 0.0) for f, g in zip(flags, grads)]
        return loop.apply(
            [g + tf.raw_ops.ZerosLike(x=s) for g, s in zip(grads, scaled)]
        )

    run(program)
    assert loop.origins() == [(CHANGED, "check")]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_gradient_penalty(loop, run, unscales):
    def program():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                scaled = loop.loss() * loop.factor()
            grads = inner.gradient(scaled, loop.weights)
            grads = loop.unscaled(grads, "inner")
            penalty = tf.add_n([tf.reduce_sum(each**2) for each in grads])
            scaled = (loop.loss() + penalty) * loop.factor()
        grads = outer.gradient(scaled, loop.weights)
        if unscales:
            grads = clip(loop.unscaled(grads, "outer"))
        return loop.apply(grads)

    run(program)
    expected = (CHANGED, "inner", "outer") if unscales else (SCALED, "inner")
    assert loop.origins() == [expected]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_gradient_penalty_by_hand(loop, run, unscales):
    """The derivative of a division by the loss scale is not an unscaling."""

    def program():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                scaled = loop.loss() * loop.factor()
            grads = inner.gradient(scaled, loop.weights)
            penalty = [tf.reduce_sum((each / loop.factor()) ** 2) for each in grads]
            scaled = tf.add_n(penalty) * loop.factor()
        grads = outer.gradient(scaled, loop.weights)
        if unscales:
            grads = loop.unscaled(grads, "outer")
        return loop.apply(grads)

    run(program)
    assert loop.origins() == [(UNTOUCHED, "outer") if unscales else (SCALED,)]


def test_clipped_in_a_nested_function(loop, run):
    nested = tf.function(clip)

    def program():
        scaled = loop.scaled()
        first = loop.apply(nested(loop.unscaled(scaled)))
        return first + loop.apply(nested(scaled))

    run(program)
    assert loop.origins() == [(CHANGED, "check"), (UNSURE,)]


def test_a_nested_function_returns_both(loop, run):
    nested = tf.function(lambda a, b: ([2.0 * x for x in b], [2.0 * x for x in a]))

    def program():
        scaled = loop.scaled()
        scaled, unscaled = nested(loop.unscaled(scaled), scaled)
        return loop.apply(scaled) + loop.apply(unscaled)

    run(program)
    assert loop.origins() == [(SCALED,), (CHANGED, "check")]


@pytest.mark.parametrize("scales", ["inside", "outside"])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_loss_in_a_nested_function(loop, run, scales, unscales):
    @tf.function
    def nested():
        loss = loop.loss()
        return loss * loop.factor() if scales == "inside" else loss

    def program():
        with tf.GradientTape() as tape:
            loss = nested()
            if scales == "outside":
                loss = loss * loop.factor()
        grads = tape.gradient(loss, loop.weights)
        return loop.apply(loop.unscaled(grads) if unscales else grads)

    run(program)
    assert loop.origins() == [(UNTOUCHED, "check") if unscales else (SCALED,)]


def test_gradients_made_and_unscaled_in_nested_functions(loop, run):
    scaled = tf.function(loop.scaled)
    unscaled = tf.function(loop.unscaled)

    def program():
        grads = scaled()
        return loop.apply(grads) + loop.apply(unscaled(grads))

    run(program)
    assert loop.origins() == [(SCALED,), (CHANGED, "check")]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_loss_computed_again_for_its_gradient(loop, run, unscales):
    again = tf.recompute_grad(lambda x: tf.sin(x) * 2.0)

    def program():
        with tf.GradientTape() as tape:
            scaled = tf.reduce_sum(again(loop.weights[0] * 2.0)) * loop.factor()
        grads = [tape.gradient(scaled, loop.weights[0])]
        return loop.apply(loop.unscaled(grads) if unscales else grads)

    run(program)
    assert loop.origins() == [(UNTOUCHED, "check") if unscales else (SCALED,)]


def test_a_function_called_for_several(loop, run):
    """What a function returns comes from what it was called with this time."""
    nested = tf.function(lambda x: x * 2.0)

    def program(x):
        scaled = loop.scaled()[:1]
        unscaled = [loop.unscaled(scaled, i)[0] for i in range(2)]
        value = loop.apply([nested(tf.stack([x, x]))])
        for each in (*scaled, *unscaled):
            value += loop.apply([nested(each)])
        return value

    run(program, 1.0)
    assert loop.origins() == [(UNKNOWN,), (SCALED,), (CHANGED, 0), (CHANGED, 1)]


def test_on_replicas(loop, mirrored):
    @tf.function
    def program():
        def step():
            grads = loop.scaled()
            loop.apply(grads)
            context = tf.distribute.get_replica_context()
            clipped = context.all_reduce("SUM", clip(loop.unscaled(grads)))
            return loop.apply(clipped)

        return mirrored.run(step)

    program()
    count = mirrored.num_replicas_in_sync
    assert [each[0][0] for each in loop.seen].count(SCALED) == count
    assert [each[0][0] for each in loop.seen].count(CHANGED) == count


@pytest.mark.parametrize("unscales", [True, False])
def test_a_loss_with_a_loop_in_it(loop, run, unscales):
    """The gradient of a loop is a loop, which nobody marked anything in."""

    def program():
        with tf.GradientTape() as tape:
            loss = loop.loss()
            for _ in tf.range(2):
                loss = loss * 2.0 + loop.loss()
            loss = loss * loop.factor()
        grads = tape.gradient(loss, loop.weights)
        return loop.apply(clip(loop.unscaled(grads)) if unscales else grads)

    run(program)
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_loss_scaled_in_a_loop(loop, run, unscales):
    def program():
        with tf.GradientTape() as tape:
            loss = tf.constant(0.0)
            for _ in tf.range(2):
                loss += loop.loss() * loop.factor()
        grads = tape.gradient(loss, loop.weights)
        return loop.apply(loop.unscaled(grads) if unscales else grads)

    run(program)
    assert loop.origins() == [(UNTOUCHED, "check") if unscales else (SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_loss_scaled_in_a_branch(loop, run, unscales):
    def program(flag):
        with tf.GradientTape() as tape:
            if flag:
                loss = loop.loss() * loop.factor()
            else:
                loss = loop.loss() * 2.0 * loop.factor()
        grads = tape.gradient(loss, loop.weights)
        return loop.apply(clip(loop.unscaled(grads)) if unscales else grads)

    run(program, True)
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_micro_batches_in_map_fn(loop, run, unscales):
    def one(x):
        grads = loop.scaled(x)
        return loop.unscaled(grads) if unscales else grads

    def program(batch):
        types = [tf.float32] * 2
        grads = tf.map_fn(one, batch, fn_output_signature=types)
        return loop.apply([tf.reduce_mean(each, 0) for each in grads])

    run(program, [1.0, 2.0])
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_micro_batches_in_scan(loop, run, unscales):
    def one(total, x):
        grads = loop.scaled(x)
        grads = loop.unscaled(grads) if unscales else grads
        return [a + b for a, b in zip(total, grads)]

    def program(batch):
        totals = tf.scan(one, batch, initializer=zeros(loop))
        return loop.apply([each[-1] for each in totals])

    run(program, [1.0, 2.0])
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


def test_switch_case(loop, run):
    def program(which):
        grads = loop.scaled()
        branches = [
            lambda: clip(loop.unscaled(grads, 0)),
            lambda: zeros(loop),
            lambda: loop.unscaled(loop.scaled(), 2),
        ]
        return loop.apply(tf.switch_case(which, branches))

    run(program, 2)
    assert loop.origins() == [(CHANGED, 0, 2)]


def test_a_loop_in_a_branch_in_a_function_in_a_loop(loop, run):
    @tf.function
    def nested(grads, flag):
        if flag:
            for _ in tf.range(2):
                grads = clip(loop.unscaled(loop.scaled()))
        return grads

    def program(flag):
        total = zeros(loop)
        for _ in tf.range(2):
            total = [a + b for a, b in zip(total, nested(zeros(loop), flag))]
        return loop.apply(total)

    run(program, True)
    assert loop.origins() == [(CHANGED, "check")]


def test_gradients_kept_in_a_tensor_array(loop, run):
    def program(count):
        array = tf.TensorArray(tf.float32, count, element_shape=[2])
        for i in tf.range(count):
            array = array.write(i, loop.unscaled(loop.scaled())[0])
        return loop.apply([tf.reduce_sum(array.stack(), 0)])

    run(program, 3)
    assert loop.origins() == [(CHANGED, "check")]


def test_applied_within_the_loop(loop, run):
    """Row 13. What the iteration before left in `total` cannot be told yet."""

    def program(count):
        total, value = zeros(loop), 0.0
        for i in tf.range(count):
            grads = clip(loop.unscaled(loop.scaled()))
            total = [a + b for a, b in zip(total, grads)]
            if i % 2 == 1:
                value += loop.apply(total)
        return value

    run(program, 4)
    assert loop.origins() == [(CHANGED, "check")]


@pytest.mark.parametrize("unscales", [True, False])
def test_accumulated_in_variables(loop, unscales):
    kept = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in loop.weights]

    def program(count):
        for _ in tf.range(count):
            grads = loop.scaled()
            if unscales:
                grads = clip(loop.unscaled(grads))
            for variable, grad in zip(kept, grads):
                variable.assign_add(grad)
        value = tf.cond(
            count > 1, lambda: loop.apply([v.read_value() for v in kept]), lambda: 0.0
        )
        for variable in kept:
            variable.assign(tf.zeros_like(variable))
        return value + loop.apply([v.read_value() for v in kept])

    tf.function(program)(tf.constant(2))
    expected = (CHANGED, "check") if unscales else (SCALED,)
    assert loop.origins() == [expected, (UNKNOWN,)]


def test_weights_that_were_assigned_are_no_way(loop, run):
    """A second step in one function: its weights come from the first's gradients."""

    def program():
        grads = loop.unscaled(loop.scaled(), 1)
        for weight, grad in zip(loop.weights, grads):
            weight.assign_sub(grad)
        first = loop.apply(loop.scaled())
        return first + loop.apply(clip(loop.unscaled(loop.scaled(), 2)))

    run(program)
    assert loop.origins() == [(SCALED,), (CHANGED, 2)]


def test_indexed_slices(loop):
    table = tf.Variable(tf.ones([4, 2]))

    @tf.function
    def program():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2]) ** 2) * loop.factor()
        grad = tape.gradient(loss, table)
        values = loop.unscaled([grad.values])[0]
        unscaled = tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        clipped = tf.clip_by_norm(unscaled, 1.0)
        loop.seen = [[origin(loop.history, each)] for each in (grad, unscaled, clipped)]

    program()
    assert loop.origins() == [(SCALED,), (UNTOUCHED, "check"), (CHANGED, "check")]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_loop_over_a_dataset(loop, unscales):
    def program(dataset):
        first, second = zeros(loop)
        for x in dataset:
            grads = loop.scaled(x)
            grads = loop.unscaled(grads) if unscales else grads
            first, second = first + grads[0], second + grads[1]
            if x > 100.0:
                break
        return loop.apply([first, second])

    tf.function(program)(tf.data.Dataset.from_tensor_slices([1.0, 2.0]))
    assert loop.origins() == [(CHANGED, "check") if unscales else (SCALED,)]


def test_a_loss_scale_of_eager_mode(loop):
    """A constant, made before the function that captures it."""
    factor = tf.constant(1024.0)

    @tf.function
    def program():
        loop.history.note_read(factor)
        with tf.GradientTape() as tape:
            loss = loop.loss() * factor
        grads = tape.gradient(loss, loop.weights)
        return loop.apply(grads) + loop.apply(loop.unscaled(grads))

    program()
    assert loop.origins() == [(SCALED,), (UNTOUCHED, "check")]


def test_every_loss_scale_that_it_is_scaled_by(loop, run):
    def program():
        grads = [a + b for a, b in zip(loop.scaled(), loop.scaled())]
        assert [len(each.reads) for each in loop.history.values.units(grads)] == [2, 2]
        return loop.apply(grads)

    run(program)
    assert loop.origins() == [(SCALED,)]


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_graph_of_version_1(unscales, v2):
    loss_scale = DynamicLossScale(1024.0)
    history = History(loss_scale)

    def body(i, total, before):
        scale = tf.identity(1024.0)
        history.note_read(scale)
        grad = tf.compat.v1.gradients(tf.reduce_sum(weight**2) * scale, weight)[0]
        if unscales:
            unit = history.values.units([grad])
            grad = grad / 1024.0
            history.note_unscaled([grad], "check", [], unit)
        return i + 1, total + before, grad

    switch = "enable_control_flow_v2" if v2 else "disable_control_flow_v2"
    with tf.Graph().as_default():
        was = tf.compat.v1.control_flow_v2_enabled()
        getattr(tf.compat.v1, switch)()
        try:
            weight = tf.ones([2])
            start = (0, tf.zeros([2]), tf.zeros([2]))
            total = tf.while_loop(lambda i, *_: i < 3, body, start)[1]
        finally:
            if was:
                tf.compat.v1.enable_control_flow_v2()
        kinds = {
            each.type for each in tf.compat.v1.get_default_graph().get_operations()
        }
        assert ("NextIteration" in kinds) is not v2
        found = origin(history, total)
    assert found == ((CHANGED, "check") if unscales else (SCALED,))


def test_no_graph_is_kept(loop):
    program = tf.function(lambda: loop.apply(clip(loop.unscaled(loop.scaled()))))
    graph = weakref.ref(program.get_concrete_function().graph)
    assert graph() is not None
    loop.seen.clear()
    del program
    gc.collect()
    assert graph() is None


def test_a_history_is_not_kept_by_a_graph(loop):
    program = tf.function(lambda: loop.apply(clip(loop.unscaled(loop.scaled()))))
    program()
    history = weakref.ref(loop.history)
    loop.history = loop.scale._noted_by = None
    gc.collect()
    tf.constant(1.0) + 1.0  # who listens to eager mode notices here
    assert history() is None


def test_two_loss_scales_do_not_meet(loop, run):
    other = History(DynamicLossScale(1024.0))

    def program():
        grads = loop.scaled()
        assert [origin(other, each) for each in grads] == [(UNKNOWN,)] * 2
        return loop.apply(grads)

    run(program)
    assert loop.origins() == [(SCALED,)]


@pytest.mark.parametrize("unscales", [True, False])
def test_how_often_a_loop_runs_depends_on_what_its_condition_compares(
    loop, run, unscales
):
    def program():
        grads = loop.unscaled(loop.scaled()) if unscales else loop.scaled()
        halved = tf.while_loop(
            lambda grads: tf.linalg.global_norm(grads) > 1.0,
            lambda grads: [[each / 2.0 for each in grads]],
            [grads],
        )
        return loop.apply(halved[0])

    run(program)
    assert loop.origins() == [(CHANGED, "check") if unscales else (UNSURE,)]


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("number", [0.0, 0.1])
def test_what_a_branch_chooses_depends_on_its_flag(loop, run, unscales, number):
    def program():
        grads = loop.unscaled(loop.scaled()) if unscales else loop.scaled()
        flag = tf.reduce_max(grads[0]) > number
        one = tf.cond(flag, lambda: tf.ones([2]), lambda: -tf.ones([2]))
        return loop.apply([one])

    run(program)
    expected = (CHANGED, "check") if unscales else (UNSURE if number else CHANGED,)
    assert loop.origins() == [expected]


def test_trained_variables_hold_numbers_and_others_hold_anything(loop, run):
    other = tf.Variable([1.0, 2.0])

    def program():
        first = loop.scaled()[0]
        return loop.apply([first + loop.weights[0]]) + loop.apply([first + other])

    loop.history.values.note_trained(loop.weights)
    run(program)
    assert loop.origins() == [(UNSURE,), (SCALED,)]
