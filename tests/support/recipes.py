"""Inputs of operations that no search found: their shapes depend on each other.

Of each operation: its inputs, as in `recipes.json` a dtype, a shape or values, and how
many there are if it is a list; and its attributes.
"""

from __future__ import annotations


def _floats(*shapes):
    return [["float32", list(shape), 0] for shape in shapes]


def _ints(*values):
    return [["int32", value, 0] for value in values]


IMAGE, FILTER, RESULT = (1, 4, 4, 2), (2, 2, 2, 3), (1, 3, 3, 3)
VOLUME, FILTER3, RESULT3 = (1, 3, 3, 3, 2), (2, 2, 2, 2, 3), (1, 2, 2, 2, 3)
EACH, VALID = (2, 2, 2, 2), {"strides": [1, 1, 1, 1], "padding": "VALID"}
VALID3 = {"strides": [1, 1, 1, 1, 1], "padding": "VALID"}
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
POOL3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 1, 1, 1, 1], "padding": "VALID"}
MEANS = _floats((2,), (2,), (2,), (2,))
DILATION = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "VALID"}
INDICES = [["int64", [[0, 1], [1, 0]], 0]]
SHAPE = [["int64", [2, 2], 0]]
BOXES = [["float32", [2, 4], 0], ["int32", [0, 0], 0]]

BY_HAND = {
    kind: {"inputs": inputs, "attrs": attrs}
    for kind, inputs, attrs in [
        ("Conv2D", _floats(IMAGE, FILTER), VALID),
        ("Conv2DBackpropInput", _ints(IMAGE) + _floats(FILTER, RESULT), VALID),
        (
            "Conv2DBackpropFilter",
            _floats(IMAGE) + _ints(FILTER) + _floats(RESULT),
            VALID,
        ),
        ("DepthwiseConv2dNative", _floats(IMAGE, EACH), VALID),
        (
            "DepthwiseConv2dNativeBackpropInput",
            _ints(IMAGE) + _floats(EACH, (1, 3, 3, 4)),
            VALID,
        ),
        (
            "DepthwiseConv2dNativeBackpropFilter",
            _floats(IMAGE) + _ints(EACH) + _floats((1, 3, 3, 4)),
            VALID,
        ),
        ("Conv3D", _floats(VOLUME, FILTER3), VALID3),
        ("Conv3DBackpropInputV2", _ints(VOLUME) + _floats(FILTER3, RESULT3), VALID3),
        (
            "Conv3DBackpropFilterV2",
            _floats(VOLUME) + _ints(FILTER3) + _floats(RESULT3),
            VALID3,
        ),
        ("AvgPoolGrad", _ints(IMAGE) + _floats((1, 2, 2, 2)), POOL),
        ("AvgPool3DGrad", _ints(VOLUME) + _floats((1, 2, 2, 2, 2)), POOL3),
        ("MaxPoolGrad", _floats(IMAGE, (1, 2, 2, 2), (1, 2, 2, 2)), POOL),
        ("MaxPool3D", _floats(VOLUME), POOL3),
        (
            "MaxPool3DGrad",
            _floats(VOLUME, (1, 2, 2, 2, 2), (1, 2, 2, 2, 2)),
            POOL3,
        ),
        (
            "MaxPoolV2",
            _floats(IMAGE) + _ints([1, 2, 2, 1], [1, 2, 2, 1]),
            {"padding": "VALID"},
        ),
        ("DepthToSpace", _floats((1, 2, 2, 4)), {"block_size": 2}),
        ("Einsum", [["float32", [3, 3], 2]], {"equation": "ij,jk->ik"}),
        ("RFFT", _floats((2, 4)) + _ints([4]), {}),
        ("RFFT3D", _floats((4, 4, 4)) + _ints([4, 4, 4]), {}),
        ("IRFFT", [["complex64", [2, 3], 0], *_ints([4])], {}),
        ("IRFFT3D", [["complex64", [4, 4, 3], 0], *_ints([4, 4, 4])], {}),
        ("FusedBatchNormV3", _floats(IMAGE) + MEANS, {"is_training": True}),
        (
            "FusedBatchNormGradV3",
            [*_floats(IMAGE, IMAGE), *MEANS],
            {"is_training": True},
        ),
        ("FusedBatchNormGrad", _floats(IMAGE, IMAGE) + MEANS[1:], {}),
        (
            "RaggedTensorToTensor",
            [
                ["int64", [2, 2], 0],
                ["float32", [3], 0],
                ["float32", [], 0],
                ["int64", [0, 2, 3], 1],
            ],
            {"row_partition_types": ["ROW_SPLITS"]},
        ),
        *(
            (kind, _floats((2,)) + _ints(0, 2, 2) + _floats(()), {})
            for kind in ("MatrixDiagV2", "MatrixDiagV3")
        ),
        (
            "StridedSliceGrad",
            _ints([3], [0], [2], [1]) + _floats((2,)),
            {},
        ),
        (
            "SparseTensorDenseMatMul",
            [*INDICES, *_floats((2,)), *SHAPE, *_floats((2, 2))],
            {},
        ),
        (
            "SparseFillEmptyRows",
            [*INDICES, *_floats((2,)), *SHAPE, *_floats(())],
            {},
        ),
        (
            "SparseSlice",
            [*INDICES, *_floats((2,)), *SHAPE, ["int64", [0, 0], 0], *SHAPE],
            {},
        ),
        (
            "CropAndResize",
            [*_floats(IMAGE), *BOXES, *_ints([2, 2])],
            {},
        ),
        (
            "CropAndResizeGradImage",
            [*_floats((2, 2, 2, 2)), *BOXES, *_ints(IMAGE)],
            {"T": "float32"},
        ),
        (
            "ImageProjectiveTransformV2",
            [*_floats(IMAGE, (1, 8)), *_ints([4, 4])],
            {"interpolation": "NEAREST"},
        ),
        (
            "ImageProjectiveTransformV3",
            [*_floats(IMAGE, (1, 8)), *_ints([4, 4]), *_floats(())],
            {"interpolation": "NEAREST"},
        ),
        ("Dilation2DBackpropInput", _floats(IMAGE, (2, 2, 2), (1, 3, 3, 2)), DILATION),
        ("Dilation2DBackpropFilter", _floats(IMAGE, (2, 2, 2), (1, 3, 3, 2)), DILATION),
        (
            "ScaleAndTranslate",
            [*_floats(IMAGE), *_ints([4, 4]), *_floats((2,), (2,))],
            {},
        ),
        ("TridiagonalMatMul", _floats((1, 3), (1, 3), (1, 3), (3, 2)), {}),
        ("TensorListFromTensor", _floats((2, 2)) + _ints([2]), {}),
    ]
}
