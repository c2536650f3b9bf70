"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

Begin with `findings`: its table, at the end, says what a monitor may say, and when.
`causes` names why steps are skipped again and again, `asking` says how often a thing is
told, and `callback` is the Keras callback. The others hold what these know: `reading`,
of an optimizer at one time; `watched`, through a training; `batches`, in which batches
steps were skipped; `model`, of a model and its data; `statistics` puts back what a bad
batch leaves in it.
"""
