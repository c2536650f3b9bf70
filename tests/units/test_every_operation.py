"""Each operation's rule against experiment: what is sure of its results is so.

Its floating inputs are in turn numbers, free of the loss scale, zeros, held by a
variable, or scaled. It is run at several loss scales; the ratio of the results must be
the power that the rule is sure of.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from experiment import RECIPES, Operation
from limits import TENSORFLOW

from lossscale.units.moves import NOTHING, STARTS
from lossscale.units.operations import result
from lossscale.units.table import EACH, RULES
from lossscale.units.unit import FREE, Operands, Unit

#: Before any test asks for the rule of one that has none.
NAMED = {*RULES, *EACH, *NOTHING, *STARTS}
#: Operations that have a rule, and were not tried: what it rests on.
UNTRIED = {
    "tensors in lists and arrays, which hold what is written": """
        OptionalGetValue TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3
        TensorArrayGradWithShape TensorArrayReadV3 TensorArrayScatterV3
        TensorArraySizeV3 TensorArraySplitV3 TensorArrayWriteV3
        TensorListConcat TensorListConcatV2 TensorListElementShape TensorListGather
        TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
        TensorListPushBackBatch TensorListResize TensorListScatterIntoExistingList
        TensorListScatterV2 TensorListSetItem TensorListStack""",
    "data sets, which hold what they are made of": """
        AssertCardinalityDataset BatchDataset BatchDatasetV2 CacheDataset CacheDatasetV2
        ConcatenateDataset FilterDataset FinalizeDataset IteratorGetNext
        IteratorGetNextSync MaxIntraOpParallelismDataset ModelDataset OptimizeDataset
        OptimizeDatasetV2 OptionsDataset PaddedBatchDataset PaddedBatchDatasetV2
        ParallelBatchDataset PrefetchDataset PrivateThreadPoolDataset RebatchDataset
        RebatchDatasetV2 RepeatDataset ShardDataset ShuffleAndRepeatDataset
        ShuffleAndRepeatDatasetV2 ShuffleDataset ShuffleDatasetV2 ShuffleDatasetV3
        SkipDataset TakeDataset TakeWhileDataset TensorDataset TensorSliceDataset
        UnbatchDataset ZipDataset""",
    "sums over devices": """
        AllToAll CollectiveAllToAllV2 CollectiveAllToAllV3 CollectiveBcastSend
        CollectiveBcastSendV2 CollectiveGather CollectiveGatherV2 CollectivePermute
        CollectiveReduce CollectiveReduceScatterV2 CollectiveReduceV2 CollectiveReduceV3
        CrossReplicaSum NcclAllReduce NcclBroadcast NcclReduce""",
    "XLA's own, named as what it does for TensorFlow": """
        XlaAllReduce XlaConv XlaConvV2 XlaDot XlaDotV2 XlaDynamicSlice
        XlaDynamicUpdateSlice XlaEinsum XlaGather XlaOptimizationBarrier XlaPad
        XlaReduceScatter XlaSharding XlaSort XlaSpmdFullToShardShape
        XlaSpmdShardToFullShape""",
    "variables, and what loops of tf.compat.v1 hand on": """
        Enter Exit Merge NextIteration RefEnter RefExit RefIdentity RefMerge
        RefNextIteration RefSwitch Switch Placeholder PlaceholderWithDefault
        ReadVariableOp ResourceGather ResourceGatherNd Const""",
    "random, so that no two runs agree": """
        FractionalAvgPool FractionalMaxPool RandomCrop RandomShuffle""",
    "no kernel for the CPU, or none that runs alone, or that ends": """
        AccumulateNV2 Cholesky DebugGradientRefIdentity DebugIdentity DebugIdentityV3
        MatrixExponential MatrixLogarithm ParallelConcat TopK EnsureShape
        HistogramFixedWidth BatchToSpace""",
    "the same as the version beside it, in other shapes": """
        FFTND IFFTND IRFFTND RFFTND FusedBatchNormGradV2 MaxPool3DGradGrad
        MaxPoolGradGradV2 MaxPoolGradV2 MaxPoolGradWithArgmax ScaleAndTranslateGrad
        SegmentMaxV2 SegmentMinV2 SegmentSumV2""",
    "names of our own, and what ours alone makes": "CastToBool CastToCounts Snapshot",
}
#: Operations whose results have an exponent in the experiment, and none by their rule,
#: which is right for other inputs or attributes.
TOO_CAREFUL = """
    AudioSpectrogram Bitcast CTCBeamSearchDecoder CTCGreedyDecoder
    DenseCountSparseOutput Dilation2DBackpropFilter Dilation2DBackpropInput
    FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient
    FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient
    FusedBatchNormGrad FusedBatchNormGradV3 FusedBatchNormV3 IsotonicRegression
    KMC2ChainInitialization KmeansPlusPlusInitialization LinSpace ListDiff
    MatrixDiagPartV2 MatrixDiagPartV3 MaxPoolGrad NearestNeighbors NextAfter
    NotEqual OneHot Polygamma Print Prod QuantizeAndDequantizeV2
    QuantizeAndDequantizeV4 RaggedBincount RaggedCountSparseOutput RaggedGather
    RaggedRange RaggedTensorToSparse Select SelectV2 SoftmaxCrossEntropyWithLogits
    SparseBincount SparseCountSparseOutput SparseFillEmptyRows SparseSoftmax
    SparseToDense TensorScatterUpdate TensorStridedSliceUpdate UniformQuantize
    UnsortedSegmentProd
    """


def test_each_operation_with_a_rule_is_tried_or_its_reason_is_named():
    untried = set(" ".join(UNTRIED.values()).split())
    assert not untried & set(RECIPES)
    known = {kind for kind in NAMED if hasattr(tf.raw_ops, kind)}
    assert sorted(known - set(RECIPES) - untried) == []


@pytest.mark.parametrize(
    "kind",
    # Quick tests take every sixth of them.
    [
        pytest.param(kind, marks=[pytest.mark.slow] if number % 6 else [])
        for number, kind in enumerate(sorted(RECIPES))
    ],
)
def test_what_is_sure_is_so(kind):
    operation = Operation(kind)
    if not operation.runs():
        assert TENSORFLOW < (2, 21)
        pytest.skip("this TensorFlow does not take these inputs")
    wrong = map(operation.wrong, operation.assignments())
    assert [each for each in wrong if each] == []


@pytest.mark.slow
@pytest.mark.skipif(TENSORFLOW < (2, 21), reason="operations change")
def test_which_rules_are_more_careful_than_the_experiment():
    careful = [kind for kind in sorted(RECIPES) if Operation(kind).is_careful()]
    assert careful == TOO_CAREFUL.split()


def test_an_operation_without_a_rule_is_unsure():
    scaled = Unit(1.0, 1.0)
    for kind in set(RECIPES) - NAMED:
        if "Grad" not in kind and "Backprop" not in kind:
            assert not result(kind, [scaled], Operands()).is_sure
            assert result(kind, [FREE], Operands()).is_sure


def test_a_rule_that_is_sure_and_wrong_is_seen(monkeypatch):
    monkeypatch.setitem(RULES, "Round", RULES["Identity"])
    operation = Operation("Round")
    assert any(map(operation.wrong, operation.assignments()))
