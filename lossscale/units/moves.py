"""Operations that add up, move or choose among values, and those that make new ones."""

from __future__ import annotations

from typing import Dict, FrozenSet, Optional, TypeVar

from lossscale.units.rules import Rule, moved, moves

#: A rule, or a sequence of rules, one for each result.
OneOrMore = TypeVar("OneOrMore")


def names(text: str) -> FrozenSet[str]:
    """Returns the types of operations that a text lists."""
    return frozenset(text.split())


def rules(rule: OneOrMore, kinds: str) -> Dict[str, OneOrMore]:
    """Returns a table in which each listed type has this rule, or a rule per result."""
    return dict.fromkeys(kinds.split(), rule)


#: The results of these do not depend on the values of their inputs.
NOTHING = names(
    """
    Snapshot Shape ShapeN Size Rank BroadcastGradientArgs BroadcastArgs ConcatOffset
    EmptyTensorList TensorListReserve TensorListElementShape TensorListLength
    TensorArrayV3 TensorArraySizeV3 RandomUniform RandomUniformInt
    RandomStandardNormal TruncatedNormal StatelessRandomUniform
    StatelessRandomUniformV2 StatelessRandomNormal StatelessRandomNormalV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2
    """
)
#: These may make zeros, whatever their inputs are. The value is the position of the
#: input that fills the result. None: the result is always zeros.
STARTS: Dict[str, Optional[int]] = {"ZerosLike": None, "Const": 0, "Fill": 1}
#: These return the value of a variable.
READS = names("ReadVariableOp ResourceGather ResourceGatherNd")
#: These return the loss scale itself if they are given it.
SAME = names(
    """
    Identity IdentityN Cast StopGradient Enter Switch RefSwitch Merge Reshape
    ReadVariableOp PreventGradient EnsureShape ExpandDims Squeeze
    """
)
#: Operations that add up, move or choose keep the unit of their inputs.
MOVES: Dict[str, Rule] = {
    # These add up, move or choose among all of their inputs.
    **rules(
        moved(),
        """
        Add AddV2 AddN Sub AccumulateNV2 BiasAdd BiasAddV1 BiasAddGrad Neg Abs
        ComplexAbs Conj Real Imag Complex Relu LeakyRelu Identity IdentityN Cast
        StopGradient PreventGradient CheckNumerics CheckNumericsV2 Copy
        CopyHost DeepCopy DebugIdentity DebugIdentityV2 DebugIdentityV3
        DebugGradientIdentity DebugGradientRefIdentity EnsureShape
        GuaranteeConst Placeholder PlaceholderWithDefault Enter Exit
        NextIteration RefEnter RefExit RefNextIteration RefIdentity Merge
        RefMerge OptionalFromValue OptionalGetValue Pack ParallelConcat Unpack
        Diag DiagPart MatrixDiag MatrixDiagPart MatrixSetDiag Squeeze LogicalAnd
        LogicalOr LogicalNot AvgPool AvgPool3D MaxPool MaxPool3D FFT FFT2D FFT3D
        IFFT IFFT2D IFFT3D SpaceToDepth DepthToSpace ExtractImagePatches
        ExtractVolumePatches XlaSharding XlaSpmdFullToShardShape
        XlaSpmdShardToFullShape XlaSort XlaOptimizationBarrier XlaClusterOutput
        NcclAllReduce NcclReduce TensorDataset TensorSliceDataset ZipDataset
        ConcatenateDataset
        """,
    ),
    # These do so with their first input. The others say which elements.
    **rules(
        moved(0),
        """
        Sum Mean Max Min EuclideanNorm All Any SegmentSum SegmentMean SegmentMax
        SegmentMin SegmentSumV2 SegmentMaxV2 SegmentMinV2 UnsortedSegmentSum
        UnsortedSegmentMax UnsortedSegmentMin SparseSegmentSum SparseSegmentMean
        SparseSegmentSqrtN SparseSegmentSumWithNumSegments
        SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments
        SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad Cumsum
        Reshape Transpose ConjugateTranspose ExpandDims BroadcastTo Tile Slice
        StridedSlice SplitV RandomShuffle StatelessShuffle RandomCrop Gather
        GatherV2 GatherNd ResourceGather ResourceGatherNd ReadVariableOp Reverse
        ReverseV2 ReverseSequence Roll Pad MirrorPad MirrorPadGrad BatchToSpace
        BatchToSpaceND SpaceToBatch SpaceToBatchND DynamicPartition
        MatrixBandPart Switch RefSwitch NthElement MaxPoolV2 RFFT RFFT2D RFFT3D
        IRFFT IRFFT2D IRFFT3D FFTND IFFTND RFFTND IRFFTND ResizeBilinear
        ResizeBicubic ResizeArea ResizeNearestNeighbor ResizeNearestNeighborGrad
        ScaleAndTranslate ScaleAndTranslateGrad Print ImageProjectiveTransformV2
        SparseAddGrad TensorListFromTensor TensorListStack TensorListGetItem
        TensorListPopBack TensorListGather TensorListConcat TensorListConcatV2
        TensorListResize TensorListSplit TensorListScatter TensorListScatterV2
        CollectiveReduce CollectiveReduceV2 CollectiveReduceV3 CollectiveGather
        CollectiveGatherV2 CollectiveReduceScatterV2 CollectiveAllToAllV2
        CollectiveAllToAllV3 CollectivePermute CollectiveBcastSend
        CollectiveBcastSendV2 NcclBroadcast CrossReplicaSum AllToAll
        XlaAllReduce XlaReduceScatter XlaGather XlaDynamicSlice IteratorGetNext
        IteratorGetNextSync TakeWhileDataset TakeDataset SkipDataset
        RepeatDataset ShardDataset ShuffleDataset ShuffleDatasetV2
        ShuffleDatasetV3 ShuffleAndRepeatDataset ShuffleAndRepeatDatasetV2
        BatchDataset BatchDatasetV2 ParallelBatchDataset PaddedBatchDataset
        PaddedBatchDatasetV2 UnbatchDataset PrefetchDataset CacheDataset
        CacheDatasetV2 FilterDataset OptionsDataset ModelDataset OptimizeDataset
        OptimizeDatasetV2 FinalizeDataset AssertCardinalityDataset
        MaxIntraOpParallelismDataset PrivateThreadPoolDataset RebatchDataset
        RebatchDatasetV2
        """,
    ),
    **rules(
        moved(1),
        """
        Split ScatterNd AvgPoolGrad AvgPool3DGrad SparseReduceSum SparseReduceMax
        SparseFillEmptyRowsGrad TensorArrayConcatV3
        """,
    ),
    **rules(
        moved(2),
        """
        Bincount DenseBincount TensorArrayReadV3 TensorArrayGatherV3
        """,
    ),
    **rules(moved(4), "StridedSliceGrad"),
    **rules(
        moved(0, 1),
        """
        MatrixSetDiagV2 MatrixSetDiagV3 LinSpace TensorListPushBack XlaPad
        TensorListPushBackBatch TensorListScatterIntoExistingList
        XlaDynamicUpdateSlice
        """,
    ),
    **rules(
        moved(0, 2),
        """
        TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMax
        TensorScatterMin InplaceUpdate InplaceAdd InplaceSub PadV2
        TensorListSetItem ScatterNdNonAliasingAdd MatrixDiagPartV2
        MatrixDiagPartV3
        """,
    ),
    **rules(moved(0, 3), "ImageProjectiveTransformV3"),
    **rules(moved(0, 4), "MatrixDiagV2 MatrixDiagV3 TensorStridedSliceUpdate"),
    **rules(moved(1, 2), "RaggedTensorToTensor"),
    **rules(
        moved(1, 3),
        """
        SparseTensorDenseAdd SparseDenseCwiseAdd TensorArraySplitV3
        """,
    ),
    **rules(
        moved(2, 3),
        """
        OneHot SparseToDense TensorArrayWriteV3 TensorArrayScatterV3
        """,
    ),
    "ConcatV2": moves(lambda count: range(count - 1)),
    "Concat": moves(lambda count: range(1, count)),
    **rules(
        moves(lambda count: range(count // 2, count)),
        "DynamicStitch ParallelDynamicStitch",
    ),
}
